"""The whole engine under faults, from seeds; `simulation` says what is checked."""

from __future__ import annotations

import os

import pytest

from tests.engine.simulate import simulate
from tests.engine.simulation import NO_FAULTS, Episode, Faults

HEAVY_REQUESTS = int(os.environ.get("KVARTO_SIMULATED_REQUESTS", "10000"))


def test_every_request_ends_once_with_its_tokens_under_faults() -> None:
    counts = simulate(600, seed=1, faults=Faults())
    for name in (
        "engine deaths", "resumed requests", "step faults", "copy faults", "allocation faults", "cancels", "refused",
        "preemptions", "poisoned", "prompt logprobs", "ended by deadline", "ended by stop", "ended by length",
    ):  # fmt: skip
        assert counts[name] > 0, f"the simulation never saw `{name}`, so it proves nothing about it"
    assert counts["most preemptions of one choice"] <= 12, "a choice was admitted and preempted in circles"


def test_without_faults_nobody_is_preempted_often() -> None:
    counts = simulate(300, seed=2, faults=NO_FAULTS)
    assert counts["preemptions"] > 0
    assert counts["most preemptions of one choice"] <= 4


def test_a_seed_replays() -> None:
    traces = []
    for _ in range(2):
        episode = Episode(12, num_requests=60)
        episode.run()
        traces.append(episode.trace.hexdigest())
    assert traces[0] == traces[1]


@pytest.mark.heavy
def test_ten_thousand_requests_under_faults() -> None:
    counts = simulate(HEAVY_REQUESTS, seed=3, faults=Faults())
    assert counts["requests"] >= HEAVY_REQUESTS
    assert counts["most preemptions of one choice"] <= 12, "a choice was admitted and preempted in circles"
