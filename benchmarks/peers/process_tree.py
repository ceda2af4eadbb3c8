"""What processes use, as `/proc` tells: memory and time of a server with its children, and time of everybody else."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and its descendants that live."""
    found = [pid]
    for parent in found:  # grows while it is read
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def peak_rss_bytes(pid: int) -> int:
    """Highest resident set of each process of the tree, added up; pages that two of them map count twice."""
    return sum(map(_peak_bytes, tree(pid)))


def cpu_s(pid: int) -> float:
    """Seconds of all cores that the tree has used, children that ended included."""
    return sum(map(_cpu_s, tree(pid)))


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Cores that others kept busy between two moments, or that the host took away. Our own tree is not counted."""

    start_s: float
    start_foreign_s: float

    @classmethod
    def start(cls) -> CoreUse:
        """From now on."""
        return cls(time.monotonic(), _foreign_s())

    def foreign_cores(self) -> float:
        """Since the start: more than a few percent of one, and the figure measured meanwhile is worth little."""
        return (_foreign_s() - self.start_foreign_s) / (time.monotonic() - self.start_s)


def _foreign_s() -> float:
    """The sum over processes: what `/proc/stat` has besides is sampled, and wrong where threads sleep often."""
    ours = set(tree(os.getpid()))
    steal_ticks = int(Path("/proc/stat").read_text().split()[8])
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return sum(_cpu_s(pid) for pid in pids if pid not in ours) + steal_ticks / _TICKS_PER_S


def _peak_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS_PER_S
    return 0.0
