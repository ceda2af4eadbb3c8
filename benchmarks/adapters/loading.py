"""Does loading adapters disturb those who decode? Time between tokens of the bare base, with and without it, by turns.

    python -m benchmarks.adapters.loading                        20 adapters a second, q and v of rank 8
    python -m benchmarks.adapters.loading --modules all --rank 32 --disk-share 0.5
                                                                 as many bytes a second as half of what the disk reads

Each adapter is asked for once, by a request of one token in and one out, and its files are out of the page cache, so
every load goes from the disk to the pages. A third run asks as often, in the same way, for a few adapters that are on
the device already: what it costs is the price of the requests, and what loading costs beyond it is that of the loads.
`--rounds` of the three runs take turns, and the 99th percentiles of a round are compared, for the machine's speed
drifts: with ten rounds the median is good to a few percent. CPU seconds are those of the server's whole tree beyond the
run of requests alone, per GB of adapters loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import uvloop

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

PROMPT, OUTPUT = LengthRange(64), LengthRange(200, 0.5)
"""Outputs of many lengths: where all requests end at once, prompts meet nobody who waits for a token."""
NUM_RESIDENT = 8
"""Adapters that the run of requests alone asks for."""
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
    """One token of an adapter."""
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
        names, size = make_adapters(flags, adapters, NUM_RESIDENT + num_asked(flags, rate) * flags.rounds)
        resident, names = names[:NUM_RESIDENT], names[NUM_RESIDENT:]
        print(f"{len(names):,} adapters of {format_bytes(size)}")
        with local_server([flags.model, "--adapter-dir", str(adapters), "--max-lora-rank", str(flags.rank)]) as url:
            shares = [names[turn :: flags.rounds] for turn in range(flags.rounds)]  # each is new in its round
            runs = [three_runs(url, flags, turn, resident, share, rate) for turn, share in enumerate(shares)]
    show(runs, size)


def num_asked(flags: argparse.Namespace, rate: float) -> int:
    """For adapters, in a run: enough for one that takes half as long again as it would alone."""
    seconds: float = flags.seconds
    return round(1.5 * rate * seconds)


def three_runs(
    url: str, flags: argparse.Namespace, turn: int, resident: list[str], names: list[str], rate: float
) -> tuple[Run, Run, Run]:
    """Alone; with requests for adapters that are there; with requests for adapters that are not."""
    alone = uvloop.run(one_run(url, flags, 3 * turn, [], rate))
    uvloop.run(warm_up(url, resident))
    asked = list(islice(cycle(resident), num_asked(flags, rate)))
    return (
        alone,
        uvloop.run(one_run(url, flags, 3 * turn + 1, asked, rate)),
        uvloop.run(one_run(url, flags, 3 * turn + 2, names, rate)),
    )


async def warm_up(url: str, names: list[str]) -> None:
    """Bring these adapters to the device."""
    async with OpenAIClient(url) as client:
        for name in names:
            await ask_for(client, name, Run(0, 0, 0, 0))


def show(runs: list[tuple[Run, Run, Run]], size: int) -> None:
    for three in runs:
        for name, run in zip(("alone", "resident", "loading"), three, strict=True):
            print(
                f"{name:9} p50 {run.p50_ms:6.1f} p99 {run.p99_ms:6.1f} ms, {run.num_loaded:4} requests for adapters in "
                f"{run.duration_s:5.1f} s ({run.num_loaded / run.duration_s:.1f}/s), {run.num_failed} failed"
            )
    alone, resident, loading = (statistics.median(each.p99_ms for each in kind) for kind in zip(*runs, strict=True))
    print(f"p99 between tokens, medians: {alone:.1f}, {resident:.1f} and {loading:.1f} ms")
    requests = statistics.median(resident.p99_ms / alone.p99_ms for alone, resident, _ in runs) - 1
    loads = statistics.median(loading.p99_ms / resident.p99_ms for _, resident, loading in runs) - 1
    print(f"medians of what each round says: requests {requests:+.1%}, loads beyond them {loads:+.1%}")
    num_bytes = sum(loading.num_loaded for *_, loading in runs) * size
    extra_s = sum(loading.cpu_s - resident.cpu_s for _, resident, loading in runs)
    print(f"{extra_s / (num_bytes / 1e9):.2f} CPU seconds per GB loaded")
    rate = statistics.median(loading.num_loaded / loading.duration_s for *_, loading in runs)
    p99_ms = {"alone": alone, "resident": resident, "loading": loading}
    print(json.dumps({"p99_ms": p99_ms, "requests": requests, "loads": loads, "loads_per_s": rate}))


if __name__ == "__main__":
    main()
