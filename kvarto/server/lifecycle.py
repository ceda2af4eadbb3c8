"""The start of a server process: check, bind, find the model, load; then `serving.py` takes over.

The engine process begins to load before this process imports its HTTP stack and builds the tokenizer: both take about
as long, and neither needs the other. So nothing heavy is imported at the top of this file.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from kvarto.core.errors import UsageError
from kvarto.engine.config import EngineConfig, with_secret
from kvarto.engine.settings import check_settings
from kvarto.engine.supervisor import load_engine
from kvarto.models.hub import resolve
from kvarto.server.config import ServerConfig
from kvarto.server.ending import Ending
from kvarto.server.listening import ListeningSocket
from kvarto.server.startup import Phases, Say, package_version

if TYPE_CHECKING:
    from kvarto.models.model import Model


def run(config: ServerConfig, engine: EngineConfig, *, say: Say = print) -> None:
    """Serve until a signal ends it. Raises KvartoError when it cannot start; nothing is left behind."""
    _check(config)
    check_settings(engine)
    _set_up_logging(config)
    place = ListeningSocket(config)
    try:
        phases = Phases(say)
        say(f"Kvarto {package_version()} · {engine.model}")
        phases.begin("find")
        path = resolve(engine.model, say)
        engine = with_secret(msgspec.structs.replace(engine, model=str(path)))
        uvloop.run(_serve(config, engine, place, phases, say))
    finally:
        place.close()


async def _serve(config: ServerConfig, engine: EngineConfig, place: ListeningSocket, phases: Phases, say: Say) -> None:
    ending = Ending(say)
    loading = asyncio.create_task(load_engine(engine, on_phase=phases.begin, on_progress=phases.advance))
    try:
        model = await asyncio.to_thread(_open_model, Path(engine.model))
        try:
            from kvarto.server.serving import serve

            await serve(config, engine, model, loading, ending, place, phases, say)
        finally:
            model.close()
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


def _open_model(path: Path) -> Model:
    """The model's texts: tokenizer, template, settings. Its weights are the engine's. Imports what `serve` needs."""
    from kvarto.core.dtype import DType
    from kvarto.models.model import open_model

    model = open_model(path, DType.F32)
    try:
        model.files.close()
        if model.chat_template is not None:
            model.chat_template.start()
        import kvarto.server.serving  # noqa: F401  while the template's process starts

        if model.chat_template is not None:
            model.chat_template.warm()
    except BaseException:
        model.close()
        raise
    return model


def _check(config: ServerConfig) -> None:
    if config.generation_config not in ("auto", "vllm"):
        raise UsageError(f"`--generation-config {config.generation_config}` is unknown; take `auto` or `vllm`")
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        raise UsageError("HTTPS needs both `--ssl-keyfile` and `--ssl-certfile`")
    for path in (config.ssl_keyfile, config.ssl_certfile):
        if path is not None and not os.path.isfile(path):
            raise UsageError(f"`{path}` is not a file; HTTPS needs a key and a certificate")
    if config.root_path and not config.root_path.startswith("/"):
        raise UsageError(f"`--root-path {config.root_path}` must begin with `/`")
    if not all(config.served_model_name):
        raise UsageError("a `--served-model-name` is empty; leave it out to take the model's own")
    if not all(config.api_key):
        raise UsageError("an `--api-key` is empty; leave it out to let everybody ask")
    if not all(config.admin_key):
        raise UsageError("an `--admin-key` is empty; leave it out to let nobody load adapters")


def _set_up_logging(config: ServerConfig) -> None:
    """Warnings to stderr, unless the caller has set up logging; access lines only when asked for."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if config.access_log else logging.WARNING)
