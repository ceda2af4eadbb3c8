"""What the scheduler promises, seen from outside: order, budgets, progress, forks, refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from kvarto.core.step import Step
from kvarto.engine.messages import Cancel, Refused, StepOut
from kvarto.planning.page_count import pages_for_sequence
from tests.engine.hashed_engine import Harness, Hooks, Shape


class Watch:
    """Keeps every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __call__(self, step: Step) -> None:
        self.steps.append(step)


def watched(shape: Shape | None = None) -> tuple[Harness, Watch]:
    watch = Watch()
    return Harness(shape or Shape(), Hooks(before_run=watch)), watch


def test_one_request_ends_with_the_tokens_of_the_oracle() -> None:
    harness = Harness()
    message = harness.add(30, max_tokens=12)
    harness.run()
    harness.check_tokens(message)
    harness.engine.check_empty()


def test_a_long_prompt_goes_in_chunks_and_never_holds_up_drawn_tokens() -> None:
    harness, watch = watched(Shape(max_tokens=32, num_pages=64))
    first = harness.add(8, max_tokens=40)
    harness.round(2)
    second = harness.add(150, max_tokens=4)
    before = len(harness.heard["r1", 0].tokens)
    harness.round(5)
    assert len(harness.heard["r1", 0].tokens) == before + 5
    assert max(step.num_tokens for step in watch.steps) == 32
    assert ("r2", 0) not in harness.heard or not harness.heard["r2", 0].tokens or len(watch.steps) > 5
    harness.run()
    harness.check_tokens(first)
    harness.check_tokens(second)


def test_a_step_never_exceeds_its_limits() -> None:
    shape = Shape(max_tokens=16, max_seqs=4, prompt_rows=3, num_pages=200)
    harness, watch = watched(shape)
    rng = random.Random(3)
    messages = [
        harness.add(rng.randrange(1, 60), n=rng.choice([1, 3, 6]), prompt_logprobs=rng.choice([None, 1]))
        for _ in range(20)
    ]
    harness.run()
    limits = shape.limits
    assert all(step.num_tokens <= limits.max_tokens for step in watch.steps)
    assert all(step.num_seqs <= limits.max_seqs for step in watch.steps)
    assert all(step.num_samples <= limits.max_samples for step in watch.steps)
    for message in messages:
        harness.check_tokens(message)


def test_choices_share_one_computation_of_the_prompt() -> None:
    harness, watch = watched(Shape(max_tokens=64, max_seqs=8, is_caching=False))
    message = harness.add(50, n=8, max_tokens=6, temperature=1.0)
    harness.run()
    harness.check_tokens(message)
    assert len({tuple(harness.heard["r1", index].tokens) for index in range(8)}) > 1
    assert sum(step.num_tokens for step in watch.steps) == 50 + 8 * 5


def test_more_choices_than_slots() -> None:
    harness, watch = watched(Shape(max_seqs=3, is_caching=False))
    message = harness.add(20, n=8, max_tokens=3)
    harness.run()
    harness.check_tokens(message)
    num_computed = sum(step.num_tokens for step in watch.steps)
    assert num_computed < 8 * 20 + 8 * 2, "every choice computed the prompt for itself"


@pytest.mark.parametrize(("max_seqs", "num_leaders"), [(4, 2), (3, 3), (1, 8)])
def test_choices_of_one_token_have_one_leader_at_a_time(max_seqs: int, num_leaders: int) -> None:
    """The leader ends with the token from which the others fork; those without a slot need just one new leader."""
    harness, watch = watched(Shape(max_seqs=max_seqs, is_caching=False))
    message = harness.add(20, n=8, max_tokens=1)
    harness.run()
    harness.check_tokens(message)
    assert sum(step.num_tokens for step in watch.steps) == num_leaders * 20


def test_first_come_first_served() -> None:
    harness = Harness(Shape(max_seqs=2))
    for _ in range(8):
        harness.add(10, max_tokens=4)
    harness.run()
    first_seen: dict[str, int] = {}
    for number, running in enumerate(harness.steps):
        for request_id in running:
            first_seen.setdefault(request_id, number)
    order = sorted(first_seen, key=lambda request_id: first_seen[request_id])
    assert order == [f"r{index}" for index in range(1, 9)]


def test_a_better_priority_goes_first_and_takes_a_slot() -> None:
    harness = Harness(Shape(max_seqs=2))
    low = [harness.add(10, priority=5, max_tokens=30) for _ in range(3)]
    harness.round(3)
    high = harness.add(10, priority=-1, max_tokens=4)
    harness.round(2)
    assert "r4" in harness.steps[-1]
    harness.run()
    assert harness.engine.scheduler.num_preemptions >= 1
    for message in (*low, high):
        harness.check_tokens(message)


def test_under_pressure_the_first_runs_on_and_all_end() -> None:
    """Five percent of the demand in pages: everybody ends, and nobody is preempted again and again."""
    harness = Harness(Shape(num_pages=10, max_context=96, max_seqs=16, page_size=8, max_tokens=40))
    messages = [harness.add(20, max_tokens=60) for _ in range(12)]
    tokens_of_first: list[int] = []
    most = 0
    while "r1" not in {key[0] for key, heard in harness.heard.items() if heard.reason}:
        harness.round()
        tokens_of_first.append(len(harness.heard["r1", 0].tokens) if ("r1", 0) in harness.heard else 0)
    assert all(before < after for before, after in pairwise(tokens_of_first)), "the first had to wait"
    for _ in range(3000):
        if not harness.engine.loop.has_work:
            break
        harness.round()
        choices = [c for r in harness.engine.scheduler.requests.values() for c in r.choices]
        most = max([most, *(choice.num_preemptions for choice in choices)])
    for message in messages:
        harness.check_tokens(message)
    assert most <= 4
    harness.engine.check_empty()


def test_forks_that_outgrow_the_pool_are_preempted_and_recomputed() -> None:
    harness = Harness(Shape(num_pages=12, max_context=96, max_seqs=8, page_size=8, max_tokens=40))
    message = harness.add(30, n=8, max_tokens=60)
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    harness.check_tokens(message)


def test_windows_are_counted_when_choices_are_admitted() -> None:
    """Pages behind a window go back on the way, so a long prompt does not claim them."""
    windows = (None,) + (32,) * 5
    shape = Shape(windows=windows, max_tokens=64, max_context=1200, is_caching=False)
    num_pages = 4 * pages_for_sequence(shape.groups, shape.page_size, 600, shape.max_tokens)
    harness = Harness(replace(shape, num_pages=num_pages))
    messages = [harness.add(500, max_tokens=100) for _ in range(4)]
    harness.run()
    together = [running for running in harness.steps if len(running) == 4]
    assert len(together) > 50, "choices that fit beside each other waited for each other"
    assert harness.engine.scheduler.num_preemptions == 0
    for message in messages:
        harness.check_tokens(message)


def test_who_did_not_fit_is_tried_again_when_a_prompt_is_computed() -> None:
    """A prompt claims a chunk's pages beside its window; once it is computed, that claim is gone and another fits."""
    shape = Shape(windows=(None,) + (32,) * 5, max_tokens=128, is_caching=False)
    first, second = (pages_for_sequence(shape.groups, shape.page_size, 128 + 64, chunk) for chunk in (1, 128))
    harness = Harness(replace(shape, num_pages=first + second))
    for _ in range(2):
        harness.add(120, max_tokens=60)  # leaves room in the step, so that the second is tried with the first
    harness.run()
    assert len([running for running in harness.steps if len(running) == 2]) > 50
    assert harness.engine.scheduler.num_preemptions == 0


def test_what_can_never_fit_is_refused_at_once() -> None:
    harness = Harness(Shape(num_pages=4, page_size=16, max_context=256, max_tokens=64))
    harness.add(60, max_tokens=5)
    good = harness.add(60, max_tokens=4)
    harness.round()
    (refused,) = [each for frame in harness.frames if isinstance(frame, StepOut) for each in frame.refused]
    assert isinstance(refused, Refused)
    assert refused.error == "ContextLengthExceeded"
    assert "65" in refused.message
    assert "64" in refused.message
    harness.run()
    harness.check_tokens(good)


def test_a_full_queue_refuses_and_empties_again() -> None:
    harness = Harness(Shape(max_seqs=1, max_num_queued=3))
    for _ in range(6):
        harness.add(10)
    harness.round()
    assert harness.refused == {"r4": "Overloaded", "r5": "Overloaded", "r6": "Overloaded"}
    harness.inbox.append(Cancel("r2"))
    harness.round()
    late = harness.add(10)
    harness.run()
    assert set(harness.refused) == {"r4", "r5", "r6"}
    harness.check_tokens(late)


def test_who_runs_alone_is_alone_and_others_go_on() -> None:
    harness = Harness()
    ordinary = [harness.add(10, max_tokens=10) for _ in range(3)]
    alone = [harness.add(10, max_tokens=10, runs_alone=True, n=2) for _ in range(2)]
    harness.run()
    for running in harness.steps:
        assert len(running) == 1 or not {"r4", "r5"} & set(running)
    for message in (*ordinary, *alone):
        harness.check_tokens(message)
    crews = ["".join(running) if running[0] in ("r4", "r5") else "others" for running in harness.steps]
    mixed = [index for index in range(len(crews) - 2) if len(set(crews[index : index + 3])) == 3]
    assert len(mixed) > 5, f"crews do not take turns: {crews}"


def test_the_prefix_cache_is_counted_and_used() -> None:
    harness, watch = watched(Shape(num_pages=40))
    first = harness.add(100, max_tokens=4)
    harness.run()
    second = harness.add(100, max_tokens=4, prompt_token_ids=first.prompt_token_ids)
    computed = sum(step.num_tokens for step in watch.steps)
    harness.run()
    harness.check_tokens(second)
    outputs = harness.heard["r2", 0].outputs
    assert outputs[0].num_cached_tokens >= 96
    assert all(output.num_cached_tokens == 0 for output in outputs[1:])
    assert sum(step.num_tokens for step in watch.steps) - computed <= 4 + 3


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None)])
def test_salts_separate(salts: tuple[str | None, str | None]) -> None:
    harness = Harness(Shape(num_pages=60))
    first = harness.add(100, cache_salt=salts[0])
    harness.run()
    harness.add(100, cache_salt=salts[1], prompt_token_ids=first.prompt_token_ids)
    harness.run()
    assert harness.heard["r2", 0].outputs[0].num_cached_tokens == 0
