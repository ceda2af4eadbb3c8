"""What does the engine add to a step? Microseconds per running sequence for deciding, laying out and answering.

`python -m benchmarks.engine.step_overhead`: decode with a backend that computes nothing; real scheduler, cache, pool
and loop. Baseline: the same loop with one running sequence, which is what a step costs whatever is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from kvarto.cache.kv_cache import KVCache
from kvarto.core.buffers import StepLimits
from kvarto.core.clock import MonotonicClock
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Step, StepResult
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.channel import LocalChannel
from kvarto.engine.loop import EngineLoop, EngineParts
from kvarto.engine.messages import AddRequest, Stats
from kvarto.engine.results import collect
from kvarto.engine.scheduler import Scheduler
from kvarto.engine.validate import ModelLimits
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfers

PAGE_SIZE = 16
VOCAB_SIZE = 32_000


class NullBackend:
    """Draws token 7 for every row."""

    def run(self, step: Step) -> StepResult:
        count = step.num_samples
        return StepResult(
            token_ids=np.full(count, 7, dtype=np.int32),
            logprobs=np.zeros(count, dtype=np.float32),
            top_ids=np.empty((count, 0), dtype=np.int32),
            top_logprobs=np.empty((count, 0), dtype=np.float32),
            is_finite=np.ones(count, dtype=np.bool_),
        )


class Bench:
    """An engine in which `num_seqs` sequences of `context` tokens decode."""

    def __init__(self, num_seqs: int, context: int, num_steps: int) -> None:
        num_tokens = context + num_steps
        limits = StepLimits(max(num_seqs, 2048), num_seqs, num_seqs + 32, num_tokens + 64)
        groups = (LayerGroup((0,), 1, 1, 1, None),)
        pool = PagePool(num_seqs * (num_tokens // PAGE_SIZE + 6))
        transfers = Transfers(lambda source, target: None, MonotonicClock())
        cache = KVCache(
            pool=pool,
            arbiter=Arbiter(pool),
            transfers=transfers,
            groups=groups,
            kv_format=KVFormat(DType.F32, PAGE_SIZE, 1, 1, 1),
            identity=b"bench",
            key=b"k" * 32,
            enable_prefix_caching=True,
            recompute_cost_s=lambda first, count: 1e-3 * count,
        )
        self.scheduler = Scheduler(cache, limits, max_num_queued=num_seqs + 1, has_copies=lambda: False)
        self.batch = BatchBuilder(limits, groups=groups, page_size=PAGE_SIZE)
        self.backend = NullBackend()
        channel = LocalChannel()
        self.loop = EngineLoop(
            EngineParts(self.backend, cache, transfers, self.scheduler, self.batch),  # type: ignore[arg-type]
            channel,
            MonotonicClock(),
            ModelLimits(VOCAB_SIZE, limits.max_context),
            read_stats=Stats,
        )
        rng = np.random.default_rng(0)
        for index in range(num_seqs):
            prompt = tuple(rng.integers(10, VOCAB_SIZE, context).tolist())
            sampling = SamplingParams(max_tokens=num_steps + 64, seed=index)
            channel.inbox.append(AddRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        while self.scheduler.num_running < num_seqs or any(not r.choices[0].output for r in self.requests):
            self.loop.step()
        self.channel = channel

    @property
    def requests(self) -> list[object]:
        return list(self.scheduler.requests.values())  # type: ignore[return-value]

    def timed_parts(self) -> tuple[float, float, float]:
        """Seconds of schedule, build and collect for one step."""
        start = time.perf_counter()
        chunks = self.scheduler.schedule()
        scheduled = time.perf_counter()
        step = self.batch.build(chunks)
        built = time.perf_counter()
        result = self.backend.run(step)
        ran = time.perf_counter()
        collect(chunks, result, self.scheduler)
        return scheduled - start, built - scheduled, time.perf_counter() - ran

    def timed_loop(self) -> float:
        """Seconds of one whole round of the loop."""
        start = time.perf_counter()
        self.loop.step()
        self.channel.outbox.clear()
        return time.perf_counter() - start


def measure(num_seqs: int, context: int, num_steps: int) -> dict[str, float]:
    bench = Bench(num_seqs, context, 2 * num_steps)
    parts = [bench.timed_parts() for _ in range(num_steps)]
    loops = [bench.timed_loop() for _ in range(num_steps)]
    schedule, build, answer = (statistics.median(column) * 1e6 for column in zip(*parts, strict=True))
    return {
        "num_seqs": num_seqs,
        "context": context,
        "schedule_us": schedule,
        "build_us": build,
        "collect_us": answer,
        "loop_us": statistics.median(loops) * 1e6,
        "decide_and_build_us_per_seq": (schedule + build) / num_seqs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    rows = [measure(count, context, arguments.steps) for count, context in ((1, 64), (32, 64), (32, 2048), (256, 64))]
    print(f"{'sequences':>9} {'context':>8} {'schedule':>9} {'build':>9} {'collect':>9} {'loop':>9}   µs per sequence")
    for row in rows:
        print(
            f"{row['num_seqs']:>9} {row['context']:>8} {row['schedule_us']:>9.1f} {row['build_us']:>9.1f} "
            f"{row['collect_us']:>9.1f} {row['loop_us']:>9.1f}   {row['decide_and_build_us_per_seq']:.2f}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
