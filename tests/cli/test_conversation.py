"""A chat sends all turns, keeps what was answered, and forgets what was not."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import pytest

from kvarto.cli.chat import chat
from kvarto.cli.conversation import Conversation, talk
from kvarto.cli.openai_client import ServerRefused
from tests.cli.fake_server import FakeServer, serving


def conversation(url: str, **fields: Any) -> Conversation:
    return Conversation(url, None, "fake-model", {"max_tokens": 2}, **fields)


async def test_each_turn_carries_those_before_it() -> None:
    server = FakeServer()
    async with serving(server) as url:
        talked = conversation(url, system="be brief")
        pieces: list[str] = []
        timing = await talked.ask("one", pieces.append)
        await talked.ask("two", pieces.append)
    assert pieces == ["t0 ", "t1 "] * 2
    assert timing.num_output_tokens == 2
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["be brief", "one", "t0 t1 ", "two"]
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.bodies[0]["max_tokens"] == 2


async def test_a_turn_that_was_never_answered_is_forgotten() -> None:
    async with serving(FakeServer(fail_every=1)) as url:
        talked = conversation(url)
        with pytest.raises(ServerRefused):
            await talked.ask("one", print)
    assert talked.turns == []


async def test_an_answer_cut_short_is_kept_as_far_as_it_came() -> None:
    async with serving(FakeServer(cut_after=1)) as url:
        talked = conversation(url)
        with pytest.raises(ServerRefused):
            await talked.ask("one", lambda piece: None)
    assert [turn["content"] for turn in talked.turns] == ["one", "t0 "]


async def test_cancelling_an_answer_closes_its_stream() -> None:
    server = FakeServer(delay_s=0.05)
    async with serving(server) as url:
        talked = Conversation(url, None, "fake-model", {"max_tokens": 1000})
        heard = asyncio.Event()
        asking = asyncio.create_task(talked.ask("one", lambda piece: heard.set()))
        await heard.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        for _ in range(100):
            if server.num_in_flight == 0:
                break
            await asyncio.sleep(0.02)
        assert server.num_in_flight == 0


def in_thread(server: FakeServer, call: Callable[[str], None]) -> None:
    async def run() -> None:
        async with serving(server) as url:
            await asyncio.to_thread(call, url)

    asyncio.run(run())


def test_the_loop_reads_turns_until_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n/reset\ntwo\n/exit\nthree\n"))
    server = FakeServer()
    in_thread(server, lambda url: talk(conversation(url), shows_stats=True))
    assert [[turn["content"] for turn in body["messages"]] for body in server.bodies] == [["one"], ["two"]]
    assert "2 tokens" in capsys.readouterr().out


def test_quick_asks_once_the_first_model_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    in_thread(server, lambda url: chat(url=url, quick="one", seed=7, max_tokens=3))
    assert capsys.readouterr().out == "t0 t1 t2 \n"
    assert server.bodies[0]["model"] == "fake-model"
    assert server.bodies[0]["seed"] == 7
    assert "temperature" not in server.bodies[0]
