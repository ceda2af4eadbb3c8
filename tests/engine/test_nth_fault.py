"""Fail the first allocation, then the second, and so on until a run meets no failure; the same for copies and steps.

Once only, every token must be as if nothing had happened. For good, everybody must still hear an end, and no page may
be lost.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvarto.core.errors import EngineError
from kvarto.engine.messages import AddRequest
from tests.engine.hashed_engine import Harness, Hooks, Shape

SHAPE = Shape(page_size=8, windows=(None, 24), num_pages=56, max_tokens=24, max_seqs=4, max_context=96)
MOST_POINTS = 400


class Nth:
    """Says yes at its n-th question, and after it too when it is for good."""

    def __init__(self, n: int, *, for_good: bool) -> None:
        self._n = n
        self._for_good = for_good
        self.num_asked = 0

    def __call__(self, *_: object) -> bool:
        self.num_asked += 1
        return self.num_asked == self._n or (self._for_good and self.num_asked > self._n)

    def or_raise(self, *_: object) -> None:
        if self():
            raise OSError("injected")


HOOKS: dict[str, Callable[[Nth], Hooks]] = {
    "allocation": lambda nth: Hooks(allocation_fails=nth, copy_duration_s=lambda: 0.003),
    "copy": lambda nth: Hooks(before_copy=nth.or_raise, copy_duration_s=lambda: 0.003),
    "slow copy": lambda nth: Hooks(copy_duration_s=lambda: 0.9 if nth() else 0.003),
    "step": lambda nth: Hooks(before_run=nth.or_raise),
}


def workload(harness: Harness) -> list[AddRequest]:
    """Forks, chunks, a shared prefix that is copied in part, and more than fits at once."""
    first = harness.add(45, n=3, max_tokens=10, temperature=1.0)
    harness.round(6)
    shared = first.prompt_token_ids[:41]
    return [
        first,
        harness.add(prompt_token_ids=(*shared, 7, 8, 9), max_tokens=12),
        harness.add(60, max_tokens=12, prompt_logprobs=1),
        harness.add(30, n=2, max_tokens=20, presence_penalty=0.5),
    ]


@pytest.mark.parametrize("point", list(HOOKS))
def test_a_fault_that_passes_changes_nothing(point: str) -> None:
    for n in range(1, MOST_POINTS):
        nth = Nth(n, for_good=False)
        harness = Harness(SHAPE, HOOKS[point](nth))
        messages = workload(harness)
        harness.run()
        for message in messages:
            harness.check_tokens(message)
        harness.engine.check_empty()
        if nth.num_asked < n:
            assert n > 3, f"the workload has only {n - 1} points of `{point}`"
            return
    raise AssertionError(f"more than {MOST_POINTS} points of `{point}`")


@pytest.mark.parametrize("n", [1, 2, 5, 9, 14, 22])
@pytest.mark.parametrize("point", ["allocation", "copy", "slow copy"])
def test_a_fault_for_good_still_lets_everybody_hear_an_end(point: str, n: int) -> None:
    harness = Harness(SHAPE, HOOKS[point](Nth(n, for_good=True)))
    messages = workload(harness)
    harness.run(most_rounds=5000)
    for message in messages:
        for index in range(message.sampling.n):
            assert harness.heard[message.request_id, index].reason in ("length", "error")
            if point != "allocation":  # without copies everything is computed anew
                assert harness.heard[message.request_id, index].reason == "length"
    harness.engine.check_empty()


def test_steps_that_fail_for_good_end_the_engine() -> None:
    harness = Harness(SHAPE, HOOKS["step"](Nth(4, for_good=True)))
    harness.add(45, n=3, max_tokens=10)
    harness.add(20)
    with pytest.raises(EngineError):
        harness.run()
