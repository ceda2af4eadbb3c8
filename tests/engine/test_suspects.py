"""Strikes: the culprit is found, the innocent are cleared, and ended requests leave nothing behind."""

from __future__ import annotations

import random

from kvarto.engine.backoff import Backoff
from kvarto.engine.suspects import Suspects


def test_the_third_death_names_the_culprit() -> None:
    suspects = Suspects()
    assert suspects.died({"a": 0, "poison": 0}) == []
    assert not suspects.runs_alone("poison")
    assert suspects.died({"b": 4, "poison": 0}) == []
    assert suspects.runs_alone("poison")
    assert not suspects.runs_alone("a")
    assert suspects.died({"poison": 0}) == ["poison"]


def test_kills_from_outside_need_more_before_a_request_is_blamed() -> None:
    suspects = Suspects()
    for _ in range(5):
        assert suspects.died({"a": 0}, was_killed=True) == []
    assert suspects.runs_alone("a")
    assert suspects.died({"a": 0}, was_killed=True) == ["a"]
    suspects.forget("a")
    for _ in range(2):
        assert suspects.died({"a": 0}, was_killed=True) == []
    assert suspects.died({"a": 0}) == ["a"]


def test_a_lone_request_is_cleared_only_past_the_place_where_it_died() -> None:
    suspects = Suspects()
    suspects.died({"a": 3})
    assert not suspects.advanced("a", 9)  # one strike: it never ran alone
    suspects.died({"a": 9})
    assert not suspects.advanced("a", 9)
    assert suspects.advanced("a", 10)
    assert suspects.strikes("a") == 0


def test_seeded_deaths_blame_the_poison_alone() -> None:
    """Random batches: lone suspects run first, as in the engine. Every run ends with exactly the poison condemned."""
    for seed in range(200):
        rng = random.Random(seed)
        suspects = Suspects()
        tokens = dict.fromkeys([f"r{index}" for index in range(8)], 0)
        condemned: list[str] = []
        for _ in range(200):
            alone = [name for name in tokens if suspects.runs_alone(name)]
            batch = alone[:1] or [name for name in tokens if rng.random() < 0.7]
            if "r0" in batch:
                culprits = suspects.died({name: tokens[name] for name in batch})
                condemned += culprits
                for name in culprits:
                    suspects.forget(name)
                    del tokens[name]
                continue
            for name in batch:
                tokens[name] += 1
                suspects.advanced(name, tokens[name])
        assert condemned == ["r0"]
        for name in list(tokens):
            suspects.forget(name)
        assert len(suspects) == 0


def test_backoff_grows_and_is_forgiven() -> None:
    backoff = Backoff()
    waits = [backoff.died(0.0) for _ in range(10)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] == 10.0
    assert backoff.died(31.0) == 0.0
