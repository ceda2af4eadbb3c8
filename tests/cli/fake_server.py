"""An OpenAI-compatible server that says what it is told to, and notes what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCABULARY = list(range(100, 160))


@dataclass
class FakeServer:
    """Streams one piece per token. `fail_every` answers each n-th request with 500."""

    delay_s: float = 0.0
    fail_every: int | None = None
    cut_after: int | None = None
    """End the stream after that many pieces, without `[DONE]`."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_in_flight: int = 0
    peak_in_flight: int = 0
    url: str = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}, {"id": "other"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": VOCABULARY, "count": len(VOCABULARY)})

    async def metrics(self, request: web.Request) -> web.Response:
        """As if each request loaded an adapter."""
        return web.Response(
            text=f'kvarto:adapter_loads_total{{model_name="x"}} {len(self.bodies)}\n'
            f'kvarto:adapter_steps_total{{model_name="x"}} {2 * len(self.bodies)}\n'
            f'kvarto:adapters_in_steps_total{{model_name="x"}} {5 * len(self.bodies)}\n'
            f'kvarto:adapter_step_bytes_total{{model_name="x"}} {2048 * len(self.bodies)}\n'
            'kvarto:adapter_bytes{model_name="x",tier="device"} 7\nother 1\n'
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if self.fail_every is not None and len(self.bodies) % self.fail_every == 0:
            return web.json_response({"error": {"message": "the cat sat on it"}}, status=500)
        self.num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
        try:
            return await self._stream(request, body)
        finally:
            self.num_in_flight -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = body.get("max_tokens", 3)
        for index in range(num_tokens):
            if index == self.cut_after:
                return response
            await asyncio.sleep(self.delay_s)
            piece = f"t{index} "
            choice = {"index": 0, "delta": {"content": piece}} if "messages" in body else {"index": 0, "text": piece}
            await response.write(b": ping\n\n" + self._event({"choices": [choice], "usage": None}))
        prompt = body.get("prompt", ())
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        usage |= {"prompt_tokens_details": {"cached_tokens": len(prompt) // 2}}
        await response.write(self._event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    def _event(self, event: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(event).encode() + b"\n\n"


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[str]:
    """Listen on a free port; the URL."""
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server.url
    finally:
        await runner.cleanup()
