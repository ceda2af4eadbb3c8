"""Does loading adapters disturb those who decode? Time between tokens of the bare base, with and without it, by turns.

    python -m benchmarks.adapters.loading                        20 adapters a second, q and v of rank 8
    python -m benchmarks.adapters.loading --modules all --rank 32 --disk-share 0.5
                                                                 as many bytes a second as half of what the disk reads

Each adapter is asked for once, by a request of one token in and one out, and its files are out of the page cache, so
every load goes from the disk to the pages. `--rounds` pairs of runs take turns; medians of the 99th percentiles are
compared. CPU seconds are those of the server's whole tree beyond the run without loading, per GB of adapters loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.process_tree import cpu_s, tree
from kvarto.adapters.random_adapter import ALL_LINEAR, QV, RandomAdapter
from kvarto.cli.load.adapters import base_targets
from kvarto.cli.load.report import report
from kvarto.cli.load.run import LoadSettings, find_vocabulary, run_load
from kvarto.cli.load.workload import LengthRange, PromptIds, random_workload
from kvarto.cli.local_server import local_server
from kvarto.cli.openai_client import OpenAIClient
from kvarto.core.errors import KvartoError
from kvarto.core.units import format_bytes

PROMPT, OUTPUT = LengthRange(64), LengthRange(200)
_DIRECT_BYTES = 4 << 20


@dataclass
class Run:
    """One load of the bare base."""

    p50_ms: float
    p99_ms: float
    cpu_s: float
    duration_s: float
    num_loaded: int = 0
    num_failed: int = 0


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--modules", choices=("qv", "all"), default="qv")
    flags.add_argument("--rank", type=int, default=8)
    flags.add_argument("--rate", type=float, default=20.0, help="adapters per second")
    flags.add_argument("--disk-share", type=float, help="instead of a rate: this share of the disk's own")
    flags.add_argument("--streams", type=int, default=8)
    flags.add_argument("--requests", type=int, default=24, help="of the bare base, in each run")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--seconds", type=float, default=30.0, help="adapters are made for so long a run")
    flags.add_argument("--folder", type=Path, help="where adapters are written; a temporary folder without it")
    return flags


def make_adapters(flags: argparse.Namespace, folder: Path, count: int) -> tuple[list[str], int]:
    """Names, and bytes of each; the files are on the disk and not in memory."""
    base = base_targets(flags.model)
    names = [f"adapter-{index:05d}" for index in range(count)]
    for index, name in enumerate(names):
        RandomAdapter(ALL_LINEAR if flags.modules == "all" else QV, flags.rank, seed=index).write(folder / name, base)
    os.sync()
    sizes = [drop_from_cache(path) for path in folder.glob("*/adapter_model.safetensors")]
    return names, max(sizes)


def drop_from_cache(path: Path) -> int:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(file.fileno()).st_size


def disk_bytes_per_s(folder: Path) -> float:
    """What one reader gets of a file that is not in memory."""
    path = folder / "disk-rate"
    path.write_bytes(os.urandom(64 << 20) * 8)
    os.sync()
    size = drop_from_cache(path)
    buffer = bytearray(_DIRECT_BYTES)
    start_s = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    seconds = time.perf_counter() - start_s
    path.unlink()
    return size / seconds


async def ask_for(client: OpenAIClient, name: str, run: Run) -> None:
    """One token of an adapter that is still on the disk."""
    try:
        await client.post("/v1/completions", {"model": name, "prompt": [1], "max_tokens": 1, "temperature": 0})
        run.num_loaded += 1
    except KvartoError:
        run.num_failed += 1


async def load_adapters(client: OpenAIClient, names: list[str], rate: float, run: Run) -> None:
    """Ask for one adapter after the other at that rate, until cancelled."""
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(len(names)):
            await asyncio.sleep(max(0.0, start_s + index / rate - time.perf_counter()))
            group.create_task(ask_for(client, names.pop(), run))


async def one_run(url: str, flags: argparse.Namespace, seed: int, names: list[str], rate: float) -> Run:
    """The base's load; with names, adapters come meanwhile."""
    workload = random_workload(flags.requests, PROMPT, OUTPUT, None, seed)
    async with OpenAIClient(url) as client:
        base = (await client.models())[0]
        prompts = PromptIds(await find_vocabulary(client, base), seed)
        run, servers = Run(0, 0, 0, 0), [pid for pid in tree(os.getpid()) if pid != os.getpid()]
        before_s = cpu_s(servers[0])
        loading = asyncio.create_task(load_adapters(client, names, rate, run))
        answers, duration_s = await run_load(client, workload, prompts, LoadSettings(base, flags.streams))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        spread = report(answers, duration_s).inter_token_latency
        assert spread is not None, "no tokens came"
        run.p50_ms, run.p99_ms = spread.percentiles_ms["p50"], spread.percentiles_ms["p99"]
        run.cpu_s, run.duration_s = cpu_s(servers[0]) - before_s, duration_s
    return run


def main() -> None:
    flags = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="kvarto-loading-", dir=flags.folder) as name:
        folder = Path(name)
        rate = flags.rate
        if flags.disk_share is not None:
            disk = disk_bytes_per_s(folder)
            _, size = make_adapters(flags, folder / "one", 1)
            rate = flags.disk_share * disk / size
            print(f"the disk reads {format_bytes(round(disk))}/s; {flags.disk_share:.0%} of it: {rate:.1f} adapters/s")
        adapters = folder / "adapters"
        names, size = make_adapters(flags, adapters, round(rate * flags.seconds * flags.rounds))
        print(f"{len(names):,} adapters of {format_bytes(size)}")
        with local_server([flags.model, "--adapter-dir", str(adapters), "--max-lora-rank", str(flags.rank)]) as url:
            runs = [
                (asyncio.run(one_run(url, flags, 2 * turn, [], rate)),
                 asyncio.run(one_run(url, flags, 2 * turn + 1, names, rate)))
                for turn in range(flags.rounds)
            ]  # fmt: skip
    show(runs, size)


def show(runs: list[tuple[Run, Run]], size: int) -> None:
    for alone, loading in runs:
        print(
            f"alone p50 {alone.p50_ms:.1f} p99 {alone.p99_ms:.1f} ms | loading p50 {loading.p50_ms:.1f} "
            f"p99 {loading.p99_ms:.1f} ms, {loading.num_loaded} adapters in {loading.duration_s:.1f} s, "
            f"{loading.num_failed} failed"
        )
    p99 = [statistics.median(each.p99_ms for each in kind) for kind in zip(*runs, strict=True)]
    print(f"p99 between tokens, medians: {p99[0]:.1f} and {p99[1]:.1f} ms, {p99[1] / p99[0] - 1:+.1%}")
    num_bytes = sum(loading.num_loaded for _, loading in runs) * size
    extra_s = sum(loading.cpu_s - alone.cpu_s for alone, loading in runs)
    print(f"{extra_s / (num_bytes / 1e9):.2f} CPU seconds per GB loaded")


if __name__ == "__main__":
    main()
