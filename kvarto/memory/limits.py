"""What this process may use: the machine's memory and cores, cut down by its control groups and CPU affinity; on a GPU,
the card's memory, cut down by the limit that a sharing scheme set for this container.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvarto.core.units import KIB, MIB
from kvarto.memory.cgroup import cpu_quota, memory_levels
from kvarto.memory.device_limit import DEVICE_OVERHEAD_BYTES, DeviceLimit, read_device_limit

PROCESS_RESERVE_BYTES = 256 * MIB
"""Left beside an arena for libraries, threads and bookkeeping; on a small machine an eighth of what is free."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Memory in bytes, and cores, at the moment of reading."""

    total_bytes: int
    """Memory of the machine."""
    available_bytes: int
    """What the machine could give without swapping."""
    num_cpus: int
    """Cores that this process may keep busy."""
    cgroup_limit_bytes: int | None = None
    """The tightest limit of our control groups; None where there is none."""
    cgroup_free_bytes: int | None = None
    """What the tightest of them leaves; another level than the lowest limit's may be the fuller one."""
    device_limit: DeviceLimit | None = None
    """What a sharing scheme leaves of a GPU to this container. Whoever set it meant this process to use it."""

    @property
    def usable_bytes(self) -> int:
        """The smallest of the machine or card and the limits on it: what a share is a share of."""
        usable_bytes = _smaller(self.total_bytes, self.cgroup_limit_bytes)
        return usable_bytes if self.device_limit is None else min(usable_bytes, self.device_limit.limit_bytes)

    @property
    def free_bytes(self) -> int:
        """What can be allocated now."""
        free_bytes = _smaller(self.available_bytes, self.cgroup_free_bytes)
        return free_bytes if self.device_limit is None else min(free_bytes, self.device_limit.limit_bytes)

    @property
    def arena_bytes(self) -> int:
        """What an arena may take now at most: the process itself still grows, and a full machine kills. Of a limited
        device all that is free: there the process's own part is the driver's, and it is mostly there already.
        """
        if self.device_limit is not None:
            return self.free_bytes
        return self.free_bytes - min(PROCESS_RESERVE_BYTES, self.free_bytes // 8)

    @property
    def sized_bytes(self) -> int | None:
        """What an arena takes that nobody sized, of a device that somebody did: the limit less an allowance for the
        driver, the same in every start, as far as so much is free. None where no limit was set.
        """
        if self.device_limit is None:
            return None
        return max(0, min(self.device_limit.limit_bytes - DEVICE_OVERHEAD_BYTES, self.free_bytes))


def read_limits(root: Path = Path("/"), *, num_affine_cpus: int | None = None) -> ProcessLimits:
    """Read the limits of this process. `root` is where `/proc` and `/sys` are found; the affinity is the system's."""
    meminfo = _meminfo(root)
    levels = memory_levels(root)
    return ProcessLimits(
        total_bytes=meminfo["MemTotal"],
        available_bytes=meminfo.get("MemAvailable", meminfo["MemFree"]),
        num_cpus=_num_cpus(num_affine_cpus or len(os.sched_getaffinity(0)), cpu_quota(root)),
        cgroup_limit_bytes=min((level.limit_bytes for level in levels), default=None),
        cgroup_free_bytes=min((level.free_bytes for level in levels), default=None),
    )


def device_limits(
    total_bytes: int,
    available_bytes: int,
    num_cpus: int,
    *,
    device_index: int = 0,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> ProcessLimits:
    """The limits of this process on a GPU of that memory. Raises UsageError for a limit that can't be read."""
    limit = read_device_limit(environ, total_bytes, device_index=device_index, root=root)
    return ProcessLimits(total_bytes, available_bytes, num_cpus, device_limit=limit)


def _meminfo(root: Path) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * KIB for name, value in pairs}


def _num_cpus(num_affine_cpus: int, quota: float | None) -> int:
    # Rounded down: one thread more than the quota is put to sleep in the middle of a step, and all wait for it.
    return max(1, num_affine_cpus if quota is None else min(num_affine_cpus, int(quota)))


def _smaller(size_bytes: int, limit_bytes: int | None) -> int:
    return size_bytes if limit_bytes is None else min(size_bytes, limit_bytes)
