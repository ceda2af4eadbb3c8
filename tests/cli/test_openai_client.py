"""Streams are read as they were sent, however their bytes were cut on the way."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest

from kvarto.cli import openai_client
from kvarto.cli.openai_client import OpenAIClient, ServerRefused

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def sending(parts: Sequence[bytes]) -> AsyncIterator[OpenAIClient]:
    """A client of a server that answers with these bytes, each part apart from the next."""

    has_ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # a client that has heard enough leaves
            await reader.readuntil(b"\r\n\r\n")
            for part in (HEAD, *parts):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.0005)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        has_ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            async with OpenAIClient(f"http://127.0.0.1:{port}") as client:
                yield client
        finally:
            await has_ended.wait()


async def heard(parts: Sequence[bytes]) -> list[dict[str, object]]:
    async with sending(parts) as client:
        return [event async for event in client.stream("/v1/completions", {})]


def cut(rng: random.Random, data: bytes, num_parts: int) -> list[bytes]:
    ends = [0, *sorted(rng.randrange(len(data)) for _ in range(num_parts)), len(data)]
    return [data[start:end] for start, end in pairwise(ends) if start < end]


async def test_events_are_whole_wherever_their_bytes_are_cut() -> None:
    rng = random.Random(1)
    events = [{"text": text, "index": index} for index, text in enumerate(("a", "\n", "ß\r", "data: x", "", " " * 500))]
    for end in ("\n\n", "\r\n\r\n"):
        lines = [f"data: {json.dumps(event)}{end}: ping{end}" for event in events]
        data = ("".join(lines) + "data: [DONE]" + rng.choice(("", end))).encode()
        for num_parts in (0, 1, 10, 60):
            assert await heard(cut(rng, data, num_parts)) == events


async def test_a_stream_that_breaks_off_says_so() -> None:
    for data in (b"", b'data: {"text": "a"}\n\n', b'data: {"text": "a"}\n\ndata: [DO'):
        with pytest.raises(ServerRefused, match="ended without|not JSON"):
            await heard([data] if data else [])


async def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(ServerRefused, match="no more"):
        await heard([b'data: {"error": {"message": "no more"}}\n\ndata: [DONE]\n\n'])


async def test_an_event_without_an_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "LINE_BYTES", 1000)
    with pytest.raises(ServerRefused, match="longer than 1000 bytes"):
        await heard([b"data: " + b"x" * 400] * 20)
