"""What fits on one card: every set of MIG instances that has a placement, and the placement with the most compute.

A card is a row of memory slices; an instance covers some, beginning at one of its profile's starts. Compute slices are
only counted. A card holds seven instances at most, so all sets are enumerated, once per kind of card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from kvarto.cluster.cards import Card, Profile

Counts = tuple[int, ...]
"""Instances by profile, in the order of `card.profiles`."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An instance on a card."""

    profile: Profile
    start: int
    """Its first memory slice."""


def placements(card: Card, wanted: Sequence[tuple[Profile, ...]]) -> Iterator[tuple[Placed, ...]]:
    """Every way to place one instance per entry, which lists the profiles that will do. Equal entries in a row are
    placed from left to right, so that no way comes twice.
    """
    yield from _place(card, wanted, (), taken=0, compute_left=card.compute_slices)


def best_placement(card: Card, wanted: Sequence[tuple[Profile, ...]]) -> tuple[Placed, ...] | None:
    """The way that gives the most compute slices, and among those the first found; None where nothing fits."""
    ways = placements(card, wanted)
    return max(ways, key=lambda way: sum(placed.profile.compute_slices for placed in way), default=None)


@dataclass(frozen=True, slots=True)
class CardSets:
    """All sets of instances that a kind of card can hold."""

    feasible: frozenset[Counts]
    """Parts of a set that fits fit too, so this is closed downwards."""
    maximal: tuple[Counts, ...]
    """Those to which nothing can be added, the ones with the largest instances first."""
    most: Counts
    """Of each profile alone."""


@cache
def card_sets(card: Card) -> CardSets:
    """Enumerated once per kind of card."""
    feasible = _every_set(card)
    size = range(len(card.profiles))
    maximal = [counts for counts in feasible if not any(plus_one(counts, index) in feasible for index in size)]
    maximal.sort(key=lambda counts: counts[::-1], reverse=True)
    most = tuple(max(counts[index] for counts in maximal) for index in size)
    return CardSets(feasible, tuple(maximal), most)


def _every_set(card: Card) -> frozenset[Counts]:
    """From the left: which sets can fill the slices up to here, the next slice left empty or an instance begun."""
    empty = (0,) * len(card.profiles)
    reached: list[set[Counts]] = [{empty}, *(set() for _ in range(card.memory_slices))]
    for position in range(card.memory_slices):
        beginning = [(i, each) for i, each in enumerate(card.profiles) if position in each.starts]
        for counts in reached[position]:
            reached[position + 1].add(counts)
            compute_left = card.compute_slices - _compute(card, counts)
            for index, profile in beginning:
                if profile.compute_slices <= compute_left and not (profile.has_media and counts[index]):
                    reached[position + profile.memory_slices].add(plus_one(counts, index))
    return frozenset(reached[-1])


def _compute(card: Card, counts: Counts) -> int:
    return sum(count * profile.compute_slices for count, profile in zip(counts, card.profiles, strict=True))


def plus_one(counts: Counts, index: int) -> Counts:
    """One more instance of a profile."""
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])


def _place(
    card: Card, wanted: Sequence[tuple[Profile, ...]], placed: tuple[Placed, ...], taken: int, compute_left: int
) -> Iterator[tuple[Placed, ...]]:
    if len(placed) == len(wanted):
        yield placed
        return
    profiles = wanted[len(placed)]
    is_repeated = bool(placed) and wanted[len(placed) - 1] == profiles
    for profile in profiles:
        if profile.compute_slices > compute_left or (profile.has_media and _has_media(placed)):
            continue
        for start in profile.starts:
            covered = ((1 << profile.memory_slices) - 1) << start
            if taken & covered or (is_repeated and start < placed[-1].start):
                continue
            more = (*placed, Placed(profile, start))
            yield from _place(card, wanted, more, taken | covered, compute_left - profile.compute_slices)


def _has_media(placed: Sequence[Placed]) -> bool:
    return any(each.profile.has_media for each in placed)
