"""The limit that a GPU-sharing scheme sets for this container, as its environment tells it. Reads, decides nothing.

Whoever sized the pod has already divided the card, so the limit is this process's budget and not a share of it:

    HAMi, Volcano, KAI with HAMi-core   CUDA_DEVICE_MEMORY_LIMIT_0=16384m
    Alibaba gpushare                    ALIYUN_COM_GPU_MEM_CONTAINER=16, ALIYUN_COM_GPU_MEM_DEV=79
    Tencent gpu-manager                 /etc/vcuda/vcuda.config
    MPS                                 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=16384M
    KAI                                 GPU_PORTION=0.25
    MIG                                 NVIDIA_VISIBLE_DEVICES=MIG-…; the driver reports the slice
    our limiter                         /etc/kvarto/gpu-memory-limit, else KVARTO_GPU_MEMORY_LIMIT=16GiB

Where several are set the tightest binds; KAI's, which has two decimals, only where it is alone. A value that can't be
read is refused: guessing would cost a neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, KIB, MIB, parse_bytes

DEVICE_OVERHEAD_BYTES = 768 * MIB
"""What a process takes of a GPU beside its arena: the driver's context, code, and libraries' workspaces. An allowance,
not a measurement: it differs by card and driver."""

HAMI_LIMIT = "CUDA_DEVICE_MEMORY_LIMIT"
MPS_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
ALIYUN_LIMIT = "ALIYUN_COM_GPU_MEM_CONTAINER"
ALIYUN_CARD = "ALIYUN_COM_GPU_MEM_DEV"
ALIYUN_UNIT = "ALIYUN_COM_GPU_MEM_UNIT"
KAI_SHARE = "GPU_PORTION"
LIMITER_LIMIT = "KVARTO_GPU_MEMORY_LIMIT"
LIMITER_FILE = "etc/kvarto/gpu-memory-limit"
"""Before the variable, as for the limiter itself: a node's agent mounts it, and no shell can change it."""
VCUDA_CONFIG = "etc/vcuda/vcuda.config"
VCUDA_MEMORY_OFFSET = 48 + 4 + 4044 + 4096 + 16
"""Bytes of gpu-manager's record before its `uint64_t gpu_memory`: pod, limit flag, padding, container, bus id."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_UUID_STARTS = ("GPU-", "MIG-")
_SUFFIXES = {"": 1, "k": KIB, "m": MIB, "g": GIB}
_ALIYUN_UNITS = {"mib": MIB, "mb": MIB, "gib": GIB, "gb": GIB}
"""Alibaba's components say GB and count GiB."""


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """Bytes of the device's memory that this container may use, the driver's context included."""

    limit_bytes: int
    source: str
    """The variable or file that says so, for people."""


def read_device_limit(
    environ: Mapping[str, str], total_bytes: int, *, device_index: int = 0, root: Path = Path("/")
) -> DeviceLimit | None:
    """The tightest limit on the device that this process calls `device_index`; None where nobody set one.

    `total_bytes` is the memory that the driver reports for it. Raises UsageError for a value that can't be read.
    """
    index = _container_index(environ, device_index)
    limits = [
        *_hami(environ, index),
        *_mps(environ, index),
        *_aliyun(environ, total_bytes),
        *_mig(environ, total_bytes),
        *_vcuda(root / VCUDA_CONFIG),
        *_limiter(environ, index, root / LIMITER_FILE),
    ]
    if not limits:
        limits = list(_kai(environ, total_bytes))
    return min(limits, key=lambda limit: limit.limit_bytes, default=None)


def _hami(environ: Mapping[str, str], index: int) -> Iterator[DeviceLimit]:
    """`16384m`, `16g`, `1048576k` or bytes; the device's own variable comes before the one for all. 0 means none, and
    leaves it to the other, as it does to HAMi's library.
    """
    for name in (f"{HAMI_LIMIT}_{index}", HAMI_LIMIT):
        limit_bytes = _with_suffix(name, environ[name], environ[name]) if name in environ else 0
        if limit_bytes:
            yield DeviceLimit(limit_bytes, f"`{name}={environ[name]}`")
            return


def _mps(environ: Mapping[str, str], index: int) -> Iterator[DeviceLimit]:
    """`0=4096M,1=8G`, per client of the MPS server."""
    for part in filter(None, environ.get(MPS_LIMIT, "").split(",")):
        device, equals, size = part.partition("=")
        if not equals or not device.strip().isdecimal():
            raise _unreadable(MPS_LIMIT, environ[MPS_LIMIT], "`0=4096M`")
        if int(device) == index:
            limit_bytes = _with_suffix(MPS_LIMIT, environ[MPS_LIMIT], size)
            yield DeviceLimit(limit_bytes, f"`{MPS_LIMIT}={environ[MPS_LIMIT]}`")


def _aliyun(environ: Mapping[str, str], total_bytes: int) -> Iterator[DeviceLimit]:
    """GiB, or MiB where the plugin was started so; newer plugins name the unit, else the card's own size tells it."""
    if ALIYUN_LIMIT not in environ:
        return
    amount = _count(ALIYUN_LIMIT, environ[ALIYUN_LIMIT])
    unit = _ALIYUN_UNITS.get(environ.get(ALIYUN_UNIT, "").lower())
    if unit is None:
        card = _count(ALIYUN_CARD, environ.get(ALIYUN_CARD, "0"))
        unit = min((GIB, MIB), key=lambda each: abs(card * each - total_bytes)) if card else GIB
    yield DeviceLimit(amount * unit, f"`{ALIYUN_LIMIT}={environ[ALIYUN_LIMIT]}`, in {'GiB' if unit == GIB else 'MiB'}")


def _kai(environ: Mapping[str, str], total_bytes: int) -> Iterator[DeviceLimit]:
    """A share of the card, `0.25`; whole cards are no limit."""
    text = environ.get(KAI_SHARE)
    if text is None:
        return
    match = re.fullmatch(r"([0-9]+)(?:\.([0-9]+))?", text.strip())
    if match is None:
        raise _unreadable(KAI_SHARE, text, "a share such as `0.25`")
    digits = match[2] or ""
    limit_bytes = int(match[1] + digits) * total_bytes // int(10 ** len(digits))
    if 0 < limit_bytes < total_bytes:
        yield DeviceLimit(limit_bytes, f"`{KAI_SHARE}={text}`")


def _mig(environ: Mapping[str, str], total_bytes: int) -> Iterator[DeviceLimit]:
    """The driver already reports the instance as if it were the card."""
    for name in _VISIBLE:
        if environ.get(name, "").startswith("MIG-"):
            yield DeviceLimit(total_bytes, f"the MIG instance of `{name}`")
            return


def _vcuda(path: Path) -> Iterator[DeviceLimit]:
    """A record of gpu-manager for this container, little-endian."""
    record = _read(path)
    if record is None:
        return
    field = record[VCUDA_MEMORY_OFFSET : VCUDA_MEMORY_OFFSET + 8]
    if len(field) < 8:
        raise UsageError(f"`{path}` is too short to hold a limit; gpu-manager writes it anew for a new container")
    limit_bytes = int.from_bytes(field, "little")
    if limit_bytes:
        yield DeviceLimit(limit_bytes, f"`{path}`")


def _limiter(environ: Mapping[str, str], index: int, path: Path) -> Iterator[DeviceLimit]:
    """`8GiB` for every device, or `GPU-…=8GiB,2GiB`: by UUID, and one for all others."""
    value, source = environ.get(LIMITER_LIMIT, ""), LIMITER_LIMIT
    mounted = _read(path)
    if mounted is not None:
        value, source = mounted.decode(errors="replace"), str(path)
    limits: dict[str, int] = {}
    for item in re.split(r"[,\s]+", value.strip()):
        device, equals, size = item.rpartition("=")
        try:
            if equals and not device.startswith(_UUID_STARTS):  # an index means another device to each process
                raise ValueError(f"`{device}` is not a UUID")
            if item:
                limits[device] = parse_bytes(size)
        except ValueError as error:
            raise _unreadable(source, value.strip(), "a size such as `8GiB`, or `GPU-…=8GiB`") from error
    # `all` and indexes name no device; then each may be any of those that have a limit.
    present = [name for name in _names(environ, _VISIBLE[1]) if name.startswith(_UUID_STARTS)]
    mine = limits.get(present[index] if index < len(present) else "", limits.get(""))
    if limits and (mine is not None or index >= len(present)):
        yield DeviceLimit(min(limits.values()) if mine is None else mine, f"`{source}={value.strip()}`")


def _read(path: Path) -> bytes | None:
    """A file that the node mounted; None where there is none. Raises UsageError where it can't be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"`{path}` holds this container's limit and can't be read: {error.strerror}") from error


def _container_index(environ: Mapping[str, str], device_index: int) -> int:
    """Limits count the container's devices; `CUDA_VISIBLE_DEVICES` may have renumbered them for this process."""
    chosen = _names(environ, _VISIBLE[0])
    if device_index >= len(chosen):
        return device_index
    name = chosen[device_index]
    present = _names(environ, _VISIBLE[1])
    return int(name) if name.isdecimal() else present.index(name) if name in present else device_index


def _names(environ: Mapping[str, str], variable: str) -> list[str]:
    return [part.strip() for part in environ.get(variable, "").split(",") if part.strip()]


def _with_suffix(name: str, value: str, size: str) -> int:
    """`size` is the part of the variable's value that says how much."""
    match = re.fullmatch(r"([0-9]+)([kmgKMG]?)", size.strip())
    if match is None:
        raise _unreadable(name, value, "bytes, or a number with `k`, `m` or `g`, such as `16384m`")
    return int(match[1]) * _SUFFIXES[match[2].lower()]


def _count(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise _unreadable(name, text, "a whole number")
    return int(text)


def _unreadable(name: str, text: str, wanted: str) -> UsageError:
    return UsageError(f"the environment sets `{name}={text:.80}`, which is no limit; it should be {wanted}")
