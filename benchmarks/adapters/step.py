"""What do adapters add to a step that decodes? Milliseconds and GB/s, beside what the machine reads.

    python -m benchmarks.adapters.step [--ranks 8,16,32,64] [--rows 32] [--modules all] [--adapter-dtype int8]

One native engine in this process decodes as many sequences of the demo model, each with an adapter of its own, whose
ranks take turns; bare steps and steps with adapters take turns too. An adapter's bytes are read once in a step, so the
limit is what a plain loop takes to read the same pages with as many threads; it takes turns with the steps too. Lower
quartiles; each op's time includes the barrier behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.ops.step import TimedEngine
from benchmarks.peers.limits import read_rate
from kvarto.adapters.random_adapter import ALL_LINEAR, QV, RandomAdapter
from kvarto.cli.load.adapters import base_targets
from kvarto.core.sampling import SamplingParams
from kvarto.core.strip_type import StripType
from kvarto.engine.config import EngineConfig
from kvarto.engine.messages import AddRequest
from kvarto.models.demo import pull_demo

PROMPT_TOKENS, ROUNDS, STEPS = 20, 6, 24
READ_S = 0.5
BARE, MANY = "bare", "with adapters"

Times = list[Counter[str]]


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ranks", default="8,16,32,64")
    flags.add_argument("--rows", type=int, default=32)
    flags.add_argument("--modules", choices=("qv", "all"), default="all")
    flags.add_argument("--adapter-dtype", choices=("bf16", "int8", "int4"), default="bf16")
    flags.add_argument("--threads", type=int, default=2)
    return flags


def make_adapters(flags: argparse.Namespace, folder: Path) -> int:
    """One per row, in bfloat16; bytes of all as their pages have them."""
    in_pages = StripType(flags.adapter_dtype)
    base, ranks = base_targets(str(pull_demo())), [int(rank) for rank in flags.ranks.split(",")]
    ends, total = (ALL_LINEAR if flags.modules == "all" else QV), 0
    for row in range(flags.rows):
        adapter = RandomAdapter(ends, ranks[row % len(ranks)], seed=row)
        adapter.write(folder / str(row), base)
        total += sum(in_pages.size_bytes(rows * columns) for _, (rows, columns) in adapter.tensors(base))
    return total


def run(flags: argparse.Namespace, folder: Path) -> tuple[dict[str, Times], float]:
    """Steps of as many rows as asked for, by kind; and GB/s of a plain loop over the adapters."""
    config = EngineConfig(
        model=str(pull_demo()), max_model_len=2048, threads=flags.threads, adapter_dir=(str(folder),),
        adapter_dtype="auto" if flags.adapter_dtype == "bf16" else flags.adapter_dtype,
        max_lora_rank=max(int(rank) for rank in flags.ranks.split(",")), device_memory=6 << 30,
    )  # fmt: skip
    engine = TimedEngine(config)
    times: dict[str, Times] = {BARE: [], MANY: []}
    rates = []
    for turn in range(ROUNDS + 1):
        for kind, found in times.items():
            engine.backend.steps.clear()
            engine.run(_requests(flags.rows, turn, has_adapters=kind == MANY))
            if turn:  # in the first round adapters come from the disk
                found.extend(ops for num_tokens, ops in engine.backend.steps if num_tokens == flags.rows)
        rates.append(read_rate(_adapter_pages(engine), flags.threads, READ_S))
    return times, statistics.median(rates[1:])


def _adapter_pages(engine: TimedEngine) -> NDArray[np.uint8]:
    """All between the first page of an adapter and the last."""
    pages = engine.backend.host_pages()
    assert pages is not None, "pages lie elsewhere"
    own = np.concatenate([resident.own for resident in engine.residents])
    assert np.ptp(own) < 2 * len(own), "adapters are all over the pages"
    return pages[own.min() : own.max() + 1]


def _requests(num_rows: int, turn: int, *, has_adapters: bool) -> Iterable[AddRequest]:
    for row in range(num_rows):
        yield AddRequest(
            request_id=f"{turn}-{row}-{has_adapters}",
            prompt_token_ids=tuple((37 * j + 101 * row + 977 * turn) % 40_000 + 10 for j in range(PROMPT_TOKENS)),
            adapter=str(row) if has_adapters else None,
            sampling=SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, seed=1),
        )


def _quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


def main() -> None:
    flags = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="kvarto-adapters-") as name:
        num_bytes = make_adapters(flags, Path(name))
        times, read = run(flags, Path(name))
    whole = {kind: _quartile(sum(ops.values()) for ops in each) * 1e3 for kind, each in times.items()}
    for op in times[MANY][0]:
        bare, many = (_quartile(ops[op] for ops in times[kind]) * 1e3 for kind in (BARE, MANY))
        print(f"    {op:24} {bare:8.3f} {many:8.3f} ms")
    added = whole[MANY] - whole[BARE]
    least = num_bytes / read / 1e6
    print(f"steps of {flags.rows} rows: bare {whole[BARE]:.2f} ms, with adapters {whole[MANY]:.2f} ms")
    print(f"{num_bytes / 1e6:.0f} MB of adapters in {added:.2f} ms, {num_bytes / added / 1e6:.1f} GB/s")
    print(
        f"a plain loop over their pages takes {least:.2f} ms, {read:.1f} GB/s; they take {added / least:.2f} times that"
    )
    print(json.dumps({"added_ms": added, "least_ms": least, "bytes": num_bytes, "read_gb_per_s": read, **whole}))


if __name__ == "__main__":
    main()
