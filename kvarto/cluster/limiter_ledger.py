"""The account that the GPU memory limiter keeps of one container, read from its file. Changes nothing.

The file is the shared memory of all limited processes (`native/limiter/ledger.h` has the layout and the law): per
device a total, per process an account per device. A total holds the last change of an account too, in case that nobody
has carried it over yet; the reader does so for itself. A process lives while it holds the lock on its slot's byte.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvarto.core.errors import BadFile, UsageError

UNIT_BYTES = 512
NUM_DEVICES = 16
NUM_SLOTS = 1024
MAGIC = 0x31524744454C564B
DEVICES_OFFSET = 4096
DEVICE = struct.Struct("<16sQQQQQQQ56x")
"""UUID; total: low, high; limit + 1 in bytes, 0 for none; peak in units; refusals; context in bytes; last sweep."""
SLOT = struct.Struct("<QQQQ16s16x")
"""Generation (odd while a process moves in), pid, pid namespace, start, name; then one account per device."""
ACCOUNT = struct.Struct("<QQ")
SLOTS_OFFSET = DEVICES_OFFSET + NUM_DEVICES * DEVICE.size
SLOT_BYTES = SLOT.size + NUM_DEVICES * ACCOUNT.size
FILE_BYTES = SLOTS_OFFSET + NUM_SLOTS * SLOT_BYTES
FLOCK = struct.Struct("@hhqqi")
"""The C library's `struct flock` on 64-bit Linux: type, whence, start, length, pid."""


@dataclass(frozen=True, slots=True)
class DeviceAccount:
    """One device of the container. Bytes."""

    uuid: str
    """As the driver gives it, without the `GPU-` or `MIG-` that it is shown with."""
    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    num_refused: int
    """Allocations that did not fit."""

    @property
    def free_bytes(self) -> int:
        """What is left; 0 where a lowered limit lies below what is in use."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class ProcessAccount:
    """One process, by the pid that it has in its own container."""

    pid: int
    name: str
    is_alive: bool
    """False: killed or ended; its bytes return with the next allocation that needs them, or the next question."""
    used_bytes: dict[str, int]
    """By device UUID; only devices on which it holds something."""


@dataclass(frozen=True, slots=True)
class LimiterAccount:
    """What the ledger said at one moment."""

    devices: tuple[DeviceAccount, ...]
    processes: tuple[ProcessAccount, ...]


@dataclass(frozen=True, slots=True)
class _Total:
    used: int
    changed: int
    """Units of the last change, with its sign."""
    sequence: int
    slot: int


def read_account(path: Path) -> LimiterAccount:
    """Read the ledger at `path`. Raises UsageError where there is none, BadFile where it is something else."""
    try:
        with path.open("rb", buffering=0) as file:
            return _read(file, path)
    except OSError as error:
        raise UsageError(
            f"`{path}` can't be read: {error.strerror}; run this where the limited container's processes run, "
            "or name their ledger with `--ledger`"
        ) from error


def _read(file: BinaryIO, path: Path) -> LimiterAccount:
    data = os.pread(file.fileno(), FILE_BYTES, 0)
    magic = int.from_bytes(data[:8], "little")
    if len(data) < FILE_BYTES or magic not in (0, MAGIC):
        raise BadFile(f"`{path}` is no ledger of this version of the limiter: {len(data)} bytes, magic {magic:#x}")
    devices: list[DeviceAccount] = []
    totals: list[_Total] = []
    for index in range(NUM_DEVICES):
        fields = DEVICE.unpack_from(data, DEVICES_OFFSET + index * DEVICE.size)
        if not any(fields[0]):
            break
        totals.append(_total(fields[1], fields[2]))
        devices.append(_device(fields, totals[-1]))
    uuids = [device.uuid for device in devices]
    slots = (_process(file, data, slot, uuids, totals) for slot in range(NUM_SLOTS))
    return LimiterAccount(tuple(devices), tuple(process for process in slots if process is not None))


def _total(low: int, high: int) -> _Total:
    size = low >> 32
    return _Total(low & 0xFFFFFFFF, -size if high & 1 else size, high >> 16, high >> 1 & 0x7FFF)


def _device(fields: tuple[bytes, int, int, int, int, int, int, int], total: _Total) -> DeviceAccount:
    uuid = fields[0].hex()
    return DeviceAccount(
        uuid="-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])),
        limit_bytes=max(0, fields[3] - 1),
        used_bytes=total.used * UNIT_BYTES,
        peak_bytes=fields[4] * UNIT_BYTES,
        num_refused=fields[5],
    )


def _process(file: BinaryIO, data: bytes, slot: int, uuids: list[str], totals: list[_Total]) -> ProcessAccount | None:
    """None for a slot that holds nothing and that no process lives in."""
    offset = SLOTS_OFFSET + slot * SLOT_BYTES
    generation, pid, _, _, name = SLOT.unpack_from(data, offset)
    if generation == 0:
        return None
    used: dict[str, int] = {}
    for index, uuid in enumerate(uuids):
        low, high = ACCOUNT.unpack_from(data, offset + SLOT.size + index * ACCOUNT.size)
        total = totals[index]
        units = low + (total.changed if total.slot == slot and total.sequence > high else 0)
        if units > 0:
            used[uuid] = units * UNIT_BYTES
    is_alive = _is_locked(file, slot)
    if not used and not is_alive:
        return None
    return ProcessAccount(pid, _printable(name), is_alive, used)


def _printable(name: bytes) -> str:
    """Any process of the container may have written it, and whoever reads it may be at a terminal."""
    text = name.split(b"\0")[0].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _is_locked(file: BinaryIO, slot: int) -> bool:
    """Asks whether a lock could be taken, and takes none."""
    answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0))
    return bool(FLOCK.unpack(answer[: FLOCK.size])[0] != fcntl.F_UNLCK)
