"""Limits of this process, read from fake `/proc` and `/sys` trees: the tightest level binds, wherever it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarto.core.units import GIB, KIB, MIB
from kvarto.memory.cgroup import V1_UNLIMITED_BYTES, cpu_quota, memory_levels
from kvarto.memory.limits import ProcessLimits, read_limits

V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/{controller} rw - cgroup cgroup rw,{controller}\n"


class FakeMachine:
    """A folder that looks like `/` to the reader."""

    def __init__(self, root: Path, *, total_bytes: int = 64 * GIB, available_bytes: int = 48 * GIB) -> None:
        self.root = root
        meminfo = f"MemTotal: {total_bytes // KIB} kB\nMemFree: 1024 kB\nMemAvailable: {available_bytes // KIB} kB\n"
        self.write("proc/meminfo", meminfo + "HugePages_Total:       0\n")

    def write(self, path: str, text: object) -> None:
        """Write one file, making its folders."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(str(text))

    def version_2(self, group: str, mount_root: str = "/") -> None:
        """Mount one tree and join `group`."""
        self.write("proc/self/cgroup", f"0::{group}\n")
        self.write("proc/self/mountinfo", V2_MOUNT.format(root=mount_root))

    def version_1(self, group: str, mount_root: str = "/") -> None:
        """Mount the trees for memory and cpu and join `group` in both, with an unused second version beside them."""
        self.write("proc/self/cgroup", f"4:memory:{group}\n1:cpu,cpuacct:{group}\n0::/\n")
        mounts = [V1_MOUNT.format(root=mount_root, controller=name) for name in ("memory", "cpu")]
        self.write("proc/self/mountinfo", "".join(mounts) + V2_MOUNT.format(root="/").replace("cgroup rw", "uni rw"))

    def limits(self) -> ProcessLimits:
        """What the reader says, on 16 cores."""
        return read_limits(self.root, num_affine_cpus=16)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_a_machine_without_groups_is_the_limit(machine: FakeMachine) -> None:
    limits = machine.limits()
    assert (limits.usable_bytes, limits.free_bytes, limits.num_cpus) == (64 * GIB, 48 * GIB, 16)
    assert limits.cgroup_limit_bytes is None


def test_the_tightest_level_binds_though_it_is_not_ours(machine: FakeMachine) -> None:
    machine.version_2("/pods/pod7/engine")
    machine.write("sys/fs/cgroup/pods/pod7/engine/memory.max", 8 * GIB)
    machine.write("sys/fs/cgroup/pods/pod7/engine/memory.current", 1 * GIB)
    machine.write("sys/fs/cgroup/pods/pod7/memory.max", 6 * GIB)
    machine.write("sys/fs/cgroup/pods/pod7/memory.current", 2 * GIB)
    machine.write("sys/fs/cgroup/pods/memory.max", "max")
    limits = machine.limits()
    assert (limits.usable_bytes, limits.free_bytes) == (6 * GIB, 4 * GIB)


def test_the_fuller_level_says_what_is_free(machine: FakeMachine) -> None:
    machine.version_2("/pod/engine")
    machine.write("sys/fs/cgroup/pod/engine/memory.max", 6 * GIB)
    machine.write("sys/fs/cgroup/pod/engine/memory.current", 1 * GIB)
    machine.write("sys/fs/cgroup/pod/memory.max", 8 * GIB)
    machine.write("sys/fs/cgroup/pod/memory.current", 7 * GIB)
    limits = machine.limits()
    assert (limits.usable_bytes, limits.free_bytes) == (6 * GIB, 1 * GIB)


def test_memory_high_limits_like_memory_max(machine: FakeMachine) -> None:
    machine.version_2("/engine")
    machine.write("sys/fs/cgroup/engine/memory.max", 8 * GIB)
    machine.write("sys/fs/cgroup/engine/memory.high", 3 * GIB)
    assert machine.limits().usable_bytes == 3 * GIB


def test_file_pages_that_would_be_dropped_count_as_free(machine: FakeMachine) -> None:
    machine.version_2("/engine")
    machine.write("sys/fs/cgroup/engine/memory.max", 8 * GIB)
    machine.write("sys/fs/cgroup/engine/memory.current", 7 * GIB)
    machine.write("sys/fs/cgroup/engine/memory.stat", f"anon {2 * GIB}\ninactive_file {5 * GIB}\n")
    assert machine.limits().free_bytes == 6 * GIB


def test_a_full_group_has_nothing_free(machine: FakeMachine) -> None:
    machine.version_2("/engine")
    machine.write("sys/fs/cgroup/engine/memory.max", 1 * GIB)
    machine.write("sys/fs/cgroup/engine/memory.current", 2 * GIB)
    assert machine.limits().free_bytes == 0


def test_version_1_with_hierarchy(machine: FakeMachine) -> None:
    machine.version_1("/kube/pod/engine")
    memory = "sys/fs/cgroup/memory/kube/pod"
    machine.write(f"{memory}/engine/memory.limit_in_bytes", V1_UNLIMITED_BYTES * 2 - 4096)
    machine.write(f"{memory}/engine/memory.usage_in_bytes", 100 * MIB)
    machine.write(f"{memory}/memory.limit_in_bytes", 5 * GIB)
    machine.write(f"{memory}/memory.usage_in_bytes", 4 * GIB)
    machine.write(f"{memory}/memory.stat", f"cache 0\ntotal_inactive_file {2 * GIB}\n")
    limits = machine.limits()
    assert (limits.usable_bytes, limits.free_bytes) == (5 * GIB, 3 * GIB)
    assert [Path(level.path).name for level in memory_levels(machine.root)] == ["pod"]


@pytest.mark.parametrize(
    ("group", "mount_root"),
    [("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/", "/"), ("/../../outer", "/"), ("/x", "/docker/abc")],
)
def test_a_container_sees_its_group_at_the_mount_point(machine: FakeMachine, group: str, mount_root: str) -> None:
    machine.version_2(group, mount_root)
    machine.write("sys/fs/cgroup/memory.max", 2 * GIB)
    assert machine.limits().usable_bytes == 2 * GIB


def test_a_path_below_the_mounted_group_is_found(machine: FakeMachine) -> None:
    machine.version_2("/docker/abc/worker", "/docker/abc")
    machine.write("sys/fs/cgroup/worker/memory.max", 1 * GIB)
    machine.write("sys/fs/cgroup/memory.max", 2 * GIB)
    assert machine.limits().usable_bytes == 1 * GIB


@pytest.mark.parametrize(
    ("cpu_max", "num_cpus"), [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("3200000 100000", 16)]
)
def test_cores_follow_the_quota_rounded_down(machine: FakeMachine, cpu_max: str, num_cpus: int) -> None:
    machine.version_2("/engine")
    machine.write("sys/fs/cgroup/engine/cpu.max", cpu_max)
    assert machine.limits().num_cpus == num_cpus


def test_the_tightest_quota_binds(machine: FakeMachine) -> None:
    machine.version_1("/pod/engine")
    cpu = "sys/fs/cgroup/cpu/pod"
    machine.write(f"{cpu}/cpu.cfs_quota_us", 150000)
    machine.write(f"{cpu}/cpu.cfs_period_us", 50000)
    machine.write(f"{cpu}/engine/cpu.cfs_quota_us", -1)
    machine.write(f"{cpu}/engine/cpu.cfs_period_us", 100000)
    assert cpu_quota(machine.root) == 3.0
    assert machine.limits().num_cpus == 3


def test_this_machine_can_be_read() -> None:
    limits = read_limits()
    assert 0 < limits.free_bytes <= limits.usable_bytes <= limits.total_bytes
    assert limits.num_cpus >= 1
