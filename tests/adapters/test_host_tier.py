"""Laws of the host tier: bounded to the byte, nothing held is evicted, each failure is said once, nothing leaks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvarto.adapters.host_entry import HostEntry, HostState
from kvarto.adapters.host_tier import HostTier
from kvarto.adapters.source import FoundAdapter
from kvarto.core.clock import VirtualClock
from kvarto.memory.calls import Call, Calls
from kvarto.memory.executors import VirtualExecutor
from tests.adapters.fake_source import FakeFiles, digest_of, page_of

PAGE = 64


class World:
    """A tier, its clock and its disk."""

    def __init__(
        self,
        capacity_pages: int,
        *,
        staging_pages: int = 0,
        duration_s: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        self.rng = rng or random.Random(0)
        self.fault = 0.0
        self.clock = VirtualClock()
        self.executor = VirtualExecutor(self.clock, lambda: duration_s * self.rng.choice([0.5, 1, 4]))
        self.calls = Calls(self.clock, deadline_s=3.0, executor=self.executor, inject_fault=self._fail)
        self.files = FakeFiles()
        self.tier = HostTier(
            self.files,
            self.calls,
            self.clock,
            capacity_bytes=capacity_pages * PAGE,
            page_bytes=PAGE,
            staging_bytes=staging_pages * PAGE,
        )

    def _fail(self, call: Call) -> None:
        if self.rng.random() < self.fault:
            raise OSError("injected")

    def find(self, seed: int, num_pages: int) -> FoundAdapter:
        return self.files.find(self.files.put(f"a{seed}", seed, num_pages))

    def hold(self, seed: int, num_pages: int, *, is_known: bool = True) -> HostEntry:
        return self.tier.hold(digest_of(seed) if is_known else None, self.find(seed, num_pages))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.executor.run_due()
        self.calls.sweep()
        self.calls.poll()
        self.tier.advance()
        self.tier.check()

    def settle(self) -> None:
        for _ in range(100):
            self.pass_time(2.0)


def test_a_held_adapter_is_read_once_and_its_bytes_are_right() -> None:
    world = World(8)
    entry, again = world.hold(1, 3), world.hold(1, 3)
    assert entry is again
    assert entry.state is HostState.READING
    world.settle()
    assert entry.state is HostState.READY
    assert entry.images is not None
    assert np.array_equal(entry.images, [page_of(1, index, PAGE) for index in range(3)])
    assert world.tier.num_reads == 1
    assert world.tier.used_bytes == 3 * PAGE


def test_a_tier_without_bytes_stages_one_adapter_at_a_time() -> None:
    world = World(0)
    first, second = world.hold(1, 3), world.hold(2, 5)
    world.settle()
    assert (first.state, second.state) == (HostState.READY, HostState.WAITING)
    world.tier.release(first)
    world.settle()
    assert second.state is HostState.READY
    world.tier.release(second)
    assert world.tier.used_bytes == 0


def test_what_is_cheap_to_read_and_rarely_used_goes_first() -> None:
    world = World(4, duration_s=1.0)
    for seed in (1, 2):
        for _ in range(3 if seed == 1 else 1):
            entry = world.hold(seed, 2)
            world.settle()
            world.tier.release(entry)
    third = world.hold(3, 2)
    world.settle()
    assert third.state is HostState.READY
    assert digest_of(1) in world.tier
    assert digest_of(2) not in world.tier


def test_a_failed_read_says_why_and_the_next_wish_reads_again() -> None:
    world = World(4)
    world.fault = 1.0
    entry = world.hold(1, 2)
    world.settle()
    assert entry.state is HostState.FAILED
    assert "injected" in str(entry.error)
    world.fault = 0.0
    again = world.hold(1, 2)
    world.settle()
    assert again.state is HostState.READY


def test_a_read_that_nobody_waits_for_keeps_its_bytes_until_its_thread_has_let_go() -> None:
    world = World(2)
    entry = world.hold(1, 2)
    world.tier.release(entry)
    other = world.hold(2, 2)
    world.pass_time(0.0)
    assert other.state is HostState.WAITING, "the bytes of a running read were given away"
    world.settle()
    assert other.state is HostState.READY


def test_what_is_in_files_that_were_never_read_is_known_with_their_bytes() -> None:
    world = World(8)
    entry = world.hold(1, 3, is_known=False)
    world.settle()
    assert (entry.state, entry.digest) == (HostState.READY, digest_of(1))
    assert world.tier.settle(entry) is entry
    assert world.hold(1, 3) is entry
    assert world.tier.num_reads == 1


@pytest.mark.parametrize("is_held", [True, False])
def test_a_second_copy_of_a_content_is_dropped_for_the_first(is_held: bool) -> None:
    world = World(8)
    first = world.hold(1, 3)
    world.settle()
    if not is_held:
        world.tier.release(first)
    second = world.hold(1, 3, is_known=False)
    world.settle()
    assert world.tier.used_bytes == 6 * PAGE
    assert world.tier.settle(second) is first
    assert (first.num_holders, second.state) == (1 + is_held, HostState.GONE)
    assert world.tier.used_bytes == 3 * PAGE
    world.tier.check()


def test_copies_that_were_read_side_by_side_become_one() -> None:
    world = World(20, duration_s=0.1)
    entries = [world.hold(1, 3, is_known=False) for _ in range(4)]
    world.settle()
    assert len({id(world.tier.settle(entry)) for entry in entries}) == 1
    assert world.tier.used_bytes == 3 * PAGE


def test_files_that_hold_other_values_than_they_did_are_refused() -> None:
    world = World(8)
    entry = world.tier.hold(digest_of(2), world.find(1, 3))
    world.settle()
    assert entry.state is HostState.FAILED
    assert "other values" in str(entry.error)
    assert world.tier.used_bytes == 0


def test_several_adapters_pass_a_tier_that_keeps_nothing() -> None:
    world = World(0, staging_pages=7, duration_s=0.1)
    entries = [world.hold(seed, 3) for seed in range(3)]
    world.settle()
    assert [entry.state for entry in entries] == [HostState.READY, HostState.READY, HostState.WAITING]
    for entry in entries:
        world.tier.release(entry)
    world.settle()
    assert world.tier.used_bytes == 0
    large = world.hold(9, 50)
    world.settle()
    assert large.state is HostState.READY, "one adapter may always be on its way"


@pytest.mark.parametrize("seed", range(10))
def test_random_holds_and_releases_never_exceed_the_bytes_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.choice([0, 3, 8, 20]), staging_pages=rng.choice([0, 7, 15]), rng=rng)
    world.fault = 0.1
    sizes = [rng.randrange(1, 6) for _ in range(12)]
    held: list[HostEntry] = []
    for _ in range(600):
        action = rng.random()
        if action < 0.45 and len(held) < 10:
            which = rng.randrange(12)
            held.append(world.hold(which, sizes[which], is_known=rng.random() < 0.5))
        elif action < 0.85 and held:
            world.tier.release(held.pop(rng.randrange(len(held))))
        elif action < 0.9:
            world.tier.forget(digest_of(rng.randrange(12)))
        world.pass_time(rng.choice([0.0, 0.1, 1.0]))
        for place, entry in enumerate(held):
            if entry.state is HostState.READY and rng.random() < 0.5:
                held[place] = world.tier.settle(entry)
                world.tier.check()
        for entry in held:
            assert entry.state is not HostState.GONE, "an entry was evicted while it was held"
            if entry.images is not None:
                which = next(i for i in range(12) if digest_of(i) == entry.digest)
                assert np.array_equal(entry.images[0], page_of(which, 0, PAGE))
    while held:
        world.tier.release(held.pop())
    world.settle()
    assert world.tier.used_bytes <= world.tier.capacity_bytes
    for which in range(12):
        world.tier.forget(digest_of(which))
    assert world.tier.used_bytes == 0
