"""The scripted boards from the side of a test: writes the script, reads the truth. `board.h` has the same layout."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
NUM_DEVICES = 4
NUM_PROCESSES = 2048


class _Device(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_ubyte * 16),
        ("capacity_bytes", ctypes.c_uint64),
        ("context_bytes", ctypes.c_uint64),
        ("growth_bytes", ctypes.c_uint64),
        ("others_bytes", ctypes.c_uint64),
        ("watch_bytes", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("num_overshoots", ctypes.c_uint64),
        ("worst_overshoot_bytes", ctypes.c_uint64),
    )


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint64), ("start_ticks", ctypes.c_uint64), ("bytes", ctypes.c_uint64 * NUM_DEVICES))


class _Board(ctypes.Structure):
    _fields_ = (
        ("is_ready", ctypes.c_uint64),
        ("num_devices", ctypes.c_uint64),
        ("driver_version", ctypes.c_uint64),
        ("fail_every", ctypes.c_uint64),
        ("other_addresses", ctypes.c_uint64),
        ("num_allocations", ctypes.c_uint64),
        ("num_calls", ctypes.c_uint64),
        ("devices", _Device * NUM_DEVICES),
        ("processes", _Process * NUM_PROCESSES),
        ("mutex", ctypes.c_ubyte * 64),
    )


class Board:
    """Cards behind the fakes, in a file that every process of a test maps."""

    def __init__(self, path: Path, *, num_devices: int = 1, capacity_bytes: int = 80 * GIB) -> None:
        self.path = path
        with path.open("wb") as file:
            file.truncate(ctypes.sizeof(_Board))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Board))
        self._board = _Board.from_buffer(self._map)
        self._board.num_devices = num_devices
        self._board.driver_version = 13050
        for index in range(num_devices):
            self.script(index, capacity_bytes=capacity_bytes, growth_bytes=32 * MIB)
            self._board.devices[index].uuid = (ctypes.c_ubyte * 16)(*range(16 * index + 1, 16 * index + 17))

    def script(self, device: int = 0, **values: int) -> None:
        """Set fields of a card: `capacity_bytes`, `context_bytes`, `others_bytes`, `watch_bytes`, …"""
        for name, value in values.items():
            setattr(self._board.devices[device], name, value)

    def script_driver(self, **values: int) -> None:
        """Set fields of the driver: `fail_every`, `other_addresses`, `driver_version`."""
        for name, value in values.items():
            setattr(self._board, name, value)

    def uuid(self, device: int = 0) -> str:
        """`GPU-…`, as the driver and NVML tell it."""
        text = bytes(self._board.devices[device].uuid).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def truth(self, device: int = 0) -> Any:
        """The card's counters: `used_bytes`, `peak_bytes`, `num_overshoots`, `worst_overshoot_bytes`."""
        return self._board.devices[device]

    def held_by(self, pid: int, device: int = 0) -> int:
        """Bytes that this process holds."""
        return sum(process.bytes[device] for process in self._board.processes if process.pid == pid)
