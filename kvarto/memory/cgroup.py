"""Control groups of this process: the tightest limits on its way up to the root. Reads files, decides nothing.

A limit anywhere above binds too, so every level from our own group to the mount point is read:

    /sys/fs/cgroup/kubepods/pod7/engine    memory.max 8 GiB      <- our group
    /sys/fs/cgroup/kubepods/pod7           memory.max 6 GiB      <- binds
    /sys/fs/cgroup/kubepods                memory.max max

Version 2 has one tree; version 1 has a tree per controller, and both may be mounted at once. In a container the tree
may be mounted from our own group downwards; the mount's root then has to be taken off the group's path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

V1_UNLIMITED_BYTES = 1 << 62
"""Version 1 writes the largest multiple of a page that fits 63 bits where there is no limit."""


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """One group on the way up that limits memory."""

    path: str
    limit_bytes: int
    used_bytes: int
    """What the kernel charged to the group, less file pages that it would drop first."""

    @property
    def free_bytes(self) -> int:
        """What may still be allocated before the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_levels(root: Path = Path("/")) -> list[MemoryLevel]:
    """Groups of this process that limit memory, our own first. `root` is where `/proc` and `/sys` are found."""
    levels = [_memory_v2(folder) for folder in _folders(root, None)]
    levels += [_memory_v1(folder) for folder in _folders(root, "memory")]
    return [level for level in levels if level is not None]


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the tightest group allows, or None where none does."""
    quotas = [_ratio(_words(folder / "cpu.max")) for folder in _folders(root, None)]
    quotas += [
        _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))
        for folder in _folders(root, "cpu")
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _memory_v2(folder: Path) -> MemoryLevel | None:
    # Above memory.high a group is throttled and reclaimed from: as good as a limit for memory that is in use.
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    return _level(folder, limits, "memory.current", "inactive_file")


def _memory_v1(folder: Path) -> MemoryLevel | None:
    limit = _number(folder / "memory.limit_in_bytes")
    limits = [None if limit is None or limit >= V1_UNLIMITED_BYTES else limit]
    return _level(folder, limits, "memory.usage_in_bytes", "total_inactive_file")


def _level(folder: Path, limits: list[int | None], usage_name: str, droppable_name: str) -> MemoryLevel | None:
    limit_bytes = min((limit for limit in limits if limit is not None), default=None)
    if limit_bytes is None:
        return None
    words = _words(folder / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    droppable_bytes = int(stat.get(droppable_name, "0"))
    used_bytes = (_number(folder / usage_name) or 0) - droppable_bytes
    return MemoryLevel(str(folder), limit_bytes, max(0, used_bytes))


def _folders(root: Path, controller: str | None) -> Iterator[Path]:
    """Folders of our group and of those above it. `controller` names a tree of version 1; None means version 2."""
    group = _group(root, controller)
    mount = _mount(root, controller)
    if group is None or mount is None:
        return
    mount_root, mount_point = mount
    top = root / mount_point.lstrip("/")
    folder = top / _below(group, mount_root)
    if not folder.is_dir():  # an outer namespace's path: all that we can see begins at the mount point
        folder = top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _below(group: str, mount_root: str) -> str:
    path = PurePosixPath(group)
    if ".." in path.parts:
        return "."
    inside = path.relative_to(mount_root) if path.is_relative_to(mount_root) else path.relative_to("/")
    return str(inside)


def _group(root: Path, controller: str | None) -> str | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") if controller else controllers == "":
            return path
    return None


def _mount(root: Path, controller: str | None) -> tuple[str, str] | None:
    """(group that is mounted, where), from /proc/self/mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_ours = kind[0] == "cgroup2" if controller is None else kind[0] == "cgroup"
        if is_ours and (controller is None or controller in kind[2].split(",")):
            return fields[3], fields[4]
    return None


def _ratio(words: list[str]) -> float | None:
    """Quota over period; None where the quota is `max` (version 2) or negative (version 1)."""
    if len(words) != 2 or words[0] == "max" or int(words[0]) <= 0 or int(words[1]) <= 0:
        return None
    return int(words[0]) / int(words[1])


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0] != "max" else None


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not every kernel and container shows every file
        return []
