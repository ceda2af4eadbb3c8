"""What does it cost to open, pack, hash and bind one more adapter? Milliseconds and MB/s, in Python and in native code.

    python -m benchmarks.adapters.opening [--model demo] [--count 40]

Adapters of one recipe, on q and v with rank 8 and on all linears with rank 32, bfloat16, their files in the page cache;
packed once more from the disk, for which CPU time is given: how long it waits is the disk's affair.
Each stage of a load is run by itself; medians. Native stages run without the interpreter's lock; what a whole read
takes beyond them is Python, and so are finding and binding. Physical limit: bytes copied by `memcpy`, one thread.
What pages are hashed with hangs on the machine, and on `KVARTO_ISA`; it is said first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvarto.adapters.binding import bind
from kvarto.adapters.known_digests import SETTLED_NS
from kvarto.adapters.page_hasher import PageHasher
from kvarto.adapters.random_adapter import ALL_LINEAR, QV, RandomAdapter
from kvarto.adapters.source import AdapterFiles, FoundAdapter
from kvarto.adapters.spare_images import new_images
from kvarto.adapters.targets import BaseTargets, targets_of
from kvarto.core.buffers import StepLimits
from kvarto.core.layout import Budget
from kvarto.engine.assemble import open_program
from kvarto.engine.config import EngineConfig
from kvarto.models.hub import resolve
from kvarto.ops.native.backend import NativeBackend
from kvarto.planning.plan import plan

KINDS = {"q,v rank 8": (QV, 8), "all linears rank 32": (ALL_LINEAR, 32)}
NUM_PAGES = 200
FIND, READ, BIND = "find", "first read", "bind, unbind"
FROM_DISK = "pack, from disk, CPU"
NATIVE = ("pack", "digests")
"""Of a read."""


@dataclass(frozen=True)
class Bench:
    """A backend that is open, with nothing in it."""

    backend: NativeBackend
    base: BaseTargets
    page_bytes: int

    @classmethod
    def open(cls, model: str) -> Bench:
        config = EngineConfig(model=str(resolve(model, say=lambda text: None)))
        backend = NativeBackend()
        files, program = open_program(config, backend)
        files.close()
        limits = StepLimits(64, 8, 8, 2048, 32)
        kv_dtype = backend.default_kv_dtype(program)
        kv_format = program.kv_format(kv_dtype, 16)
        scratch = {i: backend.scratch_bytes(op, program, limits, kv_format) for i, op in enumerate(program.ops)}
        layout = plan(program, Budget(4 << 30, "bench"), limits, kv_dtype, 16, scratch, NUM_PAGES)
        backend.open(program, layout)
        return cls(backend, targets_of(program), kv_format.page_bytes)


def stages(bench: Bench, files: AdapterFiles, found: FoundAdapter, path: Path) -> dict[str, Callable[[], object]]:
    """What is done in a load, in order; each may be called again."""
    assert found.on_disk is not None
    images = new_images(found.num_pages, bench.page_bytes)
    images[:] = 1  # memory that the system has given already
    packer, beside, page_bytes = found.on_disk.shape.packer, np.empty(0, np.uint8), bench.page_bytes
    in_order = np.arange(found.num_pages, dtype=np.int32)
    region = bench.backend.host_pages()
    pages = np.random.default_rng(0).permutation(len(region)).astype(np.int32)[: found.num_pages]
    file = os.open(found.on_disk.tensors_file.path, os.O_RDONLY)
    copied = images.copy()

    def bound() -> None:
        bench.backend.bind_adapter(0, bind(found.bound_shape, pages, bench.page_bytes))
        bench.backend.unbind_adapter(0)

    return {
        FIND: lambda: files.find(path),
        "pack": lambda: packer._plan.pack(packer._isa, file, region, page_bytes, pages, beside, False),
        "digests": lambda: packer.digests(region, pages),
        READ: lambda: files.read(found, region, pages),
        "another read": lambda: files.read(found, region, pages),
        "pack in order": lambda: packer._plan.pack(packer._isa, file, images, page_bytes, in_order, beside, False),
        "copy to pages": lambda: bench.backend.write_pages(pages, images, in_order),
        BIND: bound,
        "memcpy": lambda: np.copyto(copied, images),
        "": lambda: os.close(file),
    }


def measure(bench: Bench, modules: tuple[str, ...], rank: int, count: int) -> dict[str, float]:
    """Milliseconds of each stage, and MB of an adapter."""
    with tempfile.TemporaryDirectory(prefix="kvarto-opening-") as name:
        folder = Path(name)
        for index in range(count):
            RandomAdapter(modules, rank, seed=index).write(folder / f"{index}", bench.base)
        files = AdapterFiles(bench.base, [folder], bench.page_bytes, now_ns=lambda: time.time_ns() + 2 * SETTLED_NS)
        times: dict[str, list[float]] = {"first of its shape": [_seconds(lambda: files.find(folder / "0"))]}
        for index in range(count):
            path = folder / f"{index}"
            found = files.find(path)
            for stage, run in stages(bench, files, found, path).items():
                times.setdefault(stage, []).append(_seconds(run))
            times.setdefault(FROM_DISK, []).append(_cpu_seconds_from_disk(bench, found))
    median = {stage: statistics.median(each) * 1e3 for stage, each in times.items() if stage}
    native = sum(median[stage] for stage in NATIVE)
    python = median[FIND] + max(0.0, median[READ] - native) + median[BIND]
    return median | {"Python": python, "native": native, "MB": found.adapter.size_bytes / 1e6}


def _cpu_seconds_from_disk(bench: Bench, found: FoundAdapter) -> float:
    assert found.on_disk is not None
    images, packer = new_images(found.num_pages, bench.page_bytes), found.on_disk.shape.packer
    images[:] = 1
    with found.on_disk.tensors_file.opened() as file:
        os.fsync(file.fileno())
        file.forget(0, file.size_bytes)
        start = time.thread_time()
        packer.pack(file, images, np.arange(len(images), dtype=np.int32), may_be_direct=True)
        return time.thread_time() - start


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    bench = Bench.open(options.model)
    results = {kind: measure(bench, *what, options.count) for kind, what in KINDS.items()}
    algorithm = PageHasher().algorithm
    print(f"pages are hashed with {algorithm}")
    for kind, times in results.items():
        print(f"{kind}, {times['MB']:.2f} MB\n    {'':20} {'ms':>9} {'MB/s':>9}")
        for stage, each in times.items():
            if stage != "MB":
                print(f"    {stage:20} {each:9.3f} {times['MB'] / each * 1e3:9.0f}")
    print(json.dumps({"hash": algorithm, **results}))
    bench.backend.close()


if __name__ == "__main__":
    main()
