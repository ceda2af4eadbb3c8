"""The `openai` client against a live server: chat, completions, streams, n, log-probabilities, stop strings, aborts.

On a tiny random model always; on SmolLM2-135M-Instruct among the heavy tests.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from kvarto.engine.config import EngineConfig
from tests.server.process import Serving, serving
from tests.server.tiny_model import write_tiny_model

MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.heavy)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    if request.param == "tiny":
        model = write_tiny_model(folder / "tiny")
    else:
        model = request.getfixturevalue("demo_model")
    with serving(folder, EngineConfig(model=str(model), max_model_len=1024, max_num_seqs=16, threads=1)) as up:
        assert up.url
        yield up


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id) == card
    return card.id


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24
    again = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens > 0  # the prefix cache


def test_streams_say_what_whole_answers_say(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "messages": MESSAGES, "max_tokens": 24, "n": 4, "seed": 5, "temperature": 0.8}
    whole = client.chat.completions.create(**options)
    texts = [""] * 4
    usage = None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_of_several_prompts(client: openai.OpenAI, model: str) -> None:
    prompts = ["Once upon a time", "The sea is"]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=8, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    echoed = client.completions.create(model=model, prompt=prompts[0], max_tokens=8, seed=1, echo=True)
    assert echoed.choices[0].text == prompts[0] + answer.choices[0].text


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
        assert len(entry.top_logprobs) == 3
    scored = client.completions.create(model=model, prompt="The sea is blue", max_tokens=1, echo=True, logprobs=1)
    lists = scored.choices[0].logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.token_logprobs is not None
    assert lists.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in lists.token_logprobs[1:])
    assert "".join(lists.tokens[:-1]).endswith("The sea is blue")


def test_stop_strings(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    stop = whole[20:23]
    answer = client.completions.create(**options, stop=[stop, "@@@"], extra_body={"ignore_eos": True}).choices[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


def test_abort_in_mid_stream(client: openai.OpenAI, model: str, server: Serving) -> None:
    stream = client.completions.create(
        model=model, prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline_s = time.monotonic() + 20
    while "vllm:num_requests_running{" in (text := httpx.get(f"{server.url}/metrics").text):
        line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
        if line.endswith(" 0.0"):
            break
        assert time.monotonic() < deadline_s, line
        time.sleep(0.05)
    held = next(line for line in text.splitlines() if line.startswith('kvarto:pages{state="held"}'))
    assert held.endswith(" 0.0")


def test_errors_are_typed(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=model, prompt=[5] * 2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=model, prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"


def test_an_engine_killed_in_mid_stream_leaves_no_seam(client: openai.OpenAI, model: str, server: Serving) -> None:
    options = {
        "model": model, "prompt": "Once upon a time", "max_tokens": 80, "seed": 3, "n": 2,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.completions.create(**options)
    texts = ["", ""]
    for number, chunk in enumerate(client.completions.create(**options, stream=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        if number == 20:
            (pid,) = server.engine_pids()
            os.kill(pid, signal.SIGKILL)
    assert texts == [choice.text for choice in whole.choices]
    assert 'kvarto:engine_restarts_total{engine="0"' in httpx.get(f"{server.url}/metrics").text
