"""An OpenAI-compatible server for engines that have none: a front that speaks HTTP, and an engine process behind it.

    python -m benchmarks.peers.shim PORT TOKENIZER_FOLDER ENGINE_COMMAND...

They are two processes, so that HTTP never waits for a step that holds Python's lock. Between them go JSON lines:

    front → engine   {"id": 7, "prompt": [ids], "max_tokens": 64, "adapter": null}
    engine → front   {"id": 7, "tokens": [ids], "finished": false}

The front answers `/v1/completions` for token ids, streamed, and nothing else: what the harness sends; the
field `adapter` names a LoRA adapter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from kvarto.models.tokenizer import Tokenizer, tokenizer_from_folder

LINE_BYTES = 1 << 24
DONE = b"data: [DONE]\n\n"


class Front:
    """Passes requests to the engine process and its tokens back to the streams that wait for them."""

    def __init__(self, tokenizer: Tokenizer, command: list[str]) -> None:
        self._tokenizer = tokenizer
        self._command = command
        self._streams: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._ids = itertools.count()

    async def open(self, app: web.Application) -> None:
        """Start the engine; its lines are read in the background."""
        pipe = asyncio.subprocess.PIPE
        engine = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, limit=LINE_BYTES)
        assert engine.stdin is not None, "asked for"
        assert engine.stdout is not None, "asked for"
        self._requests = engine.stdin
        self._reader = asyncio.create_task(self._read(engine.stdout))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """One stream."""
        body = json.loads(await request.read())
        number = next(self._ids)
        events = self._streams[number] = asyncio.Queue()
        line = {
            "id": number,
            "prompt": body["prompt"],
            "max_tokens": body["max_tokens"],
            "adapter": body.get("adapter"),
        }
        self._requests.write(json.dumps(line).encode() + b"\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens, is_finished = 0, False
        while not is_finished:
            event = await events.get()
            num_tokens, is_finished = num_tokens + len(event["tokens"]), event["finished"]
            text = self._tokenizer.decode(event["tokens"], skip_special_tokens=False)
            choice = {"index": 0, "text": text, "finish_reason": "length" if is_finished else None}
            await response.write(_event({"choices": [choice]}))
        del self._streams[number]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
        await response.write(_event({"choices": [], "usage": usage}) + DONE)
        return response

    async def _read(self, answers: asyncio.StreamReader) -> None:
        async for line in answers:
            event = json.loads(line)
            await self._streams[event["id"]].put(event)
        signal.raise_signal(signal.SIGTERM)  # the engine has ended, and the harness sees that we have


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def main() -> None:
    """Listen until the process is told to end."""
    port, folder, *command = sys.argv[1:]
    front = Front(tokenizer_from_folder(Path(folder)), command)
    app = web.Application(client_max_size=LINE_BYTES)
    app.on_startup.append(front.open)
    app.router.add_post("/v1/completions", front.complete)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, access_log=None, shutdown_timeout=1)


if __name__ == "__main__":
    main()
