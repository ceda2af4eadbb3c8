"""What can the machine do? Reading memory, and matrix products by PyTorch's library (oneDNN).

A decode step reads every weight once, so it can't be faster than bytes ÷ bandwidth; a prefill can't be faster than its
products. The sizes are the demo model's: its file, and the product of one of its layers. A working set that lies in the
last cache reads faster than memory; the gigabyte shows the memory itself.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.environment import num_cores

WORKING_SETS = {"98 MB": 98 * 10**6, "1 GB": 10**9}
PRODUCTS = ((1, 576, 1536), (8, 576, 1536), (32, 576, 1536), (512, 576, 1536), (512, 1536, 576), (512, 576, 49152),
            (2048, 2048, 2048))  # fmt: skip
"""Rows, length of the sum, columns."""
READ_S = 1.0
PRODUCT_S = 0.4
SOURCE = Path(__file__).with_name("read_bandwidth.c")


@dataclass(frozen=True, slots=True)
class Limit:
    """One measured rate."""

    what: str
    rate: float
    unit: str


def measure() -> list[Limit]:
    """Everything, in about twenty seconds."""
    return [*bandwidths(), *products(1), *products(num_cores())]


def read_rate(data: NDArray[np.uint8], num_threads: int, duration_s: float) -> float:
    """GB/s of a plain loop over bytes that are there: where memory lies decides what it gives."""
    assert data.flags.c_contiguous, "bytes do not follow each other"
    with _compiled("-shared", "-fPIC") as library:
        call = ctypes.CDLL(str(library)).read_rate
        call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_double), ctypes.c_double
        return float(call(data.ctypes.data, data.nbytes, num_threads, duration_s))


@contextmanager
def _compiled(*flags: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "read_bandwidth")
        subprocess.run(["cc", "-O3", "-march=native", "-pthread", *flags, "-o", made, SOURCE], check=True)
        yield made


def bandwidths() -> list[Limit]:
    """GB/s by one thread and by all, compiled here for this machine."""
    with _compiled() as program:
        return [
            Limit(f"read {name}, {num} threads", float(_output(program, size, num, READ_S)), "GB/s")
            for name, size in WORKING_SETS.items()
            for num in sorted({1, num_cores()})
        ]


def products(num_threads: int) -> list[Limit]:
    """Multiply-adds count as two operations."""
    torch.set_num_threads(num_threads)
    limits = []
    for rows, inner, columns in PRODUCTS:
        for name, call in _calls(rows, inner, columns).items():
            rate = 2e-9 * rows * inner * columns / _seconds(call)
            limits.append(Limit(f"{name} {rows}×{inner}×{columns}, {num_threads} threads", rate, "G/s"))
    return limits


def _calls(rows: int, inner: int, columns: int) -> dict[str, Callable[[], object]]:
    left, right = torch.randn(rows, inner), torch.randn(columns, inner)
    calls: dict[str, Callable[[], object]] = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        weights = right.to(dtype)
        x = left.to(dtype)
        calls[name] = lambda x=x, w=weights: torch.nn.functional.linear(x, w)  # type: ignore[misc]
    x8, w8 = left.to(torch.int8), right.to(torch.int8).t()
    calls["int8"] = lambda: torch._int_mm(x8, w8)
    return calls


@torch.inference_mode()
def _seconds(call: Callable[[], object]) -> float:
    """Of one call, in the steady state."""
    call()
    num_calls, start_s = 0, time.perf_counter()
    while (duration_s := time.perf_counter() - start_s) < PRODUCT_S:
        call()
        num_calls += 1
    return duration_s / num_calls


def _output(program: Path, *arguments: object) -> str:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout
