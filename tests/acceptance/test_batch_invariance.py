"""A request's tokens and log-probabilities are the same bits whatever happens around it.

Every request runs alone first, on an engine without a prefix cache. Then all run together: in batches, with other page
sizes and chunk sizes, with a cold and a warm prefix cache, preempted for want of pages, and with engines killed under
them. Nothing may differ, not by one bit.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvarto.core.dtype import DType
from kvarto.core.sampling import SamplingParams
from kvarto.engine.client import EngineClient
from kvarto.engine.config import EngineConfig
from kvarto.engine.messages import StepOut, TokenLogprobs
from kvarto.models.model import Model, open_model
from tests.acceptance.prompts import varied_prompts

MAX_MODEL_LEN = 320
SMALL_POOL_TOKENS = 960
"""Room for three of the longest sequences, where sixteen want to run."""

TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""KV of one token of the demo model in f32."""

Signature = tuple[tuple[object, ...], ...]
"""For each choice: its tokens, their log-probabilities with alternatives, and how it ended."""


@dataclass(frozen=True)
class Prompt:
    """One request of the experiment."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass
class Watched:
    """What a run went through, so that the test can assert that it was worth running."""

    batch_sizes: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_restarts: int = 0
    hit_tokens: int = 0

    @property
    def num_mixed_steps(self) -> int:
        """Steps that held at least eight requests."""
        return sum(size >= 8 for size in self.batch_sizes)


class WatchedClient(EngineClient):
    """Notes how many requests each step holds."""

    watched: Watched

    def _take_step(self, step: StepOut) -> None:
        if step.running:
            self.watched.batch_sizes.append(len(step.running))
        super()._take_step(step)


def sampling_for(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Half greedy, half with one of everything that sampling offers."""
    num_choices = rng.choice((1, 1, 1, 2))
    common = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": rng.choice((0, 2)), "n": num_choices}
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, **common)
    return SamplingParams(
        temperature=rng.choice((0.5, 1.0, 1.5)),
        top_k=rng.choice((0, 5, 50)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        seed=rng.getrandbits(62),
        **common,
    )


def make_prompts(model: Model, count: int, max_tokens: int, seed: int) -> list[Prompt]:
    """Varied prompts, a third of which begin alike."""
    rng = random.Random(seed)
    prefix = model.tokenizer.encode(" ".join(varied_prompts(18, seed)[-2:]), add_special_tokens=False)[:100]
    prompts = []
    for text in varied_prompts(count, seed):
        token_ids = model.tokenizer.encode(text, add_special_tokens=False)
        if rng.random() < 0.34:
            token_ids = prefix + token_ids
        limit = MAX_MODEL_LEN - max_tokens
        prompts.append(Prompt(tuple(token_ids[:limit]), sampling_for(rng, max_tokens)))
    return prompts


async def finish(client: EngineClient, prompt: Prompt, priority: int = 0) -> Signature:
    """Run one request to its end."""
    tokens: list[list[int]] = [[] for _ in range(prompt.sampling.n)]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(prompt.sampling.n)]
    endings: list[str | None] = [None] * prompt.sampling.n
    async with client.submit([prompt.token_ids], prompt.sampling, priority=priority) as generation:
        async for output in generation:
            tokens[output.choice] += output.token_ids
            logprobs[output.choice] += output.logprobs or ()
            endings[output.choice] = output.finish_reason
    assert all(len(a) == len(b) == prompt.sampling.max_tokens for a, b in zip(tokens, logprobs, strict=True))
    return tuple((*a, *b, ending) for a, b, ending in zip(tokens, logprobs, endings, strict=True))


async def run_alone(client: EngineClient, prompts: list[Prompt]) -> list[Signature]:
    return [await finish(client, prompt) for prompt in prompts]


async def run_together(
    client: EngineClient, prompts: list[Prompt], seed: int, *, has_priorities: bool
) -> list[Signature]:
    """All at once, in random order, most of them soon and some later; with priorities, better ones come later."""
    rng = random.Random(seed)

    async def late(prompt: Prompt, place: int) -> Signature:
        if has_priorities:
            await asyncio.sleep(place * 0.2)
            return await finish(client, prompt, -place)
        await asyncio.sleep(place * rng.choice((0.0, 0.0, 0.02)))
        return await finish(client, prompt)

    places = rng.sample(range(len(prompts)), len(prompts))
    return list(await asyncio.gather(*(late(prompt, place) for prompt, place in zip(prompts, places, strict=True))))


async def kill_engines(client: EngineClient, times: int) -> None:
    """SIGKILL the engine in the middle of its work, several times."""
    for _ in range(times):
        started = client.num_restarts
        while client.state.value != "running" or client.num_open == 0:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        if client.engine_pid is not None and client.num_open:
            os.kill(client.engine_pid, signal.SIGKILL)
        while client.num_restarts == started and client.num_open:
            await asyncio.sleep(0.05)


def experiment(
    model: Model, config: EngineConfig, prompts: list[Prompt], *, alone: bool = False, rounds: int = 1, kills: int = 0
) -> tuple[list[list[Signature]], Watched]:
    """Start a server-side client with a real engine process, run the prompts `rounds` times, close."""

    async def main() -> tuple[list[list[Signature]], Watched]:
        client = WatchedClient(config, model.tokenizer, eos_token_ids=model.eos_token_ids)
        client.watched = Watched()
        await client.start()
        try:
            killer = asyncio.create_task(kill_engines(client, kills))
            results = []
            has_priorities = config.scheduling_policy == "priority"
            for seed in range(rounds):
                if alone:
                    results.append(await run_alone(client, prompts))
                else:
                    results.append(await run_together(client, prompts, seed, has_priorities=has_priorities))
            await killer
            stats = await client.stats(timeout_s=5.0)
        finally:
            await client.close()
        client.watched.num_preemptions = stats.num_preemptions
        client.watched.num_restarts = client.num_restarts
        client.watched.hit_tokens = stats.prefix_hits_tokens
        return results, client.watched

    return asyncio.run(main())


@dataclass(frozen=True)
class Bench:
    """The model, its prompts, and what each of them yields alone."""

    model: Model
    config: EngineConfig
    prompts: list[Prompt]
    alone: list[Signature]

    def run(self, *, rounds: int = 1, kills: int = 0, **changes: object) -> Watched:
        """Run all together under other settings, and compare every bit."""
        config = msgspec.structs.replace(self.config, **changes)
        results, watched = experiment(self.model, config, self.prompts, rounds=rounds, kills=kills)
        for result in results:
            wrong = [index for index, (a, b) in enumerate(zip(self.alone, result, strict=True)) if a != b]
            assert not wrong, f"{len(wrong)} of {len(self.prompts)} requests differ, first {wrong[:5]}, under {changes}"
        return watched


def make_bench(demo_model: Path, count: int, max_tokens: int) -> Bench:
    model = open_model(demo_model, DType.F32)
    prompts = make_prompts(model, count, max_tokens, seed=7)
    config = EngineConfig(model=str(demo_model), max_model_len=MAX_MODEL_LEN, max_num_seqs=16, seed=1)
    alone_config = msgspec.structs.replace(config, enable_prefix_caching=False, max_num_seqs=4)
    (alone,), watched = experiment(model, alone_config, prompts, alone=True)
    assert max(watched.batch_sizes) == 1
    return Bench(model, config, prompts, alone)


def report(what: str, bench: Bench, watched: Watched) -> None:
    """A line for `pytest -s`."""
    steps = f"{watched.num_mixed_steps} of {len(watched.batch_sizes)} steps held 8 or more"
    events = f"{watched.num_preemptions} preemptions, {watched.num_restarts} restarts, {watched.hit_tokens} hits"
    print(f"\n{what}: {len(bench.prompts)} requests, the same bits; {steps}; {events}", flush=True)


def test_a_few_requests(demo_model: Path) -> None:
    bench = make_bench(demo_model, count=20, max_tokens=6)
    watched = bench.run(block_size=32, max_num_batched_tokens=200, rounds=2)
    assert watched.num_mixed_steps >= 4
    assert watched.hit_tokens > 0


@pytest.fixture(scope="module")
def two_hundred(demo_model: Path) -> Bench:
    """200 requests, and what each yields alone: minutes."""
    return make_bench(demo_model, count=200, max_tokens=8)


@pytest.mark.heavy
def test_preempted(two_hundred: Bench) -> None:
    """Better requests keep coming, and there is room for few."""
    watched = two_hundred.run(
        block_size=8,
        max_num_batched_tokens=160,
        kv_cache_memory_bytes=SMALL_POOL_TOKENS * TOKEN_BYTES,
        scheduling_policy="priority",
    )
    report("preempted", two_hundred, watched)
    assert watched.num_preemptions >= 20


@pytest.mark.heavy
def test_engines_killed(two_hundred: Bench) -> None:
    watched = two_hundred.run(kills=2)
    report("killed", two_hundred, watched)
    assert watched.num_restarts == 2


@pytest.mark.heavy
def test_batched_cold_and_cached(two_hundred: Bench) -> None:
    watched = two_hundred.run(rounds=2)
    report("batched twice", two_hundred, watched)
    assert watched.num_mixed_steps >= 100
    assert watched.hit_tokens > 0, "the second round should find its prompts cached"


@pytest.mark.heavy
def test_small_chunks_and_large_pages(two_hundred: Bench) -> None:
    watched = two_hundred.run(block_size=64, max_num_batched_tokens=101, enable_prefix_caching=False)
    report("chunked", two_hundred, watched)
    assert watched.num_mixed_steps >= 50
