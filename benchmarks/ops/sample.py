"""What does drawing a token cost beyond the logits, against reading its row once?

    python -m benchmarks.ops.sample [--isa SET] [--threads 1]

Ours: `Sample` over rows of a model's size and a model's shape (normal logits with a few likely tokens), by what is
asked; rows with summaries as `Logits` leaves them, so that greedy rows are not read. Limit: numpy's maximum of the same
row, which reads it once. Microseconds per row, best of several.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from kvarto.core import _native
from kvarto.core.step import SamplingRows, Step, StepResult

VOCABS = (49_152, 151_936)
NUM_ROWS = 8
WIDTH = 16
ROUNDS = 30
ASKED: dict[str, dict[str, float]] = {
    "greedy": {},
    "greedy, logprobs 5": {"num_logprobs": 5},
    "temperature": {"temperature": 0.8},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.95 of a flat row": {"temperature": 50.0, "top_p": 0.95},
}
_DEFAULTS: dict[str, float] = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "seed": 0, "choice": 0, "position": 1, "num_logprobs": -1, "target": -1,
}  # fmt: skip
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Draws:
    """x | logits | summaries | panels | scratch; logits by a product with 16 columns, then a draw of each row."""

    def __init__(self, vocab_size: int, isa: str, num_threads: int) -> None:
        ops = _native.ops
        self.vocab_size = vocab_size
        summary_bytes = ops.summary_row_bytes(vocab_size)
        scratch_bytes = ops.sample_scratch_bytes(vocab_size, num_threads)
        panel_bytes = _native.weights.part_bytes(0, 0, vocab_size, WIDTH)
        sizes = [4 * NUM_ROWS * WIDTH, 4 * NUM_ROWS * vocab_size, NUM_ROWS * summary_bytes, panel_bytes, scratch_bytes]
        starts = [int(start) for start in np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])]
        padded = np.zeros(starts[-1] + 64, np.uint8)
        self.arena = padded[-padded.ctypes.data % 64 :][: starts[-1]]
        self.logits = self.arena[starts[1] : starts[1] + sizes[1]].view(np.float32).reshape(NUM_ROWS, vocab_size)
        self.arena[: sizes[0]].view(np.float32)[:] = np.random.default_rng(0).standard_normal(NUM_ROWS * WIDTH)
        raw = np.random.default_rng(1).standard_normal((vocab_size, WIDTH)).astype(np.float32)
        raw[:50] *= 4
        _native.weights.repack_rows(0, 0, WIDTH, raw.view(np.uint8), self.arena[starts[3] : starts[3] + panel_bytes])
        weight = ops.Weight(vocab_size, WIDTH, [ops.Part(0, 0, vocab_size, starts[3])])
        x = ops.Rows(0, 4 * WIDTH, WIDTH, NUM_ROWS, per_sample=True)
        logits = ops.Rows(starts[1], 4 * vocab_size, vocab_size, NUM_ROWS, per_sample=True)
        summaries = ops.Rows(starts[2], summary_bytes, 0, NUM_ROWS, per_sample=True)
        self._programs = []
        for num_draws in (1, 5):
            bounds = ops.StepBounds(NUM_ROWS, NUM_ROWS, NUM_ROWS, 1 << 20, vocab_size, 1, 1, 16)
            program = ops.Program(isa, num_threads, self.arena.ctypes.data, self.arena.nbytes, bounds)
            program.add_logits(x, logits, weight, None, 1.0, 0.0, False, ops.Bytes(0, 0), summaries)
            for _ in range(num_draws):
                program.add_sample(logits, summaries, ops.Bytes(starts[4], scratch_bytes))
            self._programs.append(program)

    def microseconds(self, **asked: float) -> float:
        """Per row: five draws of each row against one, so that only draws count."""
        step, num_top = _step(asked), max(int(asked.get("num_logprobs", 0)), 0)
        result = _result(num_top)
        once, often = (_best(program, step, result) for program in self._programs)
        return (often - once) / 4 / NUM_ROWS * 1e6

    def read_microseconds(self) -> float:
        """Of a maximum over one row."""
        times = []
        for row in [*self.logits] * ROUNDS:
            start = time.perf_counter()
            row.max()
            times.append(time.perf_counter() - start)
        return min(times) * 1e6


def _best(program: _native.ops.Program, step: Step, result: StepResult) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        program.run(step, step.page_tables, step.slot_mapping, result)
        times.append(time.perf_counter() - start)
    return min(times)


def _result(num_top: int) -> StepResult:
    tokens, top = np.zeros(NUM_ROWS, np.int32), np.zeros((NUM_ROWS, num_top), np.int32)
    return StepResult(tokens, tokens.astype(np.float32), top, top.astype(np.float32), np.zeros(NUM_ROWS, np.bool_))


def _step(asked: dict[str, float]) -> Step:
    none, many = np.zeros(0, np.int32), np.arange(NUM_ROWS, dtype=np.int32)
    columns: dict[str, Any] = {
        name: np.full(NUM_ROWS, value, np.float32 if name in _FLOATS else np.int64 if name == "seed" else np.int32)
        for name, value in (_DEFAULTS | asked).items()
    }
    columns["seed"] = np.arange(NUM_ROWS)
    columns |= dict.fromkeys(("bias_ids", "seen_ids", "seen_output_counts"), none)
    columns |= dict.fromkeys(("bias_indptr", "seen_indptr"), np.zeros(NUM_ROWS + 1, np.int32))
    return Step(
        token_ids=0 * many,
        positions=0 * many,
        cu_seqlens=np.arange(NUM_ROWS + 1, dtype=np.int32),
        context_lens=np.ones(NUM_ROWS, np.int32),
        page_tables=np.zeros((1, NUM_ROWS, 1), np.int32),
        slot_mapping=np.zeros((1, NUM_ROWS), np.int64),
        sample_rows=many,
        sampling=SamplingRows(**columns, bias_values=none.astype(np.float32)),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa", default=_native.ops.isas()[-1])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    results: dict[str, float] = {}
    print(f"{options.isa}, {options.threads} threads, microseconds per row")
    for vocab_size in VOCABS:
        draws = Draws(vocab_size, options.isa, options.threads)
        for name, asked in ASKED.items():
            results[f"{vocab_size} {name}"] = us = round(draws.microseconds(**asked), 1)
            print(f"{vocab_size:>8,}  {name:<26} {us:>8.1f}   (reading the row {draws.read_microseconds():.1f})")
    print(json.dumps({"benchmark": "ops.sample", "isa": options.isa, "threads": options.threads, "us": results}))


if __name__ == "__main__":
    main()
