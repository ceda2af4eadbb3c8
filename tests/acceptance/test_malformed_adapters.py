"""Five hundred broken adapters at a real server: each is answered 4xx with the reason, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvarto.adapters.targets import BaseTargets, targets_of
from kvarto.core.dtype import DType
from kvarto.engine.config import EngineConfig
from kvarto.models.model import open_model
from kvarto.server.config import ServerConfig
from tests.acceptance.prompts import varied_prompts
from tests.acceptance.serving import served
from tests.adapters.malformed import BREAKS
from tests.adapters.writer import write_adapter

NUM_BROKEN = 500
ADMIN = {"authorization": "Bearer secret"}
DEAR = ("too many tensors", "config long")
"""Breaks that take seconds to write: once each."""


def broken_folders(root: Path, base: BaseTargets) -> Iterator[tuple[str, Path]]:
    """A name for people and a folder, without end."""
    seed = 0
    while True:
        for kind, (broken, _) in BREAKS.items():
            if seed and kind in DEAR:
                continue
            written = write_adapter(root / f"{len(kind)}-{seed}-{random.Random(kind).getrandbits(32):08x}", base)
            broken(random.Random(seed), written)
            yield kind, written.folder
        seed += 1


async def answer_all(session: aiohttp.ClientSession, prompts: list[str]) -> list[str]:
    async def one(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return str((await answer.json())["choices"][0]["text"])

    return list(await asyncio.gather(*map(one, prompts)))


async def load_broken(session: aiohttp.ClientSession, root: Path, base: BaseTargets) -> Counter[int]:
    statuses: Counter[int] = Counter()
    for index, (kind, folder) in enumerate(broken_folders(root, base)):
        if index == NUM_BROKEN:
            return statuses
        body = {"lora_name": f"broken-{index}", "lora_path": str(folder)}
        async with session.post("/v1/load_lora_adapter", json=body, headers=ADMIN) as answer:
            message = (await answer.json(content_type=None))["error"]["message"] if answer.status != 200 else ""
            statuses[answer.status] += 1
            assert 400 <= answer.status < 500, f"{kind} in {folder}: {answer.status} {message}"
            assert len(message) > 20, f"{kind}: {message}"
    raise AssertionError("without end")


@pytest.mark.heavy
def test_each_is_refused_and_running_requests_go_on(demo_model: Path, tmp_path: Path) -> None:
    model = open_model(demo_model, DType.F32)
    base = targets_of(model.program)
    model.close()
    root = tmp_path / "adapters"
    good = write_adapter(root / "good", base)
    engine = EngineConfig(
        model=str(demo_model), max_model_len=2048, lora_modules=(f"good={good.folder}",), adapter_dir=(str(root),)
    )

    async def run(url: str) -> None:
        prompts = varied_prompts(12, seed=5)
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=600)) as session:
            alone = await answer_all(session, prompts)
            loading = asyncio.create_task(load_broken(session, root, base))
            while not loading.done():
                assert await answer_all(session, prompts) == alone
            statuses = await loading
            assert sum(statuses.values()) == NUM_BROKEN
            print(dict(statuses))
            async with session.get("/v1/models") as answer:
                names = {card["id"] for card in (await answer.json())["data"]}
            assert not any(name.startswith("broken-") for name in names)

    with served(engine, ServerConfig(admin_key=("secret",))) as server:
        asyncio.run(run(server.url))
