"""Whom to admit next: fairness between adapters, grouping within it, and the bounds on both, in seeded simulation."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from kvarto.adapters.registry import AdapterVersion
from kvarto.core.sampling import SamplingParams
from kvarto.engine.affinity import first_at_home, tenants_of
from kvarto.engine.messages import AddRequest
from kvarto.engine.next_in_queue import MAX_PASSED, NextInQueue
from kvarto.engine.request import Choice, Status, make_request
from kvarto.engine.virtual_tokens import VirtualTokens, tenant_of
from kvarto.engine.waiting import WaitingQueue


class World:
    """Slots, a queue, and choices that take a step per token. No pages."""

    def __init__(self, queue: NextInQueue, num_slots: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queue = queue
        self.num_slots = num_slots
        self.waiting = WaitingQueue()
        self.running: list[Choice] = []
        self.versions: dict[str, AdapterVersion] = {}
        self.served: Counter[str | None] = Counter()
        self.left: dict[Choice, int] = {}
        self.num_distinct: list[int] = []
        self.most_passed = 0
        self._passed: Counter[Choice] = Counter()
        self._arrivals = 0

    def add(self, adapter: str | None, num_tokens: int) -> Choice:
        version = None
        if adapter is not None:
            version = self.versions.setdefault(adapter, AdapterVersion(adapter, Path(adapter)))
        message = AddRequest(
            request_id=f"r{self._arrivals}", prompt_token_ids=(5,) * 8, sampling=SamplingParams(max_tokens=num_tokens)
        )
        request = make_request(
            message, priority=0, arrival=self._arrivals, max_tokens=num_tokens, vocab_size=10, now=0.0, adapter=version
        )
        self._arrivals += 1
        self.queue.add(request)
        (choice,) = request.choices
        self.left[choice] = num_tokens
        self.waiting.push(choice)
        return choice

    def step(self) -> None:
        """Admit, compute a token each, let those go that have all."""
        while len(self.running) < self.num_slots and (choice := self.queue.pick(self.waiting, self.running)):
            head = self.waiting.head
            assert head is not None
            self._passed[head] += choice is not head
            self.most_passed = max(self.most_passed, self._passed[head])
            self.queue.note_admitted(choice)
            self.waiting.remove(choice, Status.RUNNING)
            self.running.append(choice)
            self.queue.serve(choice.request, 8, 0)
        self.num_distinct.append(len(tenants_of(self.running) - {None}))
        for choice in list(self.running):
            self.queue.serve(choice.request, 1, 1)
            self.served[tenant_of(choice.request)] += 1
            self.left[choice] -= 1
            if not self.left[choice]:
                self.running.remove(choice)
                choice.status = Status.FINISHED
                self.queue.remove(choice.request)


def jain(values: list[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def overload(is_on: bool) -> World:
    """One adapter sends ten times as much as each of nine others, and all more than there is room for."""
    world = World(NextInQueue(is_on=is_on), num_slots=8, seed=3)
    for _ in range(3000):
        for index in range(10):
            if world.rng.random() < (0.5 if index == 0 else 0.05):
                world.add(f"a{index}", world.rng.randrange(10, 40))
        world.step()
    return world


def test_a_flood_of_one_adapter_does_not_starve_the_others() -> None:
    fair, unfair = overload(True), overload(False)
    others = [fair.served[f"a{index}"] for index in range(1, 10)]
    assert jain([fair.served[f"a{index}"] for index in range(10)]) > 0.95
    assert jain([unfair.served[f"a{index}"] for index in range(10)]) < 0.7
    assert min(others) > 1.5 * min(unfair.served[f"a{index}"] for index in range(1, 10))


def zipf(is_on: bool, seed: int, *, prefers_home: bool = True) -> World:
    world = World(NextInQueue(is_on=is_on, prefers_home=prefers_home), num_slots=16, seed=seed)
    names = [f"a{index}" for index in range(50)]
    weights = [1 / (1 + index) for index in range(50)]
    for _ in range(1500):
        while len(world.waiting) < 40:
            world.add(world.rng.choices(names, weights)[0], world.rng.randrange(5, 60))
        world.step()
    return world


@pytest.mark.parametrize("seed", range(3))
def test_grouping_reads_fewer_adapters_per_step_and_passes_nobody_over_too_often(seed: int) -> None:
    grouped, plain = zipf(True, seed), zipf(False, seed)
    ungrouped = zipf(True, seed, prefers_home=False)
    mean, plain_mean, ungrouped_mean = (
        sum(world.num_distinct) / len(world.num_distinct) for world in (grouped, plain, ungrouped)
    )
    assert mean < 0.95 * plain_mean, f"{mean} distinct adapters per step, {plain_mean} without"
    assert mean < 0.95 * ungrouped_mean, f"{mean} distinct adapters per step, {ungrouped_mean} with no preference"
    assert grouped.most_passed <= MAX_PASSED
    assert plain.most_passed == 0


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_more_distinct_adapters_run_than_may_and_everybody_runs_at_last(most: int) -> None:
    world = World(NextInQueue(is_on=True, max_adapters=most), num_slots=8, seed=1)
    choices = [world.add(f"a{index % 7}" if index % 8 else None, 1 + index % 20) for index in range(120)]
    for _ in range(3000):
        world.step()
    assert max(world.num_distinct) <= most
    assert all(choice.status is Status.FINISHED for choice in choices)
    assert not len(world.queue.tokens)


def test_without_adapters_the_head_is_next_and_nothing_is_counted() -> None:
    world = World(NextInQueue(is_on=False), num_slots=1, seed=1)
    first, second = world.add("a", 3), world.add("b", 1)
    assert world.queue.pick(world.waiting, []) is first
    assert second.status is Status.WAITING
    assert not len(world.queue.tokens)


def test_whoever_was_away_starts_at_the_least_of_those_that_are_there() -> None:
    world = World(NextInQueue(is_on=True), num_slots=1, seed=1)
    tokens = VirtualTokens()
    busy, late = world.add("busy", 5).request, world.add("late", 5).request
    tokens.add(busy)
    tokens.serve(busy, 100, 10)
    tokens.add(late)
    assert tokens.served(late) == tokens.served(busy) == 120
    tokens.remove(late)
    tokens.serve(busy, 50, 0)
    tokens.add(late)
    assert tokens.served(late) == 170


def test_the_base_is_at_home_everywhere() -> None:
    world = World(NextInQueue(is_on=True), num_slots=1, seed=1)
    base, adapted = world.add(None, 1), world.add("a", 1)
    assert first_at_home([adapted, base], tenants_of([])) is base
    assert first_at_home([adapted, base], tenants_of([adapted])) is adapted
    assert first_at_home([adapted], tenants_of([])) is None
