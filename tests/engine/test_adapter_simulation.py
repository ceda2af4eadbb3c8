"""Adapters under everything at once, from seeds; `adapter_simulation` says what is checked."""

from __future__ import annotations

import os

import pytest

from tests.engine.adapter_simulation import NO_FAULTS, Faults, simulate

HEAVY_ROUNDS = int(os.environ.get("KVARTO_SIMULATED_ADAPTER_ROUNDS", "100000"))


def test_two_thousand_rounds_under_faults_have_no_wrong_token_and_leave_no_page() -> None:
    counts = simulate(2000, seed=3, faults=Faults())
    for name in (
        "ended with adapter", "ended without", "loads", "loads into pages",
        "evictions", "hits", "cancels", "call faults", "slow calls",
        "copy faults", "step faults", "preemptions", "AdapterRefused", "TransferFailed", "UnknownAdapter", "answers",
    ):  # fmt: skip
        assert counts[name] > 0, f"the simulation never saw `{name}`, so it proves nothing about it"
    assert counts["adapters in a step, most"] > 1
    assert counts["pages in common, most"] > 1


def test_without_faults_only_what_clients_got_wrong_is_refused() -> None:
    counts = simulate(500, seed=2, faults=NO_FAULTS)
    assert counts["TransferFailed"] == 0
    # A choice that had begun and was preempted cannot go on when its adapter's files were replaced meanwhile.
    assert counts["AdapterRefused"] <= 2
    assert counts["ended with adapter"] > 0


@pytest.mark.heavy
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_rounds_under_faults() -> None:
    counts = simulate(HEAVY_ROUNDS, seed=31, faults=Faults())
    assert counts["rounds"] >= HEAVY_ROUNDS
