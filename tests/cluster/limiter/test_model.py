"""The ledger's protocol under a scheduler that switches, kills and forks before every atomic step."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.limiter.container import HERE, LIMITER, Build, wide_swap

NUM_SCHEDULES = 5_000

# What a careless edit might do to the protocol, and how many schedules may pass before it is noticed.
MUTATIONS = {
    "a change is made twice": ("if (before.high >= change.sequence) return;", "", 100),
    "the change before is not carried over": ("    write_through(ledger, device, unpack(last));\n", "", 100),
    "a reservation reads and then writes": (
        "if (!word_swap(&ledger->devices[device].total, last, pack(next))) return false;",
        "LIMITER_STEP(); ledger->devices[device].total = pack(next);",
        100,
    ),
    "one unit above the limit": ("change.used > limit_units - units", "change.used > limit_units - units + 1", 100),
    "a verdict outlives the slot's owner": (
        "if (units == 0 || step_load(&ledger->slots[slot].generation) != generation) return false;",
        "if (units == 0) return false;",
        5_000,
    ),
    "a new owner keeps what the dead one held": ("        reclaim(ledger, device, slot, taking);\n", "", 5_000),
    "an account is written without comparing": (
        "        if (word_swap(account, before, after)) return;",
        "        LIMITER_STEP(); *account = after; return;",
        5_000,
    ),
}  # fmt: skip


def compile_model(folder: Path, sources: Path) -> Path:
    program = folder / "model"
    command = ["cc", "-std=gnu11", "-O2", *wide_swap(), f"-I{sources}", str(HERE / "model.c"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, first_seed: int, count: int) -> dict[str, object]:
    done = subprocess.run([program, str(first_seed), str(count)], capture_output=True, text=True, timeout=600)
    answer: dict[str, object] = json.loads(done.stdout)
    assert (done.returncode != 0) == ("broken" in answer)
    return answer


def check_schedules(folder: Path, first_seed: int, count: int) -> None:
    answer = run(compile_model(folder, LIMITER), first_seed, count)
    assert answer.get("overshoot_bytes") == 0, answer
    assert answer["schedules"] == count
    for event in ("kills", "forks", "refusals", "solo"):  # all of it happened, and often
        assert int(str(answer[event])) > count, (event, answer)


def test_no_schedule_overshoots_and_the_account_is_the_truth(built: Build, tmp_path: Path) -> None:
    check_schedules(tmp_path, 1, NUM_SCHEDULES)


@pytest.mark.heavy
def test_a_hundred_thousand_schedules(built: Build, tmp_path: Path) -> None:
    check_schedules(tmp_path, 1_000_000, 100_000)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_protocol_is_noticed(built: Build, tmp_path: Path, name: str) -> None:
    original, broken, count = MUTATIONS[name]
    for header in ("word.h", "ledger.h"):
        shutil.copy(LIMITER / header, tmp_path)
    source = (LIMITER / "ledger.c").read_text()
    assert source.count(original) == 1
    (tmp_path / "ledger.c").write_text(source.replace(original, broken))
    assert "broken" in run(compile_model(tmp_path, tmp_path), 1, count)
