"""Chunks that are sent within the call: the same chunks in the same order, whether their reader keeps up or not."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from kvarto.server.outlet import Outlet


class Reader:
    """An ASGI `send` that waits before each chunk while its gate is closed, as uvicorn's does, and once after it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.chunks: list[bytes] = []
        self.error: Exception | None = None
        self.num_frees = 0

    async def send(self, message: Message) -> None:
        has_to_wait = not self.gate.is_set()
        if has_to_wait:
            await self.gate.wait()
        assert message["type"] == "http.response.body"
        assert message["more_body"] is True
        if self.error is not None:
            raise self.error
        self.chunks.append(message["body"])
        if has_to_wait:
            await asyncio.sleep(0)

    def on_free(self) -> None:
        self.num_frees += 1


async def passes(num_turns: int = 5) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def test_a_chunk_is_gone_when_write_returns() -> None:
    reader = Reader()
    outlet = Outlet(reader.send, reader.on_free)
    for index in range(3):
        outlet.write(b"%d" % index)
        assert outlet.is_free
        assert len(reader.chunks) == index + 1
    assert reader.num_frees == 0


async def test_a_chunk_that_waits_is_sent_once_and_then_the_outlet_is_free() -> None:
    reader = Reader()
    outlet = Outlet(reader.send, reader.on_free)
    outlet.write(b"a")
    for waiting in (b"b", b"c"):
        reader.gate.clear()
        outlet.write(waiting)
        await passes()
        assert not outlet.is_free
        assert waiting not in reader.chunks
        reader.gate.set()
        await passes()
        assert outlet.is_free
    outlet.write(b"d")
    assert reader.chunks == [b"a", b"b", b"c", b"d"]
    assert reader.num_frees == 2


async def test_what_fails_later_is_raised_by_the_next_write() -> None:
    reader = Reader()
    outlet = Outlet(reader.send, reader.on_free)
    reader.error = RuntimeError("at once")
    with pytest.raises(RuntimeError, match="at once"):
        outlet.write(b"a")
    reader.gate.clear()
    reader.error = RuntimeError("later")
    outlet.write(b"b")
    reader.gate.set()
    await passes()
    assert reader.num_frees == 1
    with pytest.raises(RuntimeError, match="later"):
        outlet.write(b"c")
    assert reader.chunks == []


async def test_a_closed_outlet_sends_nothing_more() -> None:
    reader = Reader()
    outlet = Outlet(reader.send, reader.on_free)
    outlet.close()
    reader.gate.clear()
    outlet.write(b"a")
    await passes()
    outlet.close()
    await passes()
    reader.gate.set()
    await passes()
    assert (reader.chunks, reader.num_frees) == ([], 0)
