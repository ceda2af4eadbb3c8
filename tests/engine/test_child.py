"""What an engine process says arrives whole and in order, whether its reader waits for it or is called."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvarto.core.errors import EngineDied
from kvarto.engine.child import EngineChild
from kvarto.engine.config import EngineConfig
from kvarto.engine.messages import FromEngine, Phase

_CHILD = """
import argparse, socket, sys, time
from kvarto.engine.frames import encode_frame
from kvarto.engine.messages import Phase
parser = argparse.ArgumentParser()
parser.add_argument("--fd", type=int)
connection = socket.socket(fileno=parser.parse_args().fd)
data = b"".join(encode_frame(Phase(str(index))) for index in range(9))
"""
JUNK = "connection.sendall(data + b'\\x05\\0\\0\\0junk!' + data); time.sleep(60)"


@asynccontextmanager
async def child_that(does: str) -> AsyncIterator[EngineChild]:
    child = await EngineChild.start(EngineConfig(model="m"), (sys.executable, "-c", _CHILD + does))
    try:
        async with asyncio.timeout(30):
            yield child
    finally:
        await child.reap()


async def test_first_it_is_waited_for_and_then_it_calls() -> None:
    said: list[FromEngine] = []
    async with child_that(
        "[(connection.sendall(data[i : i + 1]), time.sleep(1e-3)) for i in range(len(data))]"
    ) as child:
        said += [await child.receive() for _ in range(3)]
        death = await child.follow(said.append)
    assert said == [Phase(str(index)) for index in range(9)]
    assert "exit code 0" in str(death)


async def test_after_nonsense_nothing_is_believed() -> None:
    for num_awaited in (0, 4):
        said: list[FromEngine] = []
        async with child_that(JUNK) as child:
            said += [await child.receive() for _ in range(num_awaited)]
            death = await child.follow(said.append)
        assert said == [Phase(str(index)) for index in range(9)]
        assert "not a message of the engine" in str(death)


async def test_who_waits_hears_of_nonsense_and_of_the_end() -> None:
    for does, match in ((JUNK, "not a message"), ("connection.sendall(data); sys.exit(7)", "exit code 7")):
        async with child_that(does) as child:
            for _ in range(9):
                await child.receive()
            for _ in range(2):
                with pytest.raises(EngineDied, match=match):
                    await child.receive()


async def test_a_listener_that_fails_hears_no_more() -> None:
    for error in (EngineDied("none of ours says that"), ZeroDivisionError("a defect")):
        heard: list[FromEngine] = []

        def take(message: FromEngine, error: Exception = error, heard: list[FromEngine] = heard) -> None:
            heard.append(message)
            if len(heard) == 2:
                raise error

        async with child_that(JUNK) as child:
            if isinstance(error, EngineDied):
                assert await child.follow(take) is error
            else:
                with pytest.raises(ZeroDivisionError):
                    await child.follow(take)
        assert heard == [Phase("0"), Phase("1")]
