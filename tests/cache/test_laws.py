"""What the cache refuses from its caller, and that `check` notices what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.cache.test_prefix import compute
from tests.cache.world import Scene, World


def test_tokens_that_were_not_opened_are_not_committed() -> None:
    world = World(Scene())
    sequence = world.cache.open([1] * 40, salt=None)
    world.cache.grow(sequence, 40)
    with pytest.raises(AssertionError, match="differ from those that the sequence was opened with"):
        world.cache.commit(sequence, [1] * 30 + [2] * 10)


def test_tokens_without_room_are_not_committed() -> None:
    world = World(Scene())
    sequence = world.cache.open([1] * 40, salt=None)
    world.cache.grow(sequence, 16)
    with pytest.raises(AssertionError, match="no room"):
        world.cache.commit(sequence, [1] * 40)


def test_a_step_before_its_copies_is_refused() -> None:
    world = World(Scene(copy_s=5.0))
    world.close(compute(world, world.open([1] * 64)))
    sequence = world.cache.open([1] * 24, salt=None)
    world.cache.grow(sequence, 64)
    with pytest.raises(AssertionError, match="before the copies"):
        world.cache.commit(sequence, [1] * 41)


def test_a_sequence_is_closed_once() -> None:
    world = World(Scene())
    choice = world.open([1] * 40)
    world.close(choice)
    with pytest.raises(AssertionError, match="closed twice"):
        world.cache.close(choice.sequence)


def lose_a_page(world: World) -> None:
    world.choices[0].sequence.table[0, 0] = -1


def share_a_page_too_often(world: World) -> None:
    world.pool.share(np.array([world.choices[0].sequence.table[0, 0]], dtype=np.int32))


def forget_to_pin(world: World) -> None:
    world.pool.pin(np.array([world.choices[0].sequence.table[0, 0]], dtype=np.int32))


def cache_behind_the_index(world: World) -> None:
    world.pool.cache([int(world.choices[0].sequence.table[0, 4])])


def forget_to_offer(world: World) -> None:
    world.close(world.choices[0])
    world.arbiter._heap.clear()
    for entry in world.cache._index.entries():
        for unit in entry.units:
            assert unit is not None
            unit.is_offered = False


def change_cached_tokens(world: World) -> None:
    entry = next(iter(world.cache._index.entries()))
    entry.tokens = entry.tokens[::-1]


def swap_pages_of_the_chain(world: World) -> None:
    table = world.choices[0].sequence.table
    table[0, :2] = table[0, 1::-1]


def miscount_tokens(world: World) -> None:
    world.choices[0].sequence.num_computed_tokens += 1


@pytest.mark.parametrize(
    "break_a_law",
    [
        lose_a_page,
        share_a_page_too_often,
        forget_to_pin,
        cache_behind_the_index,
        forget_to_offer,
        change_cached_tokens,
        swap_pages_of_the_chain,
        miscount_tokens,
    ],
)
def test_check_names_a_broken_law(break_a_law: Callable[[World], None]) -> None:
    world = World(Scene())
    compute(world, world.open([3, 1] * 36))
    world.cache.check()
    break_a_law(world)
    with pytest.raises(AssertionError, match=r"\w"):
        world.cache.check()
