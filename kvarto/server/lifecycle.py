"""The life of a server process: bind, load, serve, drain, end.

The first SIGTERM or SIGINT drains: `/readyz` turns red, new requests are refused with 503, running ones finish, and
the process ends with 0. A second one ends it at once; streams then close with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
import uvicorn
import uvloop

from kvarto.core.dtype import DType
from kvarto.core.errors import UsageError
from kvarto.engine.client import EngineClient
from kvarto.engine.config import EngineConfig
from kvarto.engine.settings import check_settings
from kvarto.engine.token_table import TokenTable
from kvarto.models.hub import resolve
from kvarto.models.model import Model, open_model
from kvarto.server.app import build_app, package_version
from kvarto.server.body import BodyReader
from kvarto.server.config import ServerConfig
from kvarto.server.listening import ListeningSocket
from kvarto.server.metrics import ServerMetrics
from kvarto.server.prompts import Prompts
from kvarto.server.served_model import ServedModel
from kvarto.server.service import Service
from kvarto.server.startup import Phases, Say, capacity_line, curl_line

KEEP_ALIVE_S = 30
LAST_BYTES_S = 10
"""After the drain, clients get that long to read what was already made."""


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
        model = open_model(path, DType.F32)  # the engine opens it again, in its own precision
        try:
            model.files.close()
            if model.chat_template is not None:
                model.chat_template.warm()
            served = _served_model(model, config)
            uvloop.run(_serve(config, msgspec.structs.replace(engine, model=str(path)), served, place, phases, say))
        finally:
            model.close()
    finally:
        place.close()


async def _serve(
    config: ServerConfig, engine: EngineConfig, model: ServedModel, place: ListeningSocket, phases: Phases, say: Say
) -> None:
    metrics = ServerMetrics()
    client = EngineClient(
        engine,
        model.tokens,
        eos_token_ids=model.eos_token_ids,
        silence_limit_s=config.engine_silence_limit_s,
        observer=metrics,
        on_phase=phases.begin,
    )
    ending = _Ending(client, say)
    prompts = Prompts(model)
    try:
        if not await ending.unless_asked(client.start()):
            return
        phases.end()
        bodies = BodyReader(config.max_request_bytes, strict_fields=config.strict_fields)
        service = Service(client, model, config, bodies, prompts, metrics)
        place.listen()
        _say_ready(service, engine, place.url, phases, say)
        await ending.serve(_http_server(service), place.socket)
    finally:
        prompts.close()
        await client.close()


class _Ending:
    """Turns signals into the two ways to end."""

    def __init__(self, client: EngineClient, say: Say) -> None:
        self._client = client
        self._say = say
        self._asked = asyncio.Event()
        self._http: uvicorn.Server | None = None
        self._draining: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take_signal)

    async def unless_asked(self, start: Coroutine[Any, Any, object]) -> bool:
        """Load; False when a signal came first."""
        loading = asyncio.create_task(start)
        asked = asyncio.create_task(self._asked.wait())
        await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if loading.done():
            loading.result()
            return True
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return False

    async def serve(self, http: uvicorn.Server, bound: socket.socket) -> None:
        """Answer HTTP until the end."""
        self._http = http
        if not self._asked.is_set():
            await http.serve(sockets=[bound])

    def _take_signal(self) -> None:
        if self._http is None:
            self._asked.set()
        elif self._draining is None:
            if self._client.num_open:
                self._say(f"finishing {self._client.num_open} requests; a second signal ends at once")
            self._draining = asyncio.ensure_future(self._drain(self._http))
        else:
            self._draining.cancel()
            self._http.should_exit = self._http.force_exit = True

    async def _drain(self, http: uvicorn.Server) -> None:
        await self._client.drain()
        http.should_exit = True


class _HttpServer(uvicorn.Server):
    """Uvicorn, with signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def _http_server(service: Service) -> uvicorn.Server:
    config = service.config
    return _HttpServer(
        uvicorn.Config(
            build_app(service),
            log_config=None,
            access_log=config.access_log,
            lifespan="off",
            ws="none",
            server_header=False,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
    )


def _served_model(model: Model, config: ServerConfig) -> ServedModel:
    return ServedModel(
        names=config.served_model_name or (model.name,),
        root=model.name,
        tokenizer=model.tokenizer,
        tokens=TokenTable(model.tokenizer),
        chat_template=model.chat_template,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.generation_defaults if config.generation_config == "auto" else {},
        created=int(time.time()),
    )


def _say_ready(service: Service, engine: EngineConfig, url: str, phases: Phases, say: Say) -> None:
    ready, model = service.engine.ready, service.model
    say(ready.layout)
    say(capacity_line(ready, engine.device))
    say(f"ready in {phases.total_s:.1f} s · {ready.fingerprint} · {url}")
    has_chat = model.chat_template is not None
    say(curl_line(url, model.name, has_chat=has_chat, needs_key=bool(service.config.api_key)))


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


def _set_up_logging(config: ServerConfig) -> None:
    """Warnings to stderr, unless the caller has set up logging; access lines only when asked for."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if config.access_log else logging.WARNING)
