"""What does a step of the native backend cost beside its ops? Microseconds from Python to the first op and back.

`python -m benchmarks.ops.around_the_step`: a compiled program whose only op gathers rows of 16 elements, for batches of
1, 32 and 512 sequences; and one barrier of 1 to as many threads as there are cores. Baseline: a numpy call that does
nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvarto.core import _native
from kvarto.core.step import SamplingRows, Step, StepResult
from kvarto.memory.limits import read_limits
from kvarto.ops.native.backend import empty_result

PAGE_SIZE, CONTEXT = 16, 400
REPEATS, CALLS = 9, 200


def step_of(num_seqs: int) -> Step:
    """Every sequence decodes one token at the end of its context, greedily."""
    num_pages = CONTEXT // PAGE_SIZE
    counts, floats = np.zeros(num_seqs, np.int32), np.zeros(num_seqs, np.float32)
    indptr, no_ids = np.zeros(num_seqs + 1, np.int32), np.zeros(0, np.int32)
    sampling = SamplingRows(
        temperature=floats, top_k=counts, top_p=floats + 1, min_p=floats, repetition_penalty=floats + 1,
        presence_penalty=floats, frequency_penalty=floats, seed=counts.astype(np.int64), choice=counts,
        position=counts, num_logprobs=counts, target=counts - 1, bias_indptr=indptr, bias_ids=no_ids,
        bias_values=np.zeros(0, np.float32), seen_indptr=indptr, seen_ids=no_ids, seen_output_counts=no_ids,
    )  # fmt: skip
    return Step(
        token_ids=counts,
        positions=np.full(num_seqs, CONTEXT - 1, np.int32),
        cu_seqlens=np.arange(num_seqs + 1, dtype=np.int32),
        context_lens=np.full(num_seqs, CONTEXT, np.int32),
        page_tables=np.arange(num_seqs * num_pages, dtype=np.int32).reshape(1, num_seqs, num_pages),
        slot_mapping=(np.arange(num_seqs, dtype=np.int64)[None] + 1) * num_pages * PAGE_SIZE - 1,
        sample_rows=np.arange(num_seqs, dtype=np.int32),
        sampling=sampling,
    )


def program_of(step: Step, arena: np.ndarray, num_threads: int) -> _native.ops.Program:
    """One gather of 16 elements per row."""
    num_seqs = step.num_seqs
    bounds = _native.ops.StepBounds(
        num_seqs, num_seqs, num_seqs, CONTEXT, 1, 1, num_seqs * CONTEXT // PAGE_SIZE, PAGE_SIZE
    )
    program = _native.ops.Program(_native.ops.isas()[-1], num_threads, arena.ctypes.data, arena.nbytes, bounds)
    x = _native.ops.Rows(0, 64, 16, num_seqs)
    out = _native.ops.Rows(64 * num_seqs, 64, 16, num_seqs, per_sample=True)
    program.add_gather(x, out)
    return program


def run(program: _native.ops.Program, step: Step) -> StepResult:
    """As the backend does it."""
    result = empty_result(step)
    program.run(step, np.ascontiguousarray(step.page_tables), np.ascontiguousarray(step.slot_mapping), result)
    return result


def microseconds(call: Callable[[], object]) -> float:
    """Of one call: the median of means."""
    means = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(means)


def main() -> None:
    """Print the table and one line of JSON."""
    most = read_limits().num_cpus
    figures: dict[str, float] = {}
    nothing = np.zeros(1)
    figures["numpy call"] = microseconds(lambda: np.ascontiguousarray(nothing))
    for num_seqs in (1, 32, 512):
        step, arena = step_of(num_seqs), np.zeros(2 * 64 * num_seqs, np.uint8)
        for num_threads in sorted({1, most}):
            program = program_of(step, arena, num_threads)
            name = f"step of {num_seqs}, {num_threads} threads"
            figures[name] = microseconds(lambda program=program, step=step: run(program, step))  # type: ignore[misc]
    for num_threads in range(1, most + 1):
        seconds = [_native.ops.barrier_seconds(num_threads, 20_000) for _ in range(REPEATS)]
        figures[f"barrier, {num_threads} threads"] = statistics.median(seconds) * 1e6
    for name, value in figures.items():
        print(f"{name:>28}  {value:8.3f} µs")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
