"""What fits on one card: every set of MIG instances that has a placement, and the placement with the most compute.

A card is a row of memory slices; an instance covers some, beginning at one of its profile's starts. Compute slices are
only counted. Sets are small (at most seven instances), so all are enumerated, once per kind of card.
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
    empty = (0,) * len(card.profiles)
    feasible = {empty}
    frontier = [empty]
    maximal: list[Counts] = []
    while frontier:
        counts = frontier.pop()
        can_grow = False
        for index in range(len(counts)):
            more = plus_one(counts, index)
            if more in feasible:
                can_grow = True
            elif _may_fit(card, more) and any(placements(card, _entries(card, more))):
                can_grow = True
                feasible.add(more)
                frontier.append(more)
        if not can_grow:
            maximal.append(counts)
    maximal.sort(key=lambda counts: counts[::-1], reverse=True)
    most = tuple(max(counts[index] for counts in maximal) for index in range(len(empty)))
    return CardSets(frozenset(feasible), tuple(maximal), most)


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


def _may_fit(card: Card, counts: Counts) -> bool:
    """Whether slices alone would allow it; sorts out most sets before any placement is tried."""
    pairs = list(zip(card.profiles, counts, strict=True))
    memory = sum(profile.memory_slices * count for profile, count in pairs)
    compute = sum(profile.compute_slices * count for profile, count in pairs)
    return memory <= card.memory_slices and compute <= card.compute_slices


def _has_media(placed: Sequence[Placed]) -> bool:
    return any(each.profile.has_media for each in placed)


def _entries(card: Card, counts: Counts) -> list[tuple[Profile, ...]]:
    """Largest first: what is hard to place is placed while there is room."""
    pairs = sorted(zip(card.profiles, counts, strict=True), key=lambda pair: -pair[0].memory_slices)
    return [(profile,) for profile, count in pairs for _ in range(count)]
