"""Bad input: each a 4xx in OpenAI's shape that names the field, and the server and everybody else go on."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvarto.server.config import ServerConfig
from tests.server.running import ByteTokenizer, Running, running
from tests.server.test_api import text_of


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running("fake?max_len=256") as up:
        yield up


MESSAGES = [{"role": "user", "content": "a"}]
# Field values that must be refused, and the field that the error must name.
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 2**31}, "n"), ({"n": True}, "n"), ({"n": "2"}, "n"), ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": 257}, "max_tokens"), ({"max_tokens": [1]}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 99, "max_tokens": 3}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": 1e300}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"), ({"seed": 2**63}, "seed"), ({"seed": "x"}, "seed"),
    ({"logit_bias": {"300": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stop": [""]}, "stop"), ({"stop": ["x"] * 17}, "stop"), ({"stop": "x" * 5000}, "stop"), ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [300]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**63]}, "stop_token_ids"), ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"priority": 1}, "priority"), ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream": "yes"}, "stream"),
    ({"best_of": 2}, "best_of"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"guided_json": {}}, "guided_json"),
    ({"chat_template": "x"}, "chat_template"),
    ({"model": 5}, "model"), ({"ignore_eos": 1}, "ignore_eos"),
]  # fmt: skip
BAD_PROMPTS: list[Any] = [
    [], [[]], [1, "a"], [[1], "a"], [-1], [300], [2**63], [[2**31]], [1.0], [True], [None], {"a": 1}, 5, None,
    [1] * 256, ["a"] * 1025,
]  # fmt: skip
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"messages": "hello"}, "messages"), ({"messages": [5]}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"), ({"messages": [{"role": 5, "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": 1}, "logprobs"),
    ({"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": ""}], "continue_final_message": True}, "messages"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"refuse": True}}, "messages"),
    ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({}, "messages"),
]  # fmt: skip
BAD_BODIES: list[bytes] = [
    b"", b"{", b"[]", b"5", b'"x"', b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e400}',
    b'{"prompt": "a", "x": 1e400, "n": 0}', b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "a"} x',
    b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}", b"\x00" * 100,
]  # fmt: skip


def check(response: httpx.Response, param: str | None, what: object, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, (what, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, (what, error)
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert " at 0x" not in error["message"]
    return dict(error)


async def test_each_bad_field_is_named_and_hurts_nobody(server: Running) -> None:
    victim = asyncio.create_task(server.events("/v1/completions", {"prompt": [5], "seed": 7, "max_tokens": 250}))
    for fields, param in BAD_FIELDS:
        check(await server.post("/v1/completions", {"prompt": [5], **fields}), param, fields)
        if "max_tokens" not in fields:
            check(await server.post("/v1/chat/completions", {"messages": MESSAGES, **fields}), param, fields)
    for prompt in BAD_PROMPTS:
        check(await server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}), "prompt", prompt)
    for body, param in BAD_CHATS:
        check(await server.post("/v1/chat/completions", body), param, body)
    for raw in BAD_BODIES:
        response = await server.http.post("/v1/completions", content=raw)
        assert response.status_code == 400, (raw[:40], response.text)
        assert "error" in response.json()
    text = "".join(json.loads(event)["choices"][0]["text"] for event in (await victim)[:-1])
    assert text == text_of([5], 250)
    assert server.engine.num_open == 0
    assert server.engine.num_restarts == 0


async def test_context_errors_can_be_read_by_programs(server: Running) -> None:
    for body in ({"prompt": [5] * 256}, {"prompt": [5] * 200, "max_tokens": 57}, {"prompt": [5] * 300, "stream": True}):
        error = check(
            await server.post("/v1/completions", body), "max_tokens" if "max_tokens" in body else "prompt", body
        )
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 256" in error["message"]


async def test_a_text_that_can_never_fit_is_not_tokenised(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest token of this vocabulary is one character, so 257 characters never fit into 256 tokens."""
    tokenised: list[int] = []
    encode = ByteTokenizer.encode

    def spying(self: ByteTokenizer, text: str, **switches: bool) -> list[int]:
        tokenised.append(len(text))
        return encode(self, text, **switches)

    monkeypatch.setattr(ByteTokenizer, "encode", spying)
    long = "a" * 257
    halves = [{"role": "user", "content": "a" * 129}] * 2
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": [long]}, "prompt"),
        ("/v1/chat/completions", {"messages": halves}, "messages"),
        ("/tokenize", {"prompt": long}, "prompt"),
        ("/tokenize", {"messages": halves}, "messages"),
    ):
        assert check(await server.post(path, body), param, body)["code"] == "context_length_exceeded"
    assert tokenised == []
    cut = {"prompt": long, "truncate_prompt_tokens": 10, "max_tokens": 1}
    assert (await server.post("/v1/completions", cut)).status_code == 200
    assert tokenised == [257]


async def test_a_body_of_millions_of_prompts_holds_nobody_up(server: Running) -> None:
    """Processor seconds of this process, where the server runs too; with the collector on it took five."""
    content = b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}"
    started_s = time.process_time()
    response = await server.http.post("/v1/completions", content=content)
    assert time.process_time() - started_s < 1.5
    assert "at most 1024" in check(response, "prompt", "millions")["message"]
    assert gc.isenabled()


async def test_a_chat_is_told_the_name_that_it_sent(server: Running) -> None:
    error = check(
        await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 300}),
        "max_completion_tokens",
        "too many",
    )
    assert error["code"] == "context_length_exceeded"
    assert "`max_tokens`" not in error["message"]
    assert "lower `max_completion_tokens` to" in error["message"]


async def test_unknown_model_lists_near_names(server: Running) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        error = check(await server.post(path, {**body, "model": "org/fke"}), "model", path, status=404)
        assert error["code"] == "model_not_found"
        assert "`org/fake`" in error["message"]
    assert (await server.http.get("/v1/models/nobody")).status_code == 404


async def test_routing_errors_have_the_same_shape(server: Running) -> None:
    assert check(await server.http.get("/v1/nothing"), None, "path", status=404)["code"] == "not_found"
    for method in ("GET", "POST"):
        slash = await server.http.request(method, "/v1/completions/", headers={"host": "elsewhere"})
        assert check(slash, None, "slash", status=404)["code"] == "not_found"
    assert check(await server.http.get("/v1/completions"), None, "GET", status=405)["code"] == "method_not_allowed"


async def test_unknown_fields_are_accepted_and_named_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        response = await server.post("/v1/completions", {"prompt": [5], "max_tokens": 1, "sparkle": 1, "user": "me"})
        assert response.status_code == 200
    assert [record.getMessage() for record in caplog.records if "sparkle" in record.getMessage()] == [
        "a client sends the field 'sparkle', which this server does not know and ignores"
    ]


async def test_strict_fields_refuses_them() -> None:
    async with running(server=ServerConfig(port=0, strict_fields=True)) as server:
        check(await server.post("/v1/completions", {"prompt": [5], "sparkle": 1}), "sparkle", "sparkle")


async def test_harmless_values_of_unsupported_fields_pass(server: Running) -> None:
    body = {"prompt": [5], "max_tokens": 1, "response_format": {"type": "text"}, "tools": [], "best_of": None}
    assert (await server.post("/v1/completions", body)).status_code == 200


async def test_body_limits() -> None:
    async with running(server=ServerConfig(port=0, max_request_bytes=1000)) as server:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        announced = await server.http.post("/v1/completions", content=b" " * 1001)
        assert check(announced, None, "announced", status=413)["code"] == "request_too_large"
        check(await server.http.post("/v1/completions", content=endless()), None, "chunked", status=413)
        zipped = await server.http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
        check(zipped, None, "gzip", status=415)
        assert (await server.post("/v1/completions", {"prompt": [5], "max_tokens": 1})).status_code == 200


async def test_slow_bodies_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarto.server.body.BODY_DEADLINE_S", 0.2)

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b" "
            await asyncio.sleep(0.05)

    async with running() as server:
        check(await server.http.post("/v1/completions", content=slow()), None, "slow", status=408)


async def test_a_full_queue_is_answered_at_once() -> None:
    async with running("fake?step_s=0.01", max_num_seqs=1, max_num_queued=1) as server:
        body = {"prompt": [5], "max_tokens": 60}
        running_ones = [asyncio.create_task(server.post("/v1/completions", body)) for _ in range(2)]
        while server.engine.num_open < 2:
            await asyncio.sleep(0.01)
        assert (await server.http.get("/readyz")).status_code == 503
        assert (await server.http.get("/livez")).status_code == 200
        refused = await server.post("/v1/completions", body)
        assert check(refused, None, "full", status=429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert [response.status_code for response in await asyncio.gather(*running_ones)] == [200, 200]


async def test_no_template_means_no_chat() -> None:
    async with running(has_template=False) as server:
        check(await server.post("/v1/chat/completions", {"messages": MESSAGES}), "messages", "no template")


async def test_unexpected_errors_say_nothing_of_us(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarto.server.chat.sampling_params", lambda *_, **__: 1 / 0)
    error = check(await server.post("/v1/chat/completions", {"messages": MESSAGES}), None, "bug", status=500)
    assert error["message"] == "internal error; see the server's log"


async def test_a_client_that_leaves_amid_its_body_is_no_error_of_ours(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await writer.wait_closed()
    left = 'http_requests_total{handler="/v1/completions",method="POST",status="499"} 1.0'
    async with asyncio.timeout(10):
        while left not in (await server.http.get("/metrics")).text:
            await asyncio.sleep(0.02)
    assert [record.message for record in caplog.records] == []
