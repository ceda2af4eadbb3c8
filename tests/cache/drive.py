"""Seeded driver: random worlds, random steps, the law and all counts checked at every one.

    python -m tests.cache.drive --steps 1000000 --seed 1

Prints the failing seed and step; the same arguments replay the same steps. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from contextlib import nullcontext

from tests.cache.world import Choice, Scene, World, truncated_digests

STEPS_PER_WORLD = 2000
STRUCTURE_EVERY = 4
"""Steps between full checks of every structure; the judge counts pages again after each step."""
WINDOWS = [(None,), (None,), (None, None), (None, 24), (None, 7, 40), (40,), (16, 33), (1, None)]


def random_scene(rng: random.Random) -> Scene:
    """Small enough for pressure, with faults in half of the worlds."""
    page_size = rng.choice((8, 8, 16, 16, 32, 64))
    windows = rng.choice(WINDOWS)
    tokens = rng.choice((150, 400, 1500))
    has_adapters = rng.random() < 0.4
    num_pages = max(6, tokens // page_size) * len(windows)
    return Scene(
        page_size=page_size,
        windows=windows,
        num_pages=num_pages,
        fault_rate=rng.choice((0.0, 0.0, 0.1, 0.4)),
        copy_s=rng.choice((0.0, 1.0, 5.0)),
        has_adapters=has_adapters,
        kv_floor=rng.choice((0, num_pages // 3)) if has_adapters else 0,
        adapter_floor=rng.choice((0, num_pages // 4)) if has_adapters else 0,
        is_caching=rng.random() < 0.9,
    )


class Driver:
    """Steps through one world."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.world = World(scene, seed)
        self.random = random.Random(seed)
        self.prompts = [self._random_tokens(self.random.randrange(1, 160)) for _ in range(4)]
        self.max_choices = self.random.choice((2, 4, 8))
        self.use_prefix_rate = self.random.choice((0.95, 0.5))

    def step(self) -> None:
        """One random event."""
        world, rng = self.world, self.random
        roll = rng.random()
        if not world.choices or (roll < 0.12 and len(world.choices) < self.max_choices):
            salt, adapter = rng.choice((None, None, None, "", "t")), rng.choice((b"", b"", b"a", b"b"))
            prompt, use_prefix = self._prompt(), rng.random() < self.use_prefix_rate
            start = rng.choice((0, rng.randrange(len(prompt)), rng.choice((16, 32, 64))))
            world.open(prompt, salt, adapter, use_prefix, start if start < len(prompt) else 0)
        elif roll < 0.70:
            self._advance(rng.choice(world.choices))
        elif roll < 0.76:
            if len(world.choices) < self.max_choices:
                world.fork(rng.choice(world.choices))
        elif roll < 0.84:
            world.close(rng.choice(world.choices))
        elif roll < 0.88:
            world.preempt(rng.choice(world.choices))
        elif roll < 0.96 or not world.scene.has_adapters:
            world.tick(rng.choice((0.0, 0.1, 1.0, 4.0)))
        else:
            self._use_adapters()

    def _advance(self, choice: Choice) -> None:
        left = len(choice.tokens) - choice.num_computed
        chunk = self.random.choice((1, 1, left, self.random.randrange(1, 48)))
        if self.world.advance(choice, max(1, chunk)) == "no pages":
            victim = self.random.choice(self.world.choices)
            if self.random.random() < 0.5:
                self.world.preempt(victim)
            else:
                self.world.close(victim)
        elif choice.num_computed > 250:
            self.world.close(choice)

    def _use_adapters(self) -> None:
        adapters = self.world.adapters
        used = [name for name, users in adapters.num_users.items() if users and name.startswith("adapter")]
        unused = [name for name in adapters.loaded if not adapters.num_users[name]]
        if used and self.random.random() < 0.5:
            self.world.release_adapter(self.random.choice(used))
        elif unused and self.random.random() < 0.8:
            self.world.drop_adapter(self.random.choice(unused))
        else:
            self.world.use_adapter(f"adapter {self.random.randrange(6)}", self.random.randrange(1, 4))

    def _prompt(self) -> list[int]:
        """A known prompt, cut anywhere, with another end."""
        base = self.random.choice(self.prompts)
        cut = self.random.choice((len(base), self.random.randrange(len(base) + 1)))
        prompt = base[:cut] + self._random_tokens(self.random.choice((0, 1, 5, 30)))
        if self.random.random() < 0.05:
            self.prompts[self.random.randrange(len(self.prompts))] = self._random_tokens(self.random.randrange(1, 160))
        return prompt or [0]

    def _random_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(count)]


def drive_world(seed: int, num_steps: int) -> Counter[str]:
    """One world from its seed, checked at every step and drained at the end."""
    rng = random.Random(seed)
    driver = Driver(random_scene(rng), seed)
    with truncated_digests(rng.choice((3, 40))) if rng.random() < 0.2 else nullcontext():
        for step in range(num_steps):
            try:
                driver.step()
                driver.world.judge()
                if step % STRUCTURE_EVERY == 0:
                    driver.world.cache.check()
            except BaseException as error:
                error.add_note(f"world of seed {seed}, step {step}: {driver.world.scene}")
                raise
        driver.world.drain()
    return Counter(driver.world.counts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    done = 0
    while done < arguments.steps:
        num_steps = min(STEPS_PER_WORLD, arguments.steps - done)
        counts += drive_world(arguments.seed * 1_000_000 + done // STEPS_PER_WORLD, num_steps)
        done += num_steps
    seconds = time.perf_counter() - start
    for what, count in sorted(counts.items()):
        print(f"{what:>20} {count:>12,}")
    print(f"{done:,} steps in {seconds:.0f} s, {done / seconds:,.0f} steps/s, law and counts checked at each")
    print(json.dumps({"steps": done, "seed": arguments.seed, "steps_per_s": round(done / seconds), **counts}))


if __name__ == "__main__":
    main()
