"""What does a typed, chained digest per match unit cost, against a bare hashlib loop over the same units?

    python -m benchmarks.memory.digests

Bare: blake2b of the same size over parent + tokens, no tags, no lengths, nothing kept. A B A B, medians.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from array import array
from hashlib import blake2b

from kvarto.cache.digests import UNIT_BYTES, unit_digests
from kvarto.core.digest_fields import DIGEST_BYTES

NUM_TOKENS = 50_000
ROUNDS = 61
ROOT = b"\0" * DIGEST_BYTES


def bare(parent: bytes, tokens: bytes) -> bytes:
    """The loop that nobody can do without."""
    for start in range(0, len(tokens) - UNIT_BYTES + 1, UNIT_BYTES):
        parent = blake2b(parent + tokens[start : start + UNIT_BYTES], digest_size=DIGEST_BYTES).digest()
    return parent


def main() -> None:
    """Print the table."""
    token_ids = [random.Random(1).randrange(50_000) for _ in range(NUM_TOKENS)]
    tokens = array("i", token_ids).tobytes()
    times: dict[str, list[float]] = {"ours": [], "bare": [], "list to bytes": []}
    for _ in range(ROUNDS):
        for name, call in (
            ("ours", lambda: unit_digests(ROOT, tokens)),
            ("bare", lambda: bare(ROOT, tokens)),
            ("list to bytes", lambda: array("i", token_ids).tobytes()),
        ):
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(samples) * 1e3 for name, samples in times.items()}
    ratio = medians["ours"] / medians["bare"]
    for name, ms in medians.items():
        print(f"{name:>14} {ms:7.2f} ms {ms * 1e6 / NUM_TOKENS:7.1f} ns/token")
    print(f"{NUM_TOKENS:,} tokens, {NUM_TOKENS // 16:,} units of 16, ours / bare = {ratio:.2f}")
    print(json.dumps({"benchmark": "memory.digests", "ratio": round(ratio, 3), "ms": round(medians["ours"], 2)}))


if __name__ == "__main__":
    main()
