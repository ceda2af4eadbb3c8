"""How close does attention of the native backend come to what the machine can do?

    python -m benchmarks.ops.attention [--isa SET] [--kv-type bf16] [--exact] [--threads 2] [--page-size 16]

All layers of one model (SmolLM2-135M's shape by default) in one step: a prompt of 512 tokens, decode steps of one
sequence, of 32, and of 32 that share their first 512 tokens. Limits, in the same run: a plain read of as many bytes,
and a register-only loop of tile products, or of float32 ones. Best of several rounds, interleaved.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.ops.linear import Limits
from kvarto.core import _native
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat
from kvarto.core.step import SamplingRows, Step, StepResult
from kvarto.memory.arena import Arena

KV_TYPES = (DType.F32, DType.F16, DType.BF16, DType.I8)
"""In the order of the native enumeration."""
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """One step."""

    name: str
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    shared_tokens: int = 0
    """In the same pages for all sequences."""


CASES = (
    Case("prefill 512", (512,), (512,)),
    Case("decode 1 x 1,024", (1024,), (1,)),
    Case("decode 1 x 8,192", (8192,), (1,)),
    Case("decode 32 x 400", (400,) * 32, (1,) * 32),
    Case("decode 32 x (512 shared + 48)", (560,) * 32, (1,) * 32, 512),
)


class Layers:
    """Attention of every layer over pages in an arena, as one program."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        ops, heads = _native.ops, _native.ops.Heads(options.q_heads, options.kv_heads, options.head_dim)
        dtype = DType(options.kv_type)
        kv = KVFormat(dtype, options.page_size, options.layers, options.kv_heads, options.head_dim)
        self._step, num_pages = _make_step(case, options.page_size)
        num_tokens, num_seqs, context = self._step.num_tokens, self._step.num_seqs, max(case.context_lens)
        widths = ((options.q_heads + 2 * options.kv_heads) * options.head_dim, options.q_heads * options.head_dim)
        scratch = ops.attention_scratch_bytes(heads, num_tokens, num_seqs, context, options.threads)
        sizes = [4 * num_tokens * widths[0], 4 * num_tokens * widths[1], num_pages * kv.page_bytes, scratch]
        starts = [int(start) for start in np.cumsum([0, *(-(-size // 4096) * 4096 for size in sizes)])]
        self._arena = Arena(starts[-1])
        memory = self._arena.array
        memory[: sizes[0]].view(np.float32)[:] = np.random.default_rng(0).standard_normal(sizes[0] // 4)
        _fill(memory[starts[2] : starts[2] + sizes[2]], dtype)
        bounds = ops.StepBounds(num_tokens, num_seqs, 1, 1 << 20, 1, 1, num_pages, options.page_size)
        self._program = ops.Program(options.isa, options.threads, memory.ctypes.data, memory.nbytes, bounds)
        qkv, out = (ops.Rows(starts[i], 4 * widths[i], widths[i], num_tokens) for i in range(2))
        pages = ops.Pages(starts[2], kv.page_bytes, kv.layer_bytes, kv.page_size, KV_TYPES.index(dtype))
        for layer in range(options.layers):
            self._program.add_attention(
                qkv, out, heads, 0, layer, options.head_dim**-0.5, 0, 0.0, options.exact, pages,
                ops.Bytes(starts[3], scratch),
            )  # fmt: skip
        unique_tokens = sum(case.context_lens) - (num_seqs - 1) * case.shared_tokens
        self.kv_bytes = unique_tokens * kv.token_bytes
        seen = sum(int((self._step.positions[i:j] + 1).sum()) for i, j in _bounds(self._step))
        self.multiply_adds = 2 * seen * options.q_heads * options.head_dim * options.layers

    def seconds(self) -> float:
        """Of one step, all layers."""
        ids, floats = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        result = StepResult(ids.reshape(0), floats.reshape(0), ids, floats, np.zeros(0, bool))
        start = time.perf_counter()
        self._program.run(self._step, self._step.page_tables, self._step.slot_mapping, result)
        return time.perf_counter() - start

    def close(self) -> None:
        """Give the memory back."""
        del self._program
        self._arena.close()


def _bounds(step: Step) -> Sequence[tuple[int, int]]:
    return list(zip(step.cu_seqlens[:-1].tolist(), step.cu_seqlens[1:].tolist(), strict=True))


def _fill(pages: np.ndarray[Any, Any], dtype: DType) -> None:
    """Numbers around 1 in every element; codes and scales of int8 alike."""
    noise = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    rounded = {
        DType.F32: noise,
        DType.F16: noise.astype(np.float16),
        DType.BF16: (noise.view(np.uint32) >> 16).astype(np.uint16),
        DType.I8: np.full(1 << 16, 0x3C, np.int8),  # as float32 0.011
    }[dtype].view(np.uint8)
    for start in range(0, len(pages), len(rounded)):
        part = pages[start : start + len(rounded)]
        part[:] = rounded[: len(part)]


def _make_step(case: Case, page_size: int) -> tuple[Step, int]:
    """The step, and how many pages there are: in random order, as after a while of serving."""
    counts = [-(-length // page_size) for length in case.context_lens]
    num_shared = case.shared_tokens // page_size
    num_pages = num_shared + sum(count - num_shared for count in counts)
    ids = np.random.default_rng(2).permutation(num_pages).astype(np.int32)
    tables = np.full((1, len(counts), max(counts)), -1, np.int32)
    first = num_shared
    for seq, count in enumerate(counts):
        tables[0, seq, :num_shared] = ids[:num_shared]
        tables[0, seq, num_shared:count] = ids[first : first + count - num_shared]
        first += count - num_shared
    positions = [np.arange(c - q, c) for c, q in zip(case.context_lens, case.query_lens, strict=True)]
    num_tokens = sum(case.query_lens)
    step = Step(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        cu_seqlens=np.cumsum([0, *case.query_lens]).astype(np.int32),
        context_lens=np.array(case.context_lens, np.int32),
        page_tables=tables,
        slot_mapping=np.zeros((1, num_tokens), np.int64),
        sample_rows=np.zeros(0, np.int32),
        sampling=_no_sampling(),
    )
    return step, num_pages


def _no_sampling() -> SamplingRows:
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    columns: dict[str, Any] = dict.fromkeys(floats, np.zeros(0, np.float32))
    ints = ("top_k", "choice", "position", "num_logprobs", "target", "bias_ids", "seen_ids", "seen_output_counts")
    columns |= dict.fromkeys(ints, np.zeros(0, np.int32))
    columns |= {"bias_indptr": np.zeros(1, np.int32), "seen_indptr": np.zeros(1, np.int32)}
    return SamplingRows(**columns, seed=np.zeros(0, np.int64), bias_values=np.zeros(0, np.float32))


def measure(case: Case, limits: Limits, options: argparse.Namespace) -> dict[str, Any]:
    """Best times of the layers and of the limits, interleaved."""
    layers = Layers(case, options)
    uses_tiles = options.isa == "amx" and not options.exact
    best, read_rate, product_rate = float("inf"), 0.0, 0.0
    for _ in range(ROUNDS):
        best = min(best, layers.seconds())
        read_rate = max(read_rate, limits.read_rate())
        product_rate = max(product_rate, limits.product_rate("bf16") if uses_tiles else 0.0)
    figures = {
        "case": case.name,
        "ms": 1e3 * best,
        "gb_per_s": layers.kv_bytes / best / 1e9,
        "share_of_read": layers.kv_bytes / best / read_rate,
        "gmac_per_s": layers.multiply_adds / best / 1e9,
        "share_of_products": layers.multiply_adds / best / product_rate if product_rate else None,
        "read_gb_per_s": read_rate / 1e9,
    }
    layers.close()
    return figures


def _row(figures: dict[str, Any]) -> str:
    share = figures["share_of_products"]
    return (
        f"{figures['case']:31} {figures['ms']:9.3f} {figures['gb_per_s']:8.2f} {figures['share_of_read']:8.0%} "
        f"{figures['gmac_per_s']:9.1f} {'' if share is None else format(share, '8.0%')}"
    )


def main() -> None:
    """Print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=_native.ops.isas()[-1])
    parser.add_argument("--kv-type", default="bf16", choices=[str(dtype) for dtype in KV_TYPES])
    parser.add_argument("--exact", action="store_true", help="float32 throughout")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--q-heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    options = parser.parse_args()
    limits = Limits(options.threads)
    print(f"{'':31} {'ms':>9} {'GB/s KV':>8} {'of read':>8} {'GMAC/s':>9} {'of tiles':>8}")
    rows = []
    for case in CASES:
        rows.append(measure(case, limits, options))
        print(_row(rows[-1]), flush=True)
    print(json.dumps({"options": vars(options), "cases": rows}))


if __name__ == "__main__":
    main()
