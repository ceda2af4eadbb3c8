"""`python -m tests.engine.simulate --requests 10000 --seed 1`: the whole-engine simulation, with figures."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from tests.engine.simulation import Episode, Faults

REQUESTS_PER_EPISODE = 100


def simulate(num_requests: int, seed: int, faults: Faults) -> Counter[str]:
    """Run episodes until `num_requests` requests were judged. The seed of a failing episode is in its error."""
    counts: Counter[str] = Counter()
    for number in range(-(-num_requests // REQUESTS_PER_EPISODE)):
        episode = Episode(seed * 1_000_003 + number, num_requests=REQUESTS_PER_EPISODE, faults=faults)
        try:
            episode.run()
        except BaseException as error:
            error.add_note(f"episode {number} of seed {seed}: {episode.engine.describe()}")
            raise
        counts += episode.counts
        counts["requests"] += len(episode.records)
        counts["choices"] += sum(record.message.sampling.n for record in episode.records.values())
        counts["most preemptions of one choice"] = max(
            counts["most preemptions of one choice"], episode.max_preemptions
        )
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()
    counts = simulate(arguments.requests, arguments.seed, Faults())
    seconds = time.perf_counter() - start
    for name, count in sorted(counts.items()):
        print(f"{name:32} {count:>10,}")
    print(json.dumps({"seed": arguments.seed, "seconds": round(seconds, 1), **counts}))


if __name__ == "__main__":
    main()
