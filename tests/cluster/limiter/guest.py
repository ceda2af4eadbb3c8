"""A limited process, led by a test: reads one JSON command per line, answers with one JSON line.

Runs under the preloaded limiter on the fake driver, with nothing imported but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

NUM_WAYS = 17


class Place(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("pool", ctypes.c_void_p), ("stream", ctypes.c_void_p))


class Thing(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int), ("pointer", ctypes.c_uint64), ("second", ctypes.c_uint64), ("size", ctypes.c_size_t),
    )  # fmt: skip


Take = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Place), ctypes.POINTER(Thing), ctypes.c_size_t)
Give = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Place), ctypes.POINTER(Thing))


class Way(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("take", Take), ("give", Give))


class Guest:
    """Every method is a command."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.library = ctypes.CDLL(os.environ["GUEST_WAYS"])
        self.ways = {way.name.decode(): way for way in (Way * NUM_WAYS).in_dll(self.library, "ways")}
        self.place = Place()
        self.things: dict[int, tuple[str, Thing]] = {}

    def open(self) -> int:
        """The context, a stream and a pool."""
        return self.cuda.cuInit(0) or self.library.place_open(ctypes.byref(self.place))

    def init(self) -> int:
        return self.cuda.cuInit(0)

    def context(self, device: int) -> int:
        """A context on this device becomes current."""
        return self.cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, device)

    def take(self, way: str, size: int) -> list[int]:
        """The driver's result, and a number to give it back by."""
        thing = Thing()
        result = self.ways[way].take(ctypes.byref(self.place), ctypes.byref(thing), size)
        key = len(self.things)
        self.things[key] = (way, thing)
        return [result, key]

    def give(self, key: int) -> int:
        way, thing = self.things[key]
        return self.ways[way].give(ctypes.byref(self.place), ctypes.byref(thing))

    def call(self, name: str, *arguments: int) -> int:
        """Any entry, with 64-bit arguments."""
        return getattr(self.cuda, name)(*(ctypes.c_uint64(argument) for argument in arguments))

    def call_for_value(self, name: str, *arguments: int) -> list[int]:
        """Any entry whose first argument is where a 64-bit result goes."""
        value = ctypes.c_uint64()
        result = getattr(self.cuda, name)(ctypes.byref(value), *(ctypes.c_uint64(argument) for argument in arguments))
        return [result, value.value]

    def create(self, location_type: int, location_id: int, size: int) -> int:
        """`cuMemCreate` at a location of this type."""
        prop = (ctypes.c_int * 8)(1, 0, location_type, location_id)
        return self.cuda.cuMemCreate(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size), prop, ctypes.c_uint64(0))

    def pool(self, location_type: int, location_id: int, allocation_type: int = 1) -> int:
        """A new pool at a location of this type becomes the one that is taken from."""
        props = (ctypes.c_int * 22)(allocation_type, 0, location_type, location_id)
        pool = ctypes.c_void_p()
        result = self.cuda.cuMemPoolCreate(ctypes.byref(pool), props)
        self.place.pool = pool.value
        return result

    def default_pool(self, device: int) -> int:
        """The pool that a device came with becomes the one that is taken from."""
        pool = ctypes.c_void_p()
        result = self.cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device)
        self.place.pool = pool.value
        return result

    def info(self) -> list[int]:
        """Free and total bytes, from `cuMemGetInfo`."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        result = self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        assert result == 0, result
        return [free.value, total.value]

    def nvml(self, index: int = 0) -> dict[str, list[int]]:
        """Total, free, used of NVML's first version; total, reserved, free, used of its second."""
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        device = ctypes.c_void_p()
        nvml.nvmlInit_v2()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        first, second = (ctypes.c_uint64 * 3)(), (ctypes.c_uint64 * 5)()
        second[0] = 40 | 2 << 24
        assert nvml.nvmlDeviceGetMemoryInfo(device, first) == 0
        assert nvml.nvmlDeviceGetMemoryInfo_v2(device, second) == 0
        return {"v1": list(first), "v2": list(second)[1:]}

    def addresses(self, name: str) -> dict[str, int]:
        """Where each way of looking up leads; the last two are lookups that were themselves looked up."""
        libc = ctypes.CDLL(None)
        libc.dlsym.restype = libc.dlvsym.restype = ctypes.c_void_p
        libc.dlsym.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        libc.dlvsym.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
        handle, symbol, version = self.cuda._handle, name.encode(), b"libcuda.so.1"
        again = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(libc.dlsym(None, b"dlsym"))
        versioned = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)(
            libc.dlsym(None, b"dlvsym")
        )
        return {
            "dlsym": libc.dlsym(handle, symbol) or 0,
            "dlvsym": libc.dlvsym(handle, symbol, version) or 0,
            "default": libc.dlsym(None, symbol) or 0,
            "dlsym of dlsym": again(handle, symbol) or 0,
            "dlvsym of dlsym": versioned(handle, symbol, version) or 0,
        }

    def proc_address(self, base: str, version: int, flags: int = 0) -> list[int]:
        """Result and address from `cuGetProcAddress` in both versions."""
        one, two = ctypes.c_void_p(), ctypes.c_void_p()
        first = self.cuda.cuGetProcAddress(base.encode(), ctypes.byref(one), version, ctypes.c_uint64(flags))
        second = self.cuda.cuGetProcAddress_v2(
            base.encode(), ctypes.byref(two), version, ctypes.c_uint64(flags), ctypes.byref(ctypes.c_int())
        )
        return [first, one.value or 0, second, two.value or 0]

    def where_is(self, address: int) -> list[str]:
        """File and symbol that an address belongs to."""

        class Info(ctypes.Structure):
            _fields_ = (
                ("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p),
            )  # fmt: skip

        info = Info()
        ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
        return [os.path.basename(info.file or b"").decode(), (info.symbol or b"").decode()]

    def deep_bind(self, path: str, size: int) -> int:
        """Load a library, linked with the driver, that wants the driver's names before ours, and allocate in it."""
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        return library.linked_allocate(ctypes.c_size_t(size))

    def close_descriptors(self) -> None:
        """What a daemon does with all that it did not open."""
        os.closerange(3, 1024)

    def fork(self, size: int) -> list[int]:
        """A child that allocates and stays, without exec: its pid and what its allocation gave."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            result = self.take("cuMemAlloc", size)[0]
            os.write(writing, bytes([result]))
            signal.pause()
        return [pid, os.read(reading, 1)[0]]

    def replace(self) -> None:
        """`exec`: the same pid, another program, without the limiter."""
        print(json.dumps(None), flush=True)
        os.execve("/bin/sleep", ["sleep", "60"], {})

    def end_child(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    guest = Guest()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answer: Any = getattr(guest, name)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
