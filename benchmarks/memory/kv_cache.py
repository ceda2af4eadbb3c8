"""What does the bookkeeping of the KV cache cost per step and per request? No model, no bytes.

    python -m benchmarks.memory.kv_cache

Decode: 1,024 sequences take one token each, `grow` and `commit` for every one, with and without prefix caching (at 0 %
hits), A B A B. Prefix: a prompt of 50,000 tokens is opened, published and closed, first cold and then cached.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

from kvarto.cache.kv_cache import KVCache
from kvarto.cache.sequence import Sequence
from kvarto.core.clock import MonotonicClock
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfers

NUM_SEQUENCES = 1024
STEPS = 320
NUM_TOKENS = 50_000


def make_cache(num_pages: int, is_caching: bool = True) -> KVCache:
    """One full-attention group, pages of 16."""
    pool = PagePool(num_pages)
    return KVCache(
        pool=pool,
        arbiter=Arbiter(pool),
        transfers=Transfers(lambda source, target: None, MonotonicClock()),
        groups=(LayerGroup((0,), 1, 1, 64, None),),
        kv_format=KVFormat(DType.F32, 16, 1, 1, 64),
        identity=b"model",
        key=b"secret",
        enable_prefix_caching=is_caching,
        recompute_cost_s=lambda first, num: num * 1e-3,
    )


def start_sequences(cache: KVCache) -> list[Sequence]:
    """Prompts of different lengths, so that units are completed in all steps alike."""
    sequences = []
    for index in range(NUM_SEQUENCES):
        prompt = [index] * (1 + index % 16)
        sequence = cache.open(prompt, salt=None)
        cache.grow(sequence, len(prompt))
        cache.commit(sequence, prompt)
        sequences.append(sequence)
    return sequences


def decode_step(cache: KVCache, sequences: list[Sequence]) -> None:
    """What a scheduler calls for each."""
    for sequence in sequences:
        cache.grow(sequence, sequence.num_computed_tokens + 1)
        cache.commit(sequence, (7,))


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def decode() -> dict[str, float]:
    """Microseconds per step."""
    caches = {name: make_cache(40_000, name == "cached") for name in ("cached", "plain")}
    sequences = {name: start_sequences(cache) for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(STEPS):
        for name, cache in caches.items():
            times[name].append(seconds(lambda c=cache, n=name: decode_step(c, sequences[n])))  # type: ignore[misc]
    return {f"decode_{name}_us": round(statistics.median(samples) * 1e6) for name, samples in times.items()}


def prefix() -> dict[str, float]:
    """Milliseconds to open, publish and close a long prompt, and bytes of records per page."""
    cache = make_cache(4_000)
    prompt = [index * 7919 % 50_000 for index in range(NUM_TOKENS)]
    tracemalloc.start()
    cold = serve(cache, prompt)
    record_bytes = tracemalloc.get_traced_memory()[0] / (NUM_TOKENS // 16)
    tracemalloc.stop()
    cold = serve(make_cache(4_000), prompt)
    hits = [serve(cache, prompt + [index]) for index in range(9)]
    figures = {f"cold_{name}_ms": value * 1e3 for name, value in cold.items()}
    figures |= {f"hit_{name}_ms": statistics.median(hit[name] for hit in hits) * 1e3 for name in cold}
    return {name: round(value, 2) for name, value in figures.items()} | {"record_bytes_per_page": round(record_bytes)}


def serve(cache: KVCache, prompt: list[int]) -> dict[str, float]:
    """Seconds of each part of a request."""
    opened: list[Sequence] = []
    times = {"open": seconds(lambda: opened.append(cache.open(prompt, salt=None)))}
    sequence = opened[0]
    while not cache.is_ready(sequence):
        time.sleep(0.001)
    times["grow"] = seconds(lambda: cache.grow(sequence, len(prompt)))
    rest = prompt[sequence.num_computed_tokens :]
    times["commit"] = seconds(lambda: cache.commit(sequence, rest))
    times["close"] = seconds(lambda: cache.close(sequence))
    return times


def main() -> None:
    """Print the table."""
    figures = decode() | prefix()
    for name, value in figures.items():
        print(f"{name:>24} {value:>12,}")
    print(json.dumps({"benchmark": "memory.kv_cache", "sequences": NUM_SEQUENCES, "tokens": NUM_TOKENS, **figures}))


if __name__ == "__main__":
    main()
