"""A server whose model is known: it waits for the engine, answers HTTP, and ends (`ending.py`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import uvicorn

from kvarto.engine.client import EngineClient
from kvarto.engine.config import EngineConfig
from kvarto.engine.supervisor import Loading
from kvarto.engine.token_table import TokenTable
from kvarto.models.model import Model
from kvarto.server.app import build_app
from kvarto.server.body import BodyReader
from kvarto.server.config import ServerConfig
from kvarto.server.ending import Ending
from kvarto.server.listening import ListeningSocket
from kvarto.server.metrics import ServerMetrics
from kvarto.server.prompts import Prompts
from kvarto.server.served_model import ServedModel
from kvarto.server.service import Service
from kvarto.server.startup import Phases, Say, capacity_line, curl_line

KEEP_ALIVE_S = 30
LAST_BYTES_S = 10
"""After the drain, clients get that long to read what was already made."""


async def serve(
    config: ServerConfig,
    engine: EngineConfig,
    model: Model,
    loading: Loading,
    ending: Ending,
    place: ListeningSocket,
    phases: Phases,
    say: Say,
) -> None:
    """Wait until the engine of `loading` serves, and answer HTTP at `place` until a signal ends it."""
    metrics, served = ServerMetrics(), _served_model(model, config)
    client = EngineClient(
        engine,
        served.tokens,
        eos_token_ids=served.eos_token_ids,
        silence_limit_s=config.engine_silence_limit_s,
        observer=metrics,
        on_phase=phases.begin,
    )
    prompts = Prompts(served)
    try:
        if not await ending.unless_asked(client.start(loading)):
            return
        phases.end()
        bodies = BodyReader(config.max_request_bytes, strict_fields=config.strict_fields)
        service = Service(client, served, config, bodies, prompts, metrics)
        place.listen()
        _say_ready(service, engine, place.url, phases, say)
        await ending.serve(client, _http_server(service), place.socket)
    finally:
        prompts.close()
        await client.close()


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
