"""The seeded driver, a few worlds of it; `python -m tests.cache.drive` runs as many as one likes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cache.drive import drive_world


@pytest.mark.timeout(120)
def test_random_worlds_keep_the_law_and_reach_every_corner() -> None:
    counts: Counter[str] = Counter()
    for seed in range(30):
        counts += drive_world(seed, 200)
    reached = {what for what, count in counts.items() if count >= 20}
    assert reached >= {
        "computed tokens",
        "hit tokens",
        "partial matches",
        "copies on write",
        "forks",
        "preemptions",
        "refusals",
        "failed copies",
        "closed with copies",
        "adapter loads",
        "adapter drops",
        "turns",
        "hit tokens before a turn",
        "hit tokens behind a turn",
    }


def test_a_seed_replays_the_same_steps() -> None:
    assert drive_world(7, 150) == drive_world(7, 150)


@pytest.mark.heavy
@pytest.mark.timeout(7200)
def test_a_million_steps() -> None:
    for seed in range(500):
        drive_world(seed, 2000)
