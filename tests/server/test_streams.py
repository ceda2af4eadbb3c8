"""Clients that leave, streams that fail, engines that die in between: what goes over the wire then."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvarto.engine.config import FaultPlan
from kvarto.engine.outputs import ChoiceOutput
from kvarto.server import event_stream, outlet
from kvarto.server.completions import CompletionAnswer
from kvarto.server.middleware import RequestId
from kvarto.server.protocol import Completion
from tests.server.running import Running, running
from tests.server.test_api import text_of

MESSAGES = [{"role": "user", "content": "a"}]


async def idle(server: Running) -> None:
    """Wait until neither client nor engine knows of a request."""
    async with asyncio.timeout(10):
        while server.engine.num_open or (await server.engine.stats()).num_running:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [1, 8])
async def test_a_client_that_leaves_a_stream_frees_everything(n: int) -> None:
    async with running("fake?step_s=0.005") as server:
        body = {"messages": MESSAGES, "max_tokens": 4000, "stream": True, "n": n, "logprobs": True}
        async with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
            assert server.engine.num_open == 1
        await idle(server)
        assert server.service.metrics.ended["abort"] == 1


async def leave_after(request: Coroutine[Any, Any, object], seconds: float) -> None:
    """Ask, and close the connection before the answer is complete."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request, seconds)


async def test_a_client_that_leaves_before_the_answer_frees_everything() -> None:
    async with running("fake?step_s=0.005") as server:
        for stream in (False, True):
            body = {"prompt": [[5], [6]], "max_tokens": 4000, "n": 2, "stream": stream, "stop": ["@"]}
            await leave_after(server.post("/v1/completions", body), 0.2)
            await idle(server)
        assert server.engine.can_admit
        assert server.service.metrics.ended == {"abort": 4}


async def test_random_cuts_leave_nothing_behind() -> None:
    async with running("fake?step_s=0.002") as server:

        async def cut(index: int) -> None:
            body = {"prompt": [5, index], "max_tokens": 4000, "stream": index % 2 == 0, "n": 1 + index % 3}
            await leave_after(server.post("/v1/completions", body), 0.01 * (1 + index % 40))

        await asyncio.gather(*(cut(index) for index in range(60)))
        await idle(server)


async def test_a_poisonous_request_gets_500_and_its_neighbours_their_streams() -> None:
    faults = FaultPlan(abort_on_tokens=(66, 6))
    async with running("fake?step_s=0.002", faults=faults) as server:
        neighbours = [
            asyncio.create_task(server.events("/v1/completions", {"prompt": [5, index], "seed": 7, "max_tokens": 80}))
            for index in range(4)
        ]
        poison = await server.post("/v1/completions", {"prompt": [66, 6, 1], "stream": True})
        assert poison.status_code == 500
        assert poison.json()["error"]["code"] == "engine_died"
        for index, events in enumerate(await asyncio.gather(*neighbours)):
            assert events[-1] == "[DONE]"
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            assert text == text_of([5, index], 80)
        assert (await server.http.get("/livez")).status_code == 200


async def test_an_error_after_the_first_byte_is_an_event_and_no_done() -> None:
    async with running("fake?step_s=0.01") as server:
        body = {"prompt": [5], "max_tokens": 4000, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            await server.engine.close()
            rest = [line async for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert error["code"] == "unavailable"
        assert "data: [DONE]" not in rest
        assert (await server.post("/v1/completions", {"prompt": [5]})).status_code == 503
        assert (await server.http.get("/health")).status_code == 503


async def test_silent_streams_are_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stops itself and nothing replaces it for a while: the stream opens late and then pings."""
    monkeypatch.setattr(event_stream, "PING_S", 0.1)
    monkeypatch.setattr("kvarto.server.answer.PING_S", 0.1)
    async with running("fake?step_s=0.35") as server:
        body = {"prompt": [5], "seed": 7, "max_tokens": 3, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines.count(": ping") >= 4
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of([5], 3)
        assert lines[-1] == "data: [DONE]"


async def test_readiness_follows_the_engine() -> None:
    async with running("fake?step_s=0.01") as server:
        assert (await server.http.get("/readyz")).json() == {"status": "running"}
        assert server.engine.engine_pid is not None
        server.engine._engine.command = ("/bin/sleep", "30")
        os.kill(server.engine.engine_pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while (response := await server.http.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
        assert response.json() == {"status": "restarting"}
        assert (await server.http.get("/livez")).status_code == 200


async def test_stream_headers() -> None:
    async with running() as server:
        body = {"prompt": [5], "max_tokens": 1, "stream": True}
        response = await server.http.post("/v1/completions", json=body)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers


async def test_a_reader_who_pauses_waits_alone_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the sockets between hold; meanwhile others are served, and their reader's pace is theirs."""
    num_waits = 0

    def waiting(*arguments: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        return rest(*arguments)

    rest = outlet._rest
    monkeypatch.setattr(outlet, "_rest", waiting)
    async with running() as server:
        body = {"prompt": [5], "seed": 7, "n": 16, "max_tokens": 4000, "stream": True}
        reader, writer = await paused_stream(server, body)
        async with asyncio.timeout(60):
            while not num_waits:
                await asyncio.sleep(0.01)
            neighbour = await server.events("/v1/completions", {"prompt": [6], "seed": 7, "max_tokens": 20})
            assert neighbour[-1] == "[DONE]"
            texts = [""] * 16
            while (line := await reader.readline()) != b"data: [DONE]\n":
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    texts[choice["index"]] += choice["text"]
        assert texts == [text_of([5], 4000, choice=choice) for choice in range(16)]
        writer.close()
        await idle(server)


async def test_a_reader_who_leaves_while_the_server_waits_for_it_frees_everything() -> None:
    async with running() as server:
        _, writer = await paused_stream(server, {"prompt": [5], "n": 16, "max_tokens": 4000, "stream": True})
        await asyncio.sleep(0.3)
        writer.close()
        await idle(server)


async def paused_stream(server: Running, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that was asked for, over a socket that takes little, and of which nothing is read yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    host, port = server.url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 16)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + content)
    return reader, writer


async def test_what_no_one_expected_ends_its_own_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(answer: CompletionAnswer, output: ChoiceOutput) -> Completion | None:
        if answer.usage().completion_tokens > 3 and output.logprobs is not None:
            raise ZeroDivisionError("a secret")
        return encode(answer, output)

    encode = CompletionAnswer.chunk
    monkeypatch.setattr(CompletionAnswer, "chunk", chunk)
    async with running("fake?step_s=0.002") as server:
        body = {"prompt": [5], "seed": 7, "max_tokens": 20}
        broken, whole = await asyncio.gather(
            server.events("/v1/completions", {**body, "logprobs": 1}), server.events("/v1/completions", body)
        )
        assert len(broken) == 4
        assert json.loads(broken[-1])["error"]["code"] == "internal_error"
        assert "secret" not in broken[-1]
        assert whole[-1] == "[DONE]"
        assert len(whole) == 21
        await idle(server)


async def test_head_and_end_of_a_stream_pass_the_middlewares() -> None:
    """Its chunks do not, and nobody needs them to."""
    seen: list[tuple[str, bool]] = []

    class Watching(RequestId):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def watched(message: Message) -> None:
                seen.append((message["type"], message.get("more_body", False)))
                await send(message)

            await super().__call__(scope, receive, watched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvarto.server.app.RequestId", Watching)
        async with running() as server:
            events = await server.events("/v1/completions", {"prompt": [5], "seed": 7, "max_tokens": 9})
    assert len(events) == 10
    assert seen == [("http.response.start", False), ("http.response.body", False)]
