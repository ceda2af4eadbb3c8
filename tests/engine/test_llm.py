"""`kvarto.LLM` on a tiny random model: order, batching, stop strings, errors that leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

import kvarto
from kvarto import LLM, SamplingParams
from kvarto.core.errors import ContextLengthExceeded, InvalidRequest
from tests.server.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["native", "reference"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    limits = {"max_num_seqs": 4, "max_num_queued": 2, "max_model_len": 256}
    with LLM(str(folder), backend=request.param, threads=1, seed=1, **limits) as llm:
        yield llm


def is_empty(llm: LLM) -> bool:
    """No request is left, and every page is free or evictable."""
    pool = llm._engine.pool
    return not llm._engine.loop.has_work and pool.num_free + pool.num_evictable == pool.num_pages


def test_many_prompts_come_back_in_order_and_equal_lone_runs(llm: LLM) -> None:
    """More prompts than the queue takes: they are fed as places become free."""
    prompts = [f"prompt number {index}" for index in range(40)]
    together = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in together] == prompts
    for prompt, output in list(zip(prompts, together, strict=True))[::8]:
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].text == output.outputs[0].text
        assert alone.num_cached_tokens == len(alone.prompt_token_ids) // 16 * 16 or alone.num_cached_tokens > 0
    assert is_empty(llm)


def test_ids_params_per_prompt_choices_and_logprobs(llm: LLM) -> None:
    params = [
        SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True),
    ]
    first, second = llm.generate([[5, 6, 7], [8, 9]], params)
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) > 1
    for choice in first.outputs:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
        assert all(len(entry.top) == 2 for entry in choice.logprobs)
    assert second.prompt_logprobs is not None
    assert [entry.token_id for entry in second.prompt_logprobs] == [9]
    assert second.prompt_token_ids == [8, 9]


def test_a_prompt_of_one_token_has_no_log_probabilities_rather_than_unknown_ones(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=1, n=2, ignore_eos=True))
    assert output.prompt_logprobs == []


def test_stop_strings_end_choices_and_free_their_pages(llm: LLM) -> None:
    (whole,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    stop = whole.outputs[0].text[10:12]
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=(stop,)))
    choice = output.outputs[0]
    assert choice.text == whole.outputs[0].text[: whole.outputs[0].text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert is_empty(llm)


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(conversation, GREEDY)
    assert one.prompt == "<|user|>Hi<|end|><|assistant|>"
    two = llm.chat([conversation, conversation], GREEDY)
    assert [output.outputs[0].token_ids for output in two] == [one.outputs[0].token_ids] * 2


def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate([[1], [2] * 256], GREEDY)
    with pytest.raises(InvalidRequest):
        llm.generate([[1], [100_000]], GREEDY)
    with pytest.raises(InvalidRequest, match="2 `sampling_params` for 1"):
        llm.generate("a", [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []
    assert is_empty(llm)


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = llm._engine.loop.step, 0

    def interrupted() -> bool:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine.loop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=100, ignore_eos=True))
    assert is_empty(llm)
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 12


def test_importing_kvarto_is_instant() -> None:
    """Nothing but the standard library, until something is used."""
    code = (
        "import sys, kvarto; heavy = {'numpy', 'torch', 'msgspec', 'fastapi'} & set(sys.modules); "
        "assert not heavy, heavy; kvarto.SamplingParams(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert set(kvarto.__all__) == {"LLM", "SamplingParams"}
    with pytest.raises(AttributeError):
        kvarto.nothing  # noqa: B018
