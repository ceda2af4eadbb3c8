"""Clients that come, go and hang up, engines that are killed, and one request that kills each engine it meets.

It alone fails. Everybody else gets exactly the tokens that a quiet server gives, all pages are free or evictable at
the end, and no process grows. `KVARTO_SOAK_S` sets the length.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from kvarto.core.dtype import DType
from kvarto.engine.config import EngineConfig, FaultPlan
from kvarto.models.model import open_model
from tests.acceptance.prompts import varied_prompts
from tests.acceptance.serving import Served, kill, served

NUM_CLIENTS = 64
NUM_KILLS = 3
POISON = "xyzzy plugh plover"
GROWTH_BYTES = 24 << 20
"""Resident memory may move by that much between the first quarter and the end: allocators keep what they once had."""


@dataclass
class Tally:
    """What clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    poison_status: int | None = None


def body_of(prompt: str, max_tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def complete(session: aiohttp.ClientSession, prompt: str, max_tokens: int) -> tuple[int, str]:
    async with session.post("/v1/completions", json=body_of(prompt, max_tokens)) as answer:
        parsed = await answer.json()
        return answer.status, parsed["choices"][0]["text"] if answer.status == 200 else str(parsed)


async def hang_up(session: aiohttp.ClientSession, prompt: str, after_chunks: int) -> None:
    """Begin a stream and leave in the middle of it."""
    async with session.post("/v1/completions", json=body_of(prompt, 64) | {"stream": True}) as answer:
        async for _ in answer.content:
            after_chunks -= 1
            if after_chunks <= 0:
                answer.close()
                return


async def client(session: aiohttp.ClientSession, expected: dict[str, str], tally: Tally, seed: int, end: float) -> None:
    rng = random.Random(seed)
    prompts = list(expected)
    while time.monotonic() < end:
        prompt = rng.choice(prompts)
        if rng.random() < 0.25:
            await hang_up(session, prompt, rng.randrange(1, 12))
            tally.outcomes["left"] += 1
            continue
        status, text = await complete(session, prompt, 8)
        tally.outcomes[str(status)] += 1
        if status != 200 or text != expected[prompt]:
            tally.wrong.append(f"{status}: {prompt[:30]!r} gave {text!r}, expected {expected[prompt]!r}")


async def poison(session: aiohttp.ClientSession, tally: Tally, after_s: float) -> None:
    await asyncio.sleep(after_s)
    tally.poison_status, _ = await complete(session, POISON, 8)


async def kill_now_and_then(server: Served, duration_s: float) -> None:
    for _ in range(NUM_KILLS):
        await asyncio.sleep(duration_s / (NUM_KILLS + 2))
        while not kill(server.engine):
            await asyncio.sleep(0.2)


async def watch_memory(server: Served, seen: list[int], end: float) -> None:
    """Resident bytes of the server process, which lives through everything."""
    while time.monotonic() < end:
        seen.append(server.process.memory_info().rss)
        await asyncio.sleep(1.0)


async def soak(server: Served, duration_s: float) -> tuple[Tally, list[int]]:
    tally, seen = Tally(), list[int]()
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=300)) as session:
        prompts = varied_prompts(48, seed=3)
        expected = {prompt: (await complete(session, prompt, 8))[1] for prompt in prompts}
        end = time.monotonic() + duration_s
        await asyncio.gather(
            *(client(session, expected, tally, seed, end) for seed in range(NUM_CLIENTS)),
            poison(session, tally, duration_s / 3),
            kill_now_and_then(server, duration_s),
            watch_memory(server, seen, end),
        )
        assert (await complete(session, prompts[0], 8))[1] == expected[prompts[0]]
    return tally, seen


def run_soak(demo_model: Path, duration_s: float) -> None:
    model = open_model(demo_model, DType.F32)
    poison_ids = tuple(model.tokenizer.encode(POISON, add_special_tokens=False))
    model.close()
    faults = FaultPlan(abort_on_tokens=poison_ids)
    with served(EngineConfig(model=str(demo_model), max_model_len=2048, faults=faults)) as server:
        tally, seen = asyncio.run(soak(server, duration_s))
        num_pages = server.metric("vllm:cache_config_info") and server.metric("kvarto:pages", state="free")
        num_pages += server.metric("kvarto:pages", state="evictable")
        held = server.metric("kvarto:pages", state="held") + server.metric("kvarto:pages", state="draining")
        restarts = server.metric("kvarto:engine_restarts_total")
    quarter = len(seen) // 4
    growth = max(seen[-quarter:]) - max(seen[: 2 * quarter])
    print(f"{dict(tally.outcomes)}, poison {tally.poison_status}, {restarts:.0f} restarts, grew {growth >> 20} MiB")
    assert not tally.wrong, f"{len(tally.wrong)} wrong, first: {tally.wrong[:3]}"
    assert tally.poison_status == 500
    assert restarts >= NUM_KILLS + 2
    assert held == 0
    assert num_pages > 0
    assert growth < GROWTH_BYTES


@pytest.mark.heavy
def test_everybody_else_is_served(demo_model: Path) -> None:
    run_soak(demo_model, float(os.environ.get("KVARTO_SOAK_S", "300")))
