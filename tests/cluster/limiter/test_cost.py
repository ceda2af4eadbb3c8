"""What the limiter costs over the raw call."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.cluster.limiter.conftest import StartContainer
from tests.cluster.limiter.container import HERE, Build, compile_c


@pytest.mark.heavy
def test_a_pair_costs_at_most_200_ns(built: Build, start: StartContainer) -> None:
    program = compile_c(built.folder / "cost", HERE / "cost.c", HERE / "ways.c", f"-L{built.folder}", "-lcuda")
    container = start("8GiB")
    del container.env["KVARTO_FAKE_BOARD"]  # the card without its books, so that the raw call is as fast as can be
    measured = {}
    for preload in ("", str(built.limiter)):
        env = {**container.env, "LD_PRELOAD": preload}
        done = subprocess.run([program], env=env, capture_output=True, text=True, check=True)
        measured[bool(preload)] = json.loads(done.stdout)
    print(measured)
    added = {name: measured[True][name] - measured[False][name] for name in measured[True]}
    assert added["pair_ns"] <= 200, measured
    assert added["launch_ns"] <= 5, measured  # the same address with and without: only the clock differs
