"""Guesses: where they come from, and that they never change what a request yields."""

from __future__ import annotations

import random
from array import array

import pytest

from kvarto.core.sampling import SamplingParams
from kvarto.engine.lookup import LONGEST_NGRAM, MAX_PAUSE, SHORTEST_NGRAM, Pause, guess_next
from kvarto.engine.messages import AddRequest
from tests.engine import fake_model
from tests.engine.hashed_engine import EOS, Harness, Shape


def _slow_guess(tokens: list[int], last: int, count: int) -> tuple[int, ...]:
    """The statement, by trying every place: the longest n-gram wins, then the latest place."""
    text = [*tokens, last]
    for length in range(min(LONGEST_NGRAM, len(tokens)), SHORTEST_NGRAM - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:] and end < len(text):
                return tuple(text[end : end + count])
    return ()


def test_the_latest_place_of_the_longest_n_gram_decides() -> None:
    rng = random.Random(1)
    num_found = 0
    for _ in range(3000):
        tokens = [rng.randrange(4) for _ in range(rng.randint(0, 40))]
        last, count = rng.randrange(4), rng.randint(1, 6)
        expected = _slow_guess(tokens, last, count)
        assert guess_next(array("i", tokens), last, count) == expected, (tokens, last, count)
        num_found += bool(expected)
    assert num_found > 1000


def test_pauses_grow_while_guesses_are_wrong_and_end_with_a_right_one() -> None:
    pause = Pause()
    waits = []
    for _ in range(6):
        pause.learn(0)
        waits.append(next(steps for steps in range(100) if pause.is_over()))
    assert waits == [1, 2, 4, 8, MAX_PAUSE, MAX_PAUSE]
    pause.learn(3)
    assert pause.is_over()


@pytest.mark.parametrize("windows", [(None,), (None, 20)])
@pytest.mark.parametrize("num_pages", [200, 24])
def test_guessing_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...], num_pages: int
) -> None:
    """The oracle computes each choice alone; a short pool preempts, and guesses must not take pages for good."""
    draw = fake_model.draw
    # A language of few words, in which guesses are often right and often wrong.
    monkeypatch.setattr(fake_model, "draw", lambda context, row: (3, 3, 3, 3, 4, 4, 5)[draw(context, row) % 7])
    rng = random.Random(5)
    shape = Shape(windows=windows, num_pages=num_pages, num_lookup_tokens=4, page_size=8, max_seqs=4, max_context=128)
    harness = Harness(shape)
    messages = []
    for index in range(40):
        phrase = [rng.randrange(3, 20) for _ in range(rng.randint(2, 6))]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 30),
            temperature=rng.choice((0.0, 0.7)),
            n=rng.choice((1, 1, 2)),
            min_tokens=rng.choice((0, 0, 5)),
            logprobs=rng.choice((None, 2)),
            seed=index,
        )
        prompt = tuple((phrase * 20)[: rng.randint(1, 60)])
        messages.append(
            AddRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, eos_token_ids=EOS)
        )
        harness.inbox.append(messages[-1])
        harness.round(rng.randint(0, 5))
    harness.run()
    for message in messages:
        harness.check_tokens(message)
        for choice in range(message.sampling.n):
            outputs = harness.heard[message.request_id, choice].outputs
            for output in outputs:
                assert (output.logprobs is None) == (message.sampling.logprobs is None or not output.token_ids)
                assert output.logprobs is None or [lp.token_id for lp in output.logprobs] == list(output.token_ids)
    harness.engine.check_empty()
    scheduler = harness.engine.scheduler
    assert scheduler.num_guessed_tokens > 20, "hardly anything was guessed"
    assert scheduler.num_right_guesses > 0, "no guess was ever right"
