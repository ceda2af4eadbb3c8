"""The OpenAI surface: shapes, streams, log-probabilities, usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.engine.fake_engine import token_at
from tests.server.running import Running, running


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running() as up:
        yield up


def text_of(prompt: list[int], count: int, seed: int = 7, choice: int = 0) -> str:
    return bytes(token_at(tuple(prompt), seed, choice, position) for position in range(count)).decode()


async def test_completion_of_every_prompt_form(server: Running) -> None:
    ids = [1, *b"Hi"]
    for prompt, want in (
        ("Hi", [ids]),
        (["Hi", "Ho"], [ids, [1, *b"Ho"]]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
    ):
        answer = (await server.post("/v1/completions", {"prompt": prompt, "seed": 7, "max_tokens": 4, "n": 2})).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(want)))
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [text_of(each, 4, choice=choice) for each in want for choice in range(2)]
        assert answer["usage"] == {
            "prompt_tokens": sum(map(len, want)),
            "completion_tokens": 8 * len(want),
            "total_tokens": sum(map(len, want)) + 8 * len(want),
            "prompt_tokens_details": {"cached_tokens": 3 * len(want)},
        }
        assert answer["object"] == "text_completion"
        assert answer["model"] == "org/fake"


async def test_defaults_of_completion_and_chat() -> None:
    async with running("fake?max_len=100") as server:
        short = (await server.post("/v1/completions", {"prompt": [5]})).json()
        assert short["usage"]["completion_tokens"] == 16
        near_the_end = (await server.post("/v1/completions", {"prompt": [5] * 95})).json()
        assert near_the_end["usage"]["completion_tokens"] == 5
        chat = (await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})).json()
        assert chat["usage"]["total_tokens"] == 100
        assert chat["choices"][0]["finish_reason"] == "length"


async def test_whole_answers_equal_their_streams(server: Running) -> None:
    """Text, log-probabilities, finish reasons and usage: joined from the stream they are those of the whole answer."""
    options = {"seed": 3, "n": 3, "max_tokens": 12, "stop": ["e"], "include_stop_str_in_output": True}
    body = {"prompt": ["abc", "x"], "logprobs": 2, "echo": True, **options}
    whole = (await server.post("/v1/completions", body)).json()
    events = await server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    chunks = list(map(json.loads, events))
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [item for part in parts if part["logprobs"] for item in part["logprobs"][key]]
            assert joined == choice["logprobs"][key]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])
    assert any(choice["stop_reason"] == "e" for choice in whole["choices"])


async def test_chat_stream_begins_with_the_role_and_ends_with_usage(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "seed": 7, "max_tokens": 5, "n": 2, "logprobs": True}
    whole = (await server.post("/v1/chat/completions", body)).json()
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = await server.events("/v1/chat/completions", {**body, **options})
    assert events.pop() == "[DONE]"
    chunks = list(map(json.loads, events))
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        content = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
        assert content == choice["logprobs"]["content"]
        assert len(content) == 5
    totals = [chunk["usage"]["total_tokens"] for chunk in chunks]
    assert totals == sorted(totals)


async def test_chat_logprobs_carry_bytes(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    (entry,) = (await server.post("/v1/chat/completions", body)).json()["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] == list(entry["token"].encode())
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5]


async def test_lm_eval_asks_for_the_prompts_logprobs(server: Running) -> None:
    """Echo, logprobs 1, max_tokens 1 over lists of ids: arrays as long as prompt and output, null first."""
    prompts = [[10, 20, 30], [65, 66]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 7}
    answer = (await server.post("/v1/completions", body)).json()
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:-1] == [-1.5] * (len(prompt) - 1)
        assert logprobs["tokens"][: len(prompt)] == [chr(token) for token in prompt]
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))
        assert choice["text"] == bytes(prompt).decode() + text_of(prompt, 1)
    nothing_new = (await server.post("/v1/completions", {**body, "max_tokens": 0})).json()
    assert nothing_new["usage"]["completion_tokens"] == 0
    assert nothing_new["choices"][1]["text"] == "AB"
    assert len(nothing_new["choices"][1]["logprobs"]["tokens"]) == 2


async def test_prompt_logprobs_as_vllm_gives_them(server: Running) -> None:
    answer = (await server.post("/v1/completions", {"prompt": [65, 66], "prompt_logprobs": 0, "max_tokens": 1})).json()
    want = {"66": {"logprob": -1.5, "rank": None, "decoded_token": "B"}}
    assert answer["choices"][0]["prompt_logprobs"] == [None, want]


async def test_stop_strings_and_reasons(server: Running) -> None:
    text = text_of([5], 40)
    stop = text[12:15]
    body = {"prompt": [5], "seed": 7, "max_tokens": 40, "stop": [stop, "never"]}
    choice = (await server.post("/v1/completions", body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    kept = (await server.post("/v1/completions", {**body, "include_stop_str_in_output": True})).json()["choices"][0]
    assert kept["text"] == text[: text.index(stop)] + stop


async def test_model_defaults_apply_unless_the_request_says_otherwise() -> None:
    """A model that recommends something out of the engine's range shows whether its value was taken."""
    async with running(defaults={"temperature": 200.0}) as server:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert (await server.post("/v1/chat/completions", body)).status_code == 400
        assert (await server.post("/v1/chat/completions", {**body, "temperature": 0.5})).status_code == 200


async def test_models_tokenize_detokenize_version(server: Running) -> None:
    cards = (await server.http.get("/v1/models")).json()
    assert cards["object"] == "list"
    assert cards["data"][0] | {"created": 0} == {
        "id": "org/fake", "object": "model", "created": 0, "owned_by": "kvarto", "root": "fake", "parent": None,
        "max_model_len": 4096,
    }  # fmt: skip
    assert (await server.http.get("/v1/models/org/fake")).json() == cards["data"][0]
    tokens = (await server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True})).json()
    assert tokens["tokens"] == [1, *"Hé".encode()]
    assert tokens["count"] == 4
    assert tokens["token_strs"][-1] == "\ufffd"
    assert (await server.post("/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": "\x01Hé"}
    chat = (await server.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})).json()
    assert bytes(chat["tokens"]) == b"user: a\nassistant: "
    assert set((await server.http.get("/version")).json()) == {"version"}


async def test_messages_in_parts_and_unfinished_answers(server: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Well, "}]}
    tokens = (await server.post("/tokenize", {**body, "continue_final_message": True})).json()["tokens"]
    assert bytes(tokens) == b"user: a\nb\nassistant: Well,"


async def test_truncation_only_when_asked(server: Running) -> None:
    body = {"prompt": [9, 8, 7, 6], "truncate_prompt_tokens": 2, "seed": 7, "max_tokens": 3, "echo": True}
    answer = (await server.post("/v1/completions", body)).json()
    assert answer["choices"][0]["text"] == "\x07\x06" + text_of([7, 6], 3)
    assert answer["usage"]["prompt_tokens"] == 2


async def test_openapi_is_complete(server: Running) -> None:
    document = (await server.http.get("/openapi.json")).json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"]
    assert "$ref" not in json.dumps(document)


async def test_many_at_once_get_their_own_answers(server: Running) -> None:
    async def ask(index: int) -> bool:
        body = {"prompt": [5, index], "seed": 7, "max_tokens": 30}
        events = await server.events("/v1/completions", body)
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        return text == text_of([5, index], 30)

    assert all(await asyncio.gather(*(ask(index) for index in range(40))))
