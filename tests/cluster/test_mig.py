"""MIG: what fits on a card and on how few cards, against a slower judge that tries everything."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from functools import cache

import pytest

from kvarto.cluster.cards import CARDS, Card, Profile, find_card
from kvarto.cluster.mig_card import CardSets, Placed, best_placement, card_sets, placements
from kvarto.cluster.mig_config import commands, creation_order, mig_parted_config
from kvarto.cluster.mig_packing import Demand, MigPlan, fitting_profiles, pack
from kvarto.core.errors import UsageError
from kvarto.core.units import GIB

MIG_CARDS = [card for card in CARDS.values() if card.profiles]
MAX_PACKING_S = 0.010


def is_valid(card: Card, placed: list[Placed]) -> bool:
    """The judge: slices at most once, starts allowed, compute enough, one instance with media engines."""
    slices = [slice_ for each in placed for slice_ in range(each.start, each.start + each.profile.memory_slices)]
    return (
        len(slices) == len(set(slices))
        and all(0 <= slice_ < card.memory_slices for slice_ in slices)
        and all(each.start in each.profile.starts for each in placed)
        and sum(each.profile.compute_slices for each in placed) <= card.compute_slices
        and sum(each.profile.has_media for each in placed) <= 1
    )


@cache
def every_set(card: Card) -> frozenset[tuple[int, ...]]:
    """All sets of instances, by trying for each memory slice every profile that could begin there."""
    found: set[tuple[int, ...]] = set()

    def go(position: int, placed: list[Placed]) -> None:
        if not is_valid(card, placed):
            return
        if position == card.memory_slices:
            found.add(tuple(sum(each.profile == profile for each in placed) for profile in card.profiles))
            return
        go(position + 1, placed)
        for profile in card.profiles:
            if position in profile.starts:
                go(position + 1, [*placed, Placed(profile, position)])

    go(0, [])
    return frozenset(found)


def fewest_cards(card: Card, counts: tuple[int, ...]) -> int:
    """Breadth first over every set, full or not: no bound, no order, no greed."""
    frontier, num_cards = {counts}, 0
    while not any(not any(left) for left in frontier):
        num_cards += 1
        frontier = {
            tuple(a - b for a, b in zip(left, taken, strict=True))
            for left in frontier
            for taken in every_set(card)
            if any(taken) and all(b <= a for a, b in zip(left, taken, strict=True))
        }
        # What is left of less is never harder: keep the smallest only, to stay within memory.
        frontier = {left for left in frontier if not any(other != left and leq(other, left) for other in frontier)}
    return num_cards


def leq(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def random_demands(card: Card, rng: random.Random, count: int) -> list[Demand]:
    demands = []
    for index in range(count):
        if rng.random() < 0.5:
            demands.append(Demand(f"m{index}", profile=rng.choice(card.profiles).name))
        else:
            demands.append(Demand(f"m{index}", memory_bytes=int(card.memory_bytes * rng.uniform(0.01, 0.9))))
    return demands


@pytest.mark.parametrize("card", MIG_CARDS, ids=lambda card: card.name)
def test_the_sets_of_a_card_are_all_that_there_are(card: Card) -> None:
    sets = card_sets(card)
    assert sets.feasible == every_set(card)
    assert set(sets.maximal) == {
        counts for counts in sets.feasible if not any(other != counts and leq(counts, other) for other in sets.feasible)
    }


@pytest.mark.parametrize("card", MIG_CARDS, ids=lambda card: card.name)
def test_packing_needs_no_more_cards_than_trying_everything(card: Card) -> None:
    rng = random.Random(7)
    times = []
    for _ in range(25):
        demands = random_demands(card, rng, rng.randrange(1, 9))
        card_sets.cache_clear()
        started = time.process_time()
        plan = pack(card, demands)
        times.append(time.process_time() - started)
        assert plan.is_proven
        check_plan(plan, demands)
        indices = [card.profiles.index(fitting_profiles(card, demand)[0]) for demand in demands]
        counts = tuple(indices.count(index) for index in range(len(card.profiles)))
        assert len(plan.cards) == fewest_cards(card, counts)
    assert statistics.median(times) <= MAX_PACKING_S  # from nothing: the card's sets are enumerated anew each time


def check_plan(plan: MigPlan, demands: list[Demand]) -> None:
    """Every demand is served once, by an instance that holds it, on cards that can exist."""
    served = [each.demand for card in plan.cards for each in card]
    assert sorted(served, key=lambda demand: demand.name) == sorted(demands, key=lambda demand: demand.name)
    for card in plan.cards:
        assert is_valid(plan.card, [each.placed for each in card])
        for each in card:
            profile = each.placed.profile
            assert profile.memory_bytes >= each.demand.memory_bytes
            assert each.demand.profile in (None, profile.name)


@pytest.mark.parametrize("card", MIG_CARDS, ids=lambda card: card.name)
def test_idle_compute_goes_to_the_models_of_the_card(card: Card) -> None:
    rng = random.Random(3)
    for _ in range(20):
        plan = pack(card, random_demands(card, rng, rng.randrange(1, 8)))
        for instances in plan.cards:
            choices = [fitting_profiles(card, each.demand) for each in instances]
            given = sum(each.placed.profile.compute_slices for each in instances)
            assert given == most_compute(card, choices)


def most_compute(card: Card, choices: list[tuple[Profile, ...]]) -> int:
    options = [[Placed(profile, start) for profile in profiles for start in profile.starts] for profiles in choices]
    ways = itertools.product(*options) if len(options) <= 4 else ()
    valid = [sum(each.profile.compute_slices for each in way) for way in ways if is_valid(card, list(way))]
    if valid:
        return max(valid)
    best = best_placement(card, choices)  # too many ways to try blindly
    assert best is not None
    return sum(each.profile.compute_slices for each in best)


def test_many_models_are_packed_quickly_and_well() -> None:
    card = find_card("H100")
    rng = random.Random(1)
    demands = random_demands(card, rng, 200)
    plan = pack(card, demands)
    check_plan(plan, demands)
    slices = sum(fitting_profiles(card, demand)[0].memory_slices for demand in demands)
    assert len(plan.cards) <= -(-slices // card.memory_slices) + 10


def test_the_search_beats_greed_where_greed_is_wrong() -> None:
    """A media instance blocks no more than it must, and the eighth memory slice of a card is no place for a 1g."""
    card = find_card("A100-40")
    assert len(pack(card, [Demand(f"m{i}", profile="1g.5gb") for i in range(8)]).cards) == 2
    assert len(pack(card, [Demand("a", profile="1g.5gb+me"), Demand("b", profile="1g.5gb+me")]).cards) == 2
    plan = pack(card, [Demand("a", profile="3g.20gb"), *(Demand(f"m{i}", profile="1g.5gb") for i in range(4))])
    (instances,) = plan.cards
    assert next(each.placed.start for each in instances if each.demand.name == "a") == 4


def test_memory_is_asked_for_in_bytes_not_in_the_name_of_the_profile() -> None:
    card = find_card("A100-40")
    assert fitting_profiles(card, Demand("a", memory_bytes=4864 << 20))[0].name == "1g.5gb"
    names = [profile.name for profile in fitting_profiles(card, Demand("a", memory_bytes=5 * GIB))]
    assert names == ["1g.10gb", "2g.10gb"]
    with pytest.raises(UsageError, match=r"`a` needs 41.00 GiB; the largest instance of `A100-40`, `7g.40gb`, holds"):
        fitting_profiles(card, Demand("a", memory_bytes=41 * GIB))
    with pytest.raises(UsageError, match="can't be divided by MIG"):
        pack(find_card("L4"), [Demand("a", memory_bytes=GIB)])
    with pytest.raises(UsageError, match=r"`A100-40` has no MIG profile `1g.20gb`; it has `1g.5gb`"):
        pack(card, [Demand("a", profile="1g.20gb")])


def test_commands_replay_to_the_plan() -> None:
    """A machine that obeys the commands one after the other never finds a place taken."""
    card = find_card("H200")
    plan = pack(card, random_demands(card, random.Random(5), 12))
    for index, instances in enumerate(plan.cards):
        line = next(each for each in commands(plan) if f"mig -i {index} " in each)
        placed: list[Placed] = []
        for item in line.split("-cgi ")[1].removesuffix(" -C").split(","):
            name, start = item.split(":")
            placed.append(Placed(card.profile(name), int(start)))
            assert is_valid(card, placed)
        assert placed == [each.placed for each in creation_order(instances)]


def test_the_configuration_of_mig_parted_makes_the_same_instances() -> None:
    card = find_card("A30")
    plan = pack(card, random_demands(card, random.Random(9), 10))
    groups = mig_parted_config(plan)["mig-configs"]["kvarto"]
    assert sorted(device for group in groups for device in group["devices"]) == list(range(len(plan.cards)))
    for group in groups:
        for device in group["devices"]:
            names = sorted(each.placed.profile.name for each in plan.cards[device])
            assert names == sorted(name for name, count in group["mig-devices"].items() for _ in range(count))


def test_every_placement_comes_once() -> None:
    card = find_card("A100-80")
    profile = card.profile("1g.20gb")
    ways = list(placements(card, [(profile,), (profile,)]))
    assert len(ways) == len(set(ways)) == 6  # two of four places
    assert isinstance(card_sets(card), CardSets)


@pytest.mark.parametrize(
    ("text", "name"), [("h100", "H100-80"), ("A100-80GB", "A100-80"), ("a30", "A30-24"), ("h200", "H200-141")]
)
def test_cards_are_found_as_people_write_them(text: str, name: str) -> None:
    assert find_card(text).name == name
    with pytest.raises(UsageError, match="is not in the table"):
        find_card("H1000")
