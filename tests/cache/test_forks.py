"""Forks share pages and copy on write, at any token; copies may be late, fail, or be nobody's any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvarto.core.errors import TransferFailed
from tests.cache.test_prefix import compute
from tests.cache.world import Choice, Scene, World


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 24, 63, 64, 100])
@pytest.mark.parametrize("windows", [(None,), (None, 12)])
def test_a_fork_at_any_token_recomputes_nothing(page_size: int, length: int, windows: tuple[int | None, ...]) -> None:
    world = World(Scene(page_size=page_size, windows=windows, num_pages=200))
    parent = compute(world, world.open([1] * length))
    held = world.pool.num_held
    children = [world.fork(parent) for _ in range(5)]
    assert world.pool.num_held == held, "a fork takes no page"
    for child in children:
        assert child.num_computed == length
        child.tokens += [2, len(world.choices)]
    parent.tokens += [3] * 40
    for choice in [children[0], parent, *children[1:]]:
        compute(world, choice, 7)
    world.drain()


def test_the_last_user_of_a_page_writes_in_place() -> None:
    world = World(Scene(page_size=16, num_pages=40))
    parent = compute(world, world.open([1] * 20))
    child = world.fork(parent)
    child.tokens += [2]
    parent.tokens += [3]
    assert world.cache.pages_to_grow(parent.sequence, 21) == 1
    compute(world, parent)
    assert world.cache.pages_to_grow(child.sequence, 21) == 0
    compute(world, child)
    assert world.counts["copies on write"] == 1
    assert world.pool.num_held == 3
    world.drain()


def test_sixty_four_forks_of_a_long_prompt_cost_their_tails() -> None:
    world = World(Scene(page_size=16, num_pages=700))
    parent = compute(world, world.open([1] * 8000 + [2] * 5))
    before = world.pool.num_held
    choices = [parent] + [world.fork(parent) for _ in range(63)]
    for index, choice in enumerate(choices):
        choice.tokens += [index]
        compute(world, choice, is_checked=False)
    assert world.pool.num_held == before + 63
    world.drain()


def test_a_fork_of_a_sequence_that_waits_waits_too() -> None:
    world = World(Scene(page_size=16, num_pages=40, copy_s=2.0))
    world.close(compute(world, world.open([1] * 32)))
    parent = world.open([1] * 24)
    child = world.fork(parent)
    world.close(parent)
    assert not world.cache.is_ready(child.sequence)
    world.tick(2.0)
    world.tick(0.0)
    assert world.cache.is_ready(child.sequence), "closing the parent cancelled a copy that its child waits for"
    compute(world, child)
    world.drain()


def test_a_failed_copy_is_the_waiting_sequences_and_nobody_elses() -> None:
    world = World(Scene(page_size=16, num_pages=40, fault_rate=1.0))
    parent = compute(world, world.open([1] * 20))
    child = world.fork(parent)
    child.tokens += [2]
    world.cache.grow(child.sequence, 21)
    world.tick(2.0)
    with pytest.raises(TransferFailed, match="injected"):
        world.cache.is_ready(child.sequence)
    world.check()
    world.close(child)
    parent.tokens += [3] * 40
    compute(world, parent)
    world.drain()


def test_an_overdue_copy_fails_and_its_pages_wait_for_the_thread() -> None:
    world = World(Scene(page_size=16, num_pages=40, copy_s=1000.0), seed=1)
    parent = compute(world, world.open([1] * 20))
    child = world.fork(parent)
    child.tokens += [2]
    world.cache.grow(child.sequence, 21)
    world.clock.advance(3.5)
    world.cache.sweep()
    with pytest.raises(TransferFailed, match="deadline"):
        world.cache.is_ready(child.sequence)
    world.close(child)
    world.close(parent)
    assert world.pool.num_draining == 2
    world.check()
    world.clock.advance(1000.0)
    world.executor.run_due()
    world.cache.sweep()
    assert world.pool.num_draining == 0
    world.drain()


def late(world: World) -> Choice:
    """A sequence that computed what is cached already, and more: it is detached until it closes."""
    world.close(compute(world, world.open([1] * 64)))
    choice = compute(world, world.open([1] * 64 + [2] * 56, use_prefix=False))
    assert not choice.sequence.is_attached
    return choice


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_forks_of_a_late_sequence_publish_when_the_last_one_closes(page_size: int) -> None:
    world = World(Scene(page_size=page_size, num_pages=200))
    parent = late(world)
    child = world.fork(parent)
    world.close(parent)
    world.check()
    assert world.pool.num_evictable == 64 // page_size, "pages in use below unused ones could not be counted evictable"
    world.close(child)
    world.check()
    assert world.open([1] * 64 + [2] * 56).sequence.num_cached_tokens == 112
    world.drain()


def test_a_late_sequence_publishes_nothing_that_has_not_arrived() -> None:
    world = World(Scene(page_size=64, num_pages=200, fault_rate=1.0))
    parent = late(world)
    child = world.fork(parent)
    child.tokens += [3]
    world.cache.grow(child.sequence, len(child.tokens))
    world.close(parent)  # which leaves all its pages to the child, whose last one is not there yet
    world.close(child)
    world.tick(1.0)
    world.scene = replace(world.scene, fault_rate=0.0)
    compute(world, world.open([1] * 64 + [2] * 56 + [3]))
    world.drain()
