"""Pack models onto as few MIG cards as possible, then give each card's idle compute to its models. Pure.

A model that names bytes takes the smallest profile that holds them: whatever holds a larger instance holds that one in
its place, so no card is lost by it. The number of cards is then a cutting-stock problem over the few sets of instances
that a card can hold: a greedy answer that meets a lower bound is optimal; otherwise the sets are searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarto.cluster.cards import Card, Profile
from kvarto.cluster.mig_card import CardSets, Counts, Placed, best_placement, card_sets, plus_one
from kvarto.core.errors import UsageError
from kvarto.core.units import ceil_div, format_bytes

MAX_STATES = 5_000
"""Of the search; beyond it the greedy answer stands, marked as not proven."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One server that wants an instance: so many bytes, or a profile by name."""

    name: str
    memory_bytes: int = 0
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Assigned:
    """An instance and the demand it serves."""

    demand: Demand
    placed: Placed


@dataclass(frozen=True, slots=True)
class MigPlan:
    """Cards, each with its instances in the order in which to create them."""

    card: Card
    cards: tuple[tuple[Assigned, ...], ...]
    is_proven: bool
    """Whether fewer cards are known to be impossible."""


def fitting_profiles(card: Card, demand: Demand) -> tuple[Profile, ...]:
    """Profiles that will do for it, the smallest first. Raises UsageError where none does."""
    if not card.profiles:
        raise UsageError(f"`{card.name}` can't be divided by MIG; take a scheme that shares the whole card")
    if demand.profile is not None:
        return (card.profile(demand.profile),)
    plain = [profile for profile in card.profiles if not profile.has_media]
    holding = [profile for profile in plain if profile.memory_bytes >= demand.memory_bytes]
    if not holding:
        raise UsageError(
            f"`{demand.name}` needs {format_bytes(demand.memory_bytes)}; the largest instance of `{card.name}`, "
            f"`{plain[-1].name}`, holds {format_bytes(plain[-1].memory_bytes)}"
        )
    least = min(profile.memory_slices for profile in holding)
    return tuple(profile for profile in holding if profile.memory_slices == least)


def pack(card: Card, demands: Sequence[Demand]) -> MigPlan:
    """The fewest cards that hold all demands. Raises UsageError for a demand that no instance holds."""
    choices = {demand: fitting_profiles(card, demand) for demand in dict.fromkeys(demands)}
    indices = {demand: card.profiles.index(profiles[0]) for demand, profiles in choices.items()}
    wanted = Counter(indices[demand] for demand in demands)
    counts = tuple(wanted[index] for index in range(len(card.profiles)))
    shelves, is_proven = _fewest(card, counts)
    waiting = sorted(demands, key=lambda demand: indices[demand])
    return MigPlan(card, tuple(_fill(card, shelf, waiting, indices, choices) for shelf in shelves), is_proven)


def _fill(
    card: Card,
    shelf: Counts,
    waiting: list[Demand],
    indices: dict[Demand, int],
    choices: dict[Demand, tuple[Profile, ...]],
) -> tuple[Assigned, ...]:
    """Take this card's demands off the list and place them."""
    mine: list[Demand] = []
    left = list(shelf)
    for demand in list(waiting):
        if left[indices[demand]]:
            left[indices[demand]] -= 1
            waiting.remove(demand)
            mine.append(demand)
    mine.sort(key=lambda demand: -choices[demand][0].memory_slices)
    placed = best_placement(card, [choices[demand] for demand in mine])
    assert placed is not None, f"{shelf} is a set that fits on `{card.name}`"
    return tuple(map(Assigned, mine, placed))


def _fewest(card: Card, counts: Counts) -> tuple[list[Counts], bool]:
    """Sets of instances, one per card, that add up to `counts`; and whether no fewer would do."""
    search = _Search(card, card_sets(card))
    greedy = search.first_fit(counts)
    for num_cards in range(search.lower_bound(counts), len(greedy)):
        try:
            found = search.cover(counts, num_cards)
        except _TooManyStates:
            return greedy, False
        if found is not None:
            return found, True
    return greedy, True


class _TooManyStates(Exception):
    pass


@dataclass(slots=True)
class _Search:
    """Depth first over full cards; each must hold one of the largest instances still waiting."""

    card: Card
    sets: CardSets
    _failed: set[tuple[int, Counts]] = field(default_factory=set)

    def first_fit(self, counts: Counts) -> list[Counts]:
        """Largest first, each into the first card that can still hold it."""
        shelves: list[Counts] = []
        for index in reversed(range(len(counts))):
            for _ in range(counts[index]):
                for position, shelf in enumerate(shelves):
                    if plus_one(shelf, index) in self.sets.feasible:
                        shelves[position] = plus_one(shelf, index)
                        break
                else:
                    shelves.append(plus_one((0,) * len(counts), index))
        return shelves

    def lower_bound(self, counts: Counts) -> int:
        """Cards that slices alone ask for, or one profile alone."""
        pairs = list(zip(self.card.profiles, counts, strict=True))
        memory = ceil_div(sum(profile.memory_slices * count for profile, count in pairs), self.card.memory_slices)
        compute = ceil_div(sum(profile.compute_slices * count for profile, count in pairs), self.card.compute_slices)
        return max(memory, compute, *map(ceil_div, counts, self.sets.most))

    def cover(self, counts: Counts, num_cards: int) -> list[Counts] | None:
        """`num_cards` sets that add up to `counts`; None where there are none."""
        if not any(counts):
            return []
        if (num_cards, counts) in self._failed or self.lower_bound(counts) > num_cards:
            return None
        if len(self._failed) > MAX_STATES:
            raise _TooManyStates
        largest = max(index for index, count in enumerate(counts) if count)
        for shelf in self._shelves(counts, largest):
            rest = self.cover(tuple(a - b for a, b in zip(counts, shelf, strict=True)), num_cards - 1)
            if rest is not None:
                return [shelf, *rest]
        self._failed.add((num_cards, counts))
        return None

    def _shelves(self, counts: Counts, largest: int) -> list[Counts]:
        """Full cards, cut down to what is wanted, that hold one of the largest."""
        cut = dict.fromkeys(tuple(map(min, shelf, counts)) for shelf in self.sets.maximal)
        return [shelf for shelf in cut if shelf[largest]]
