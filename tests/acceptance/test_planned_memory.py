"""The peak memory of server and engine is what the plan says, plus an overhead that is measured once.

The overhead (interpreters, libraries, the model's tokenizer, PyTorch's own threads) is taken from one small start of
each model and backend and then left alone. Every random configuration after it must stay within 2 % of plan + overhead,
at start and under load, or be refused before loading. `KVARTO_MEMORY_CONFIGS` sets their number.

What the native engine takes after its plan is made is compared with the plan alone: nothing is left out there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvarto.core.units import MIB, format_bytes
from kvarto.engine.config import EngineConfig
from tests.acceptance.engine_memory import EngineMemory
from tests.acceptance.prompts import varied_prompts
from tests.acceptance.serving import Served, peak_bytes, served

TOLERANCE = 0.02
NUM_REQUESTS = 16
REFUSALS = ("BudgetTooSmall", "UsageError")
LOADING = "read weights"
"""The phase in which memory is taken."""
DTYPES = {"reference": ("f32", "f32", "bf16", "f16"), "native": ("auto", "auto", "f32", "bf16")}
KV_DTYPES = {"reference": ("f32", "bf16", "f16"), "native": ("auto", "f32", "bf16", "int8")}
"""By backend."""


def printed_sizes(server: Served) -> dict[str, int]:
    """Bytes by name, from the table that the server printed."""
    rows = re.findall(r"^(arena|host|records|process)\b.* ([\d,]+)  ", server.log.read_text(), re.M)
    return {name: int(size.replace(",", "")) for name, size in rows}


def planned_bytes(server: Served) -> int:
    """Arena, bookkeeping, and records of the pages that are in use now, from the table that the server printed."""
    sizes = printed_sizes(server)
    pages = {state: server.metric("kvarto:pages", state=state) for state in ("free", "held", "evictable", "draining")}
    share_in_use = 1 - pages["free"] / sum(pages.values())
    return sizes["arena"] + sizes["host"] + int(sizes["records"] * share_in_use)


def wait_until_backed(server: Served, planned: int, *, limit_s: float = 60) -> None:
    """The background touches the arena after the start: until resident memory no longer grows."""
    last, deadline = 0, time.monotonic() + limit_s
    while time.monotonic() < deadline:
        now = peak_bytes(server.processes)
        if now - last < MIB and now > planned:
            return
        last = now
        time.sleep(1.0)


async def load(server: Served, num_requests: int, max_len: int, seed: int) -> int:
    """A burst of requests of all lengths; returns how many were answered."""
    rng = random.Random(seed)
    prompts = varied_prompts(num_requests, seed)

    async def one(session: aiohttp.ClientSession, prompt: str) -> bool:
        body = {
            "prompt": prompt[: max_len * 2],
            "max_tokens": rng.randrange(1, 8),
            "temperature": rng.choice((0, 1)),
            "n": rng.choice((1, 2)),
            "logprobs": rng.choice((None, 5)),
            "truncate_prompt_tokens": max_len - 16,
        }
        async with session.post("/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status == 200

    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=300)) as session:
        return sum(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))


def random_config(rng: random.Random, model: Path, backend: str) -> EngineConfig:
    """Anything that a user may ask for; some of it cannot work."""
    memory = rng.choice(("device_memory", "device_memory", "kv_cache_memory_bytes", None))
    size = int(MIB * 2 ** rng.uniform(6, 11.2))
    return EngineConfig(
        model=str(model),
        backend=backend,
        block_size=rng.choice((8, 16, 32, 64, 128, 256)),
        max_model_len=rng.choice((256, 512, 1024, 2048, 4096)),
        max_num_seqs=rng.choice((1, 4, 16, 32, 64)),
        max_num_batched_tokens=rng.choice((64, 128, 512, 1024)),
        dtype=rng.choice(DTYPES[backend]),
        kv_cache_dtype=rng.choice(KV_DTYPES[backend]),
        enable_prefix_caching=rng.random() < 0.8,
        prefault=rng.random() < 0.5,
        **({} if memory is None else {memory: size}),
    )


@dataclass(frozen=True)
class Measured:
    """Bytes that were planned, and the peak of server and engine, after the start and under load."""

    planned_start: int
    start: int
    planned_load: int
    load: int

    def errors(self, overhead: int) -> tuple[float, float]:
        """How far the peaks are from plan + overhead, as shares of it."""
        pairs = ((self.planned_start, self.start), (self.planned_load, self.load))
        start, load = ((peak - planned - overhead) / (planned + overhead) for planned, peak in pairs)
        return start, load


def measure(config: EngineConfig, seed: int) -> Measured | str:
    """Start, wait, load; or the refusal."""
    try:
        with served(config) as server:
            planned = planned_bytes(server)
            wait_until_backed(server, planned)
            start = peak_bytes(server.processes)
            answered = asyncio.run(load(server, NUM_REQUESTS, config.max_model_len or 512, seed))
            assert answered == NUM_REQUESTS, f"only {answered} were answered:\n{server.log.read_text()}"
            return Measured(planned, start, planned_bytes(server), peak_bytes(server.processes))
    except AssertionError as error:
        if not any(name in str(error) for name in REFUSALS):
            raise
        return str(error)


def overhead_of(model: Path, backend: str) -> int:
    """What server and engine take beside the plan, from the smallest start."""
    config = EngineConfig(
        model=str(model), backend=backend, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64
    )
    result = measure(config, 0)
    assert not isinstance(result, str), result
    return result.load - result.planned_load


def configurations(models: list[Path], backend: str, count: int) -> Iterator[EngineConfig]:
    rng = random.Random(5)
    for _ in range(count):
        yield random_config(rng, rng.choice(models), backend)


@pytest.fixture(scope="module")
def models(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo model, and two random ones of other shapes: full attention, and windows in layer groups."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model.parent, gguf_file=demo_model.name)
    shared = {"vocab_size": 49152, "num_attention_heads": 8, "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2}
    llama = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_key_value_heads=8, **shared
    )
    gemma = transformers.Gemma3TextConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_key_value_heads=2,
        sliding_window=128,
        **shared,
    )
    folders = []
    for config in (llama, gemma):
        folder = tmp_path_factory.mktemp(config.model_type)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    return [demo_model, *folders]


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_peak_memory_is_what_was_planned(models: list[Path], backend: str) -> None:
    overheads = {str(model): overhead_of(model, backend) for model in models}
    print("\noverheads", *(format_bytes(overhead) for overhead in overheads.values()))
    worst, refused = 0.0, 0
    count = int(os.environ.get("KVARTO_MEMORY_CONFIGS", "100"))
    failures = []
    for index, config in enumerate(configurations(models, backend, count)):
        result = measure(config, index)
        if isinstance(result, str):
            assert LOADING not in result, f"refused after loading had begun:\n{result}"
            refused += 1
            continue
        errors = result.errors(overheads[config.model])
        worst = max(worst, *map(abs, errors))
        line = f"{index}: plan {format_bytes(result.planned_load)}, start {errors[0]:+.2%}, load {errors[1]:+.2%}"
        print(line, flush=True)
        if max(map(abs, errors)) > TOLERANCE:
            failures.append(f"{line} {msgspec.json.encode(config).decode()}")
    print(f"{count} configurations, {refused} refused, worst error {worst:.2%}")
    assert not failures, "\n".join(failures)


def engine_memory(config: EngineConfig) -> EngineMemory:
    """Of an engine in a fresh process, which serves a load that fills its pages."""
    command = [sys.executable, "-m", "tests.acceptance.engine_memory", msgspec.json.encode(config).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return EngineMemory(**json.loads(done.stdout.splitlines()[-1]))


MEMORY_CONFIGS = (
    {"device_memory": 160 * MIB},
    {"device_memory": 256 * MIB, "block_size": 8, "threads": 2},
    {"device_memory": 256 * MIB, "activations": "f32", "kv_cache_dtype": "int8"},
    {"device_memory": 512 * MIB, "max_model_len": 4096},
    {"device_memory": 1024 * MIB, "max_num_seqs": 64},
)


def native_config(model: Path, **settings: object) -> EngineConfig:
    config = EngineConfig(model=str(model), backend="native", threads=1, max_model_len=2048, prefault=True)
    return msgspec.structs.replace(config, **settings)


@pytest.mark.heavy
@pytest.mark.parametrize("settings", MEMORY_CONFIGS, ids=str)
def test_a_native_engine_takes_what_its_plan_says(demo_model: Path, settings: dict[str, object]) -> None:
    memory = engine_memory(native_config(demo_model, **settings))
    error = memory.taken / memory.planned - 1
    print(f"\nplan {format_bytes(memory.planned)}, taken {format_bytes(memory.taken)}, {error:+.2%}; {memory}")
    assert abs(error) <= TOLERANCE


@pytest.mark.heavy
@pytest.mark.parametrize("device_memory", [160 * MIB, 512 * MIB])
def test_the_printed_rows_add_up_to_the_engine_process(demo_model: Path, device_memory: int) -> None:
    with served(native_config(demo_model, device_memory=device_memory)) as server:
        asyncio.run(load(server, NUM_REQUESTS, 2048, seed=3))
        planned = planned_bytes(server) + printed_sizes(server)["process"]
        assert server.engine is not None
        peak = peak_bytes([server.engine])
    error = peak / planned - 1
    print(f"\nrows {format_bytes(planned)}, peak {format_bytes(peak)}, {error:+.2%}")
    assert abs(error) <= TOLERANCE
