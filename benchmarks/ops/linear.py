"""How close do linears of the native backend come to what the machine can do?

    python -m benchmarks.ops.linear [--isa SET] [--products f32|int8|bf16|bf16x3] [--formats q4_1,q8_0] [--threads 2]

Ours: one linear over enough copies of its weights that no cache holds them, for 1 to 512 rows. Limits: a plain read of
as many bytes, and a register-only loop of the instructions that multiply (int8: and those that scale), in the same
run, interleaved, best of several. The table gives GB/s of weights and 10^9 multiply-adds per second, and their share
of the limit: of the read for few rows, of the loop for many.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.core import _native
from kvarto.core.step import SamplingRows, Step, StepResult
from kvarto.core.weight_format import WeightFormat, row_bytes

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "logits": (49152, 576)}
ROWS = (1, 2, 4, 8, 32, 128, 512)
K_SHAPES = {"gate_up": (3072, 768), "down": (768, 3072)}
"""For formats with blocks of 256 columns."""
PRODUCTS = ("f32", "int8", "bf16", "bf16x3")
LOOPS = ("f32", "int8", "bf16")
STREAMED_BYTES = 96 << 20
ROUNDS = 5


class Limits:
    """Loops of machine_limits.cpp, built for this machine."""

    def __init__(self, num_threads: int) -> None:
        source = Path(__file__).with_name("machine_limits.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            flags = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
            subprocess.run(["c++", *flags, str(source), "-o", str(library)], check=True)
            self._code = ctypes.CDLL(str(library))
        for name in ("read_seconds", *(f"{products}_seconds" for products in LOOPS)):
            getattr(self._code, name).restype = ctypes.c_double
        self._num_threads = num_threads
        self._bytes = np.ones(STREAMED_BYTES, np.uint8)

    def read_rate(self) -> float:
        """Bytes per second."""
        seconds: float = self._code.read_seconds(
            ctypes.c_void_p(self._bytes.ctypes.data), ctypes.c_int64(self._bytes.size), self._num_threads
        )
        return self._bytes.size / seconds

    def product_rate(self, products: str) -> float:
        """Multiply-adds per second."""
        if products == "bf16x3":
            return self.product_rate("bf16") / 6
        count = 2_000_000_000
        seconds: float = getattr(self._code, f"{products}_seconds")(ctypes.c_int64(count), self._num_threads)
        return count * self._num_threads / seconds if seconds else 0.0


class Linears:
    """As many linears of one shape as make up STREAMED_BYTES of weights; at least one."""

    def __init__(
        self, format: WeightFormat, shape: tuple[int, int], num_rows: int, options: argparse.Namespace
    ) -> None:
        ops, (n, k) = _native.ops, shape
        group_size = 128 if format is WeightFormat.INT4 else 0
        part_bytes = _native.weights.part_bytes(format.code, group_size, n, k)
        self.num_copies = max(1, STREAMED_BYTES // part_bytes) if num_rows <= 32 else 2
        self.weight_bytes, self.multiply_adds = part_bytes, n * k * num_rows
        scratch = (
            ops.bf16_bytes(num_rows, k)
            if options.products == "bf16"
            else ops.bf16x3_bytes(num_rows, k)
            if options.products == "bf16x3"
            else ops.linear_int8_scratch_bytes(num_rows, k, True)
        )
        sizes = [4 * num_rows * k, 4 * num_rows * n, scratch, *[part_bytes] * self.num_copies]
        starts = [int(start) for start in np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])]
        padded = np.zeros(starts[-1] + 64, np.uint8)
        self._arena = padded[-padded.ctypes.data % 64 :][: starts[-1]]
        self._arena[: sizes[0]].view(np.float32)[:] = _activations(num_rows * k)
        raw = _raw_rows(format, n, k, group_size)
        bounds = ops.StepBounds(num_rows, num_rows, 1, 1 << 20, 1, 1, 1, 16)
        self._program = ops.Program(options.isa, options.threads, self._arena.ctypes.data, self._arena.nbytes, bounds)
        x, out = ops.Rows(0, 4 * k, k, num_rows), ops.Rows(starts[1], 4 * n, n, num_rows)
        for start in starts[3:-1]:
            _native.weights.repack_rows(format.code, group_size, k, raw, self._arena[start : start + part_bytes])
            weight = ops.Weight(n, k, [ops.Part(format.code, group_size, n, start)])
            products = PRODUCTS.index(options.products)
            self._program.add_linear(x, out, weight, None, products, ops.Bytes(starts[2], scratch))
        self._step = _step(num_rows)

    def seconds(self) -> float:
        """Of one linear."""
        none = np.zeros((0, 0), np.int32)
        ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        result = StepResult(ids, logprobs, none, none.astype(np.float32), np.zeros(0, bool))
        start = time.perf_counter()
        self._program.run(self._step, self._step.page_tables, self._step.slot_mapping, result)
        return (time.perf_counter() - start) / self.num_copies


def _activations(count: int) -> np.ndarray[Any, Any]:
    """One group of 32 in seven has an outlier, about as in the demo model: int8 products have more to do there."""
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    x[::233] *= 30
    return x


def _raw_rows(format: WeightFormat, num_rows: int, num_columns: int, group_size: int) -> np.ndarray[Any, Any]:
    """As files have them. Floats are normal: denormal ones are slow."""
    rng = np.random.default_rng(1)
    if not format.is_float:
        return rng.integers(0, 64, (num_rows, row_bytes(format, num_columns, group_size)), dtype=np.uint8)
    dtype = np.float16 if format is WeightFormat.F16 else np.float32
    values = rng.standard_normal((num_rows, num_columns)).astype(dtype)
    if format is WeightFormat.BF16:
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.view(np.uint8)


def _step(num_rows: int) -> Step:
    """One token of each of `num_rows` sequences; nothing is sampled."""
    counts, none = np.arange(num_rows + 1, dtype=np.int32), np.zeros(0, np.int32)
    columns: dict[str, Any] = {name: none.astype(kind) for name, kind in _SAMPLING.items()}
    columns |= {"bias_indptr": np.zeros(1, np.int32), "seen_indptr": np.zeros(1, np.int32)}
    return Step(
        token_ids=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        cu_seqlens=counts,
        context_lens=np.ones(num_rows, np.int32),
        page_tables=np.zeros((1, num_rows, 1), np.int32),
        slot_mapping=np.zeros((1, num_rows), np.int64),
        sample_rows=none,
        sampling=SamplingRows(**columns),
    )


_SAMPLING = dict.fromkeys(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_values"),
    np.float32,
) | dict.fromkeys(
    ("top_k", "choice", "position", "num_logprobs", "target", "bias_ids", "seen_ids", "seen_output_counts"), np.int32
) | {"seed": np.int64}  # fmt: skip


def _measure(linears: Linears, limits: Limits, products: str) -> dict[str, float]:
    best, read, peak = float("inf"), 0.0, 0.0
    for _ in range(ROUNDS):
        best = min(best, linears.seconds())
        read, peak = max(read, limits.read_rate()), max(peak, limits.product_rate(products))
    gb_s, gmac_s = linears.weight_bytes / best / 1e9, linears.multiply_adds / best / 1e9
    shares = {"of_read": gb_s * 1e9 / read, "of_peak": gmac_s * 1e9 / peak}
    return {"us": best * 1e6, "gb_s": gb_s, "gmac_s": gmac_s, **shares}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa", default=_native.ops.isas()[-1])
    parser.add_argument("--products", choices=PRODUCTS, default="bf16" if "amx" in _native.ops.isas() else "int8")
    parser.add_argument("--formats", default="q4_1,q8_0,q4_0,q5_0,q4_k,q6_k,int4")
    parser.add_argument("--shapes", default="qkv,gate_up,down,logits")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    limits, results = Limits(options.threads), []
    print(f"{options.isa}, {options.products}, {options.threads} threads")
    print("format shape          rows        us    GB/s  of read   GMAC/s  of peak")
    for format in map(WeightFormat, options.formats.split(",")):
        shapes = K_SHAPES if format.value.endswith("_k") else {name: SHAPES[name] for name in options.shapes.split(",")}
        for name, shape in shapes.items():
            if format is WeightFormat.INT4 and shape[1] % 128:
                continue
            for num_rows in ROWS:
                row = _measure(Linears(format, shape, num_rows, options), limits, options.products)
                results.append({"format": format.value, "shape": name, "rows": num_rows, **row})
                print(
                    f"{format.value:6} {name:8} {shape[0]:5}  {num_rows:4}  {row['us']:8.1f}  {row['gb_s']:6.1f}"
                    f"  {row['of_read']:6.0%}  {row['gmac_s']:7.1f}  {row['of_peak']:6.0%}"
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
