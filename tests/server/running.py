"""A real server on a free port, in front of the fake engine process: what the tests of the HTTP surface talk to."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

import tests.engine.fake_engine as fake
from kvarto.core.errors import InvalidRequest
from kvarto.engine.client import EngineClient
from kvarto.engine.config import EngineConfig
from kvarto.engine.token_table import TokenTable
from kvarto.server.app import build_app
from kvarto.server.body import BodyReader
from kvarto.server.config import ServerConfig
from kvarto.server.listening import ListeningSocket
from kvarto.server.metrics import ServerMetrics
from kvarto.server.prompts import Prompts
from kvarto.server.served_model import ServedModel
from kvarto.server.service import Service

COMMAND = (sys.executable, str(Path(fake.__file__)))


class ByteTokenizer:
    """Ids are bytes; 256 to 299 are unused; id 0 is special; `add_special_tokens` puts a 1 in front."""

    max_token_chars = 1

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (token_id for token_id in ids if not (skip_special_tokens and token_id == fake.EOS))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == fake.EOS


class PlainTemplate:
    """`user: text` lines."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        if kwargs.get("refuse"):
            raise InvalidRequest("the chat template refused the messages: no", param="messages")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant: " * add_generation_prompt


@dataclass
class Running:
    """A server that answers, and a client that speaks to it."""

    url: str
    http: httpx.AsyncClient
    engine: EngineClient
    service: Service

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of each event of a stream, comments left out."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]


@asynccontextmanager
async def running(
    model: str = "fake",
    *,
    server: ServerConfig | None = None,
    defaults: Mapping[str, Any] | None = None,
    has_template: bool = True,
    **settings: Any,
) -> AsyncIterator[Running]:
    config = server or ServerConfig(port=0)
    metrics = ServerMetrics()
    tokenizer = ByteTokenizer()
    served = ServedModel(
        names=config.served_model_name or ("org/fake",),
        root="fake",
        tokenizer=tokenizer,
        tokens=TokenTable(tokenizer),
        chat_template=PlainTemplate() if has_template else None,
        eos_token_ids=(fake.EOS,),
        sampling_defaults=defaults or {},
        created=1,
    )
    engine = EngineClient(
        EngineConfig(model=model, seed=1, **settings),
        tokenizer,
        eos_token_ids=(fake.EOS,),
        command=COMMAND,
        observer=metrics,
    )
    bodies = BodyReader(config.max_request_bytes, strict_fields=config.strict_fields)
    service = Service(engine, served, config, bodies, Prompts(served), metrics)
    http = uvicorn.Server(uvicorn.Config(build_app(service), log_config=None, lifespan="off", ws="none"))
    http.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    place = ListeningSocket(config)
    try:
        await engine.start()
        place.listen()
        serving = asyncio.create_task(http.serve(sockets=[place.socket]))
        async with httpx.AsyncClient(base_url=place.url, timeout=30) as client:
            yield Running(place.url, client, engine, service)
        http.should_exit = http.force_exit = True
        await serving
    finally:
        service.prompts.close()
        await engine.close()
        place.close()
