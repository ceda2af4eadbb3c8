"""From flags to a budget: each flag alone, the combinations, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, MIB
from kvarto.memory.budget import resolve_budget
from kvarto.memory.limits import ProcessLimits

LIMITS = ProcessLimits(total_bytes=64 * GIB, available_bytes=40 * GIB, num_cpus=8)
IN_GROUP = replace(LIMITS, cgroup_limit_bytes=8 * GIB, cgroup_free_bytes=7 * GIB)


def test_default_takes_what_the_plan_would_like() -> None:
    assert resolve_budget(LIMITS, 3 * GIB).device_bytes == 3 * GIB


@pytest.mark.parametrize(("limits", "half_bytes"), [(LIMITS, 20 * GIB), (IN_GROUP, 3584 * MIB)])
def test_default_takes_at_most_half_of_what_is_free(limits: ProcessLimits, half_bytes: int) -> None:
    budget = resolve_budget(limits, 30 * GIB)
    assert budget.device_bytes == half_bytes
    assert "half of the" in budget.source


def test_device_memory_is_taken_as_it_is() -> None:
    budget = resolve_budget(LIMITS, 1, device_memory=8 * GIB + 1)
    assert (budget.device_bytes, budget.kv_bytes) == (8 * GIB + 1, None)
    assert "`--device-memory 8.00GiB`" in budget.source


def test_a_share_is_of_the_smaller_of_group_and_machine() -> None:
    assert resolve_budget(LIMITS, 1, gpu_memory_utilization=0.5).device_bytes == 32 * GIB
    assert resolve_budget(IN_GROUP, 1, gpu_memory_utilization=0.5).device_bytes == 4 * GIB
    assert "control group" in resolve_budget(IN_GROUP, 1, gpu_memory_utilization=0.5).source


def test_pages_alone_may_take_what_is_free() -> None:
    budget = resolve_budget(IN_GROUP, 1, kv_cache_memory_bytes=2 * GIB)
    assert (budget.device_bytes, budget.kv_bytes) == (7 * GIB - 256 * MIB, 2 * GIB)


def test_pages_within_a_ceiling() -> None:
    budget = resolve_budget(LIMITS, 1, device_memory=4 * GIB, kv_cache_memory_bytes=2 * GIB)
    assert (budget.device_bytes, budget.kv_bytes) == (4 * GIB, 2 * GIB)


def test_two_flags_for_one_number_are_refused() -> None:
    with pytest.raises(UsageError, match=r"`--device-memory` and `--gpu-memory-utilization`"):
        resolve_budget(LIMITS, 1, device_memory=GIB, gpu_memory_utilization=0.5)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_share_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match=re.escape(f"`--gpu-memory-utilization {share}`")):
        resolve_budget(LIMITS, 1, gpu_memory_utilization=share)


@pytest.mark.parametrize("flags", [{"device_memory": 0}, {"kv_cache_memory_bytes": -1}])
def test_no_bytes_are_refused(flags: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        resolve_budget(LIMITS, 1, **flags)


def test_more_pages_than_device_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--kv-cache-memory-bytes 2.00GiB` is more than the 1.00 GiB"):
        resolve_budget(LIMITS, 1, device_memory=GIB, kv_cache_memory_bytes=2 * GIB)


@pytest.mark.parametrize(
    "flags",
    [{"device_memory": 7 * GIB - 256 * MIB + 1}, {"gpu_memory_utilization": 0.99}, {"device_memory": 100 * GIB}],
)
def test_more_than_is_free_is_refused_with_what_would_work(flags: dict[str, int]) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_budget(IN_GROUP, 1, **flags)
    suggested = re.search(r"`--device-memory (\d+)`$", str(refused.value))
    assert suggested is not None
    assert resolve_budget(IN_GROUP, 1, device_memory=int(suggested[1])).device_bytes == 7 * GIB - 256 * MIB


def test_a_small_machine_keeps_an_eighth_for_the_process() -> None:
    small = replace(LIMITS, available_bytes=800 * MIB)
    assert resolve_budget(small, 1, device_memory=700 * MIB).device_bytes == 700 * MIB
    with pytest.raises(UsageError, match="for the process itself"):
        resolve_budget(small, 1, device_memory=700 * MIB + 1)
