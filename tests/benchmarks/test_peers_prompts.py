from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.prompts import SALT_TOKENS, PromptMaker, corpus_text, digest, spread

CORPUS = list(range(40_000, 45_000))


@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 64))
def test_a_spread_is_sorted_and_within_its_ends(low: int, extra: int, num: int) -> None:
    lengths = spread(low, low + extra, num)
    assert len(lengths) == num
    assert lengths[0] == low
    assert num == 1 or lengths[-1] == low + extra
    assert lengths == sorted(lengths)


def test_the_work_is_the_same_for_every_seed_and_salt() -> None:
    totals = {
        (sum(len(prompt.ids) for prompt in prompts), sum(prompt.num_output_tokens for prompt in prompts))
        for seed in range(3)
        for prompts in [PromptMaker(CORPUS, seed).mixed(f"salt {seed}")]
    }
    assert len(totals) == 1
    ((num_prompt_tokens, num_output_tokens),) = totals
    assert num_prompt_tokens == pytest.approx(8_800, rel=0.02)
    assert num_output_tokens == pytest.approx(3_000, rel=0.03)


def test_equal_arguments_give_equal_prompts() -> None:
    first, again = (PromptMaker(CORPUS, 7).mixed("salt") for _ in range(2))
    assert first == again
    assert digest(first) == digest(again) != digest(PromptMaker(CORPUS, 8).mixed("salt"))


@given(st.text(max_size=8), st.text(max_size=8))
def test_no_two_prompts_share_their_first_tokens(salt: str, other: str) -> None:
    maker = PromptMaker(CORPUS)
    prompts = maker.mixed(salt) + (maker.mixed(other) if other != salt else [])
    assert len({prompt.ids[:SALT_TOKENS] for prompt in prompts}) == len(prompts)


def test_sharing_prompts_differ_only_behind_the_prefix() -> None:
    prompts = PromptMaker(CORPUS).sharing("salt", num=32, prefix_tokens=512, suffix_tokens=16)
    assert len({prompt.ids[:512] for prompt in prompts}) == 1
    assert len({prompt.ids[512 : 512 + SALT_TOKENS] for prompt in prompts}) == 32
    assert {len(prompt.ids) for prompt in prompts} == {528}


@pytest.mark.parametrize("length", [1, SALT_TOKENS, SALT_TOKENS + 1, 12_000])
def test_a_prompt_has_exactly_its_length_even_beyond_the_corpus(length: int) -> None:
    prompt = PromptMaker(CORPUS).one("salt", length, 1)
    assert len(prompt.ids) == length
    assert set(prompt.ids[SALT_TOKENS:]) <= set(CORPUS)


def test_the_checkout_has_text_to_cut_from() -> None:
    assert len(corpus_text()) > 10_000
