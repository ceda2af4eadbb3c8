"""Adapters in a real server: its own engine process, real files, the native backend, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvarto.adapters.targets import BaseTargets, targets_of
from kvarto.engine.assemble import open_program
from kvarto.engine.config import EngineConfig
from kvarto.engine.settings import open_backend
from kvarto.server.config import ServerConfig
from tests.adapters.writer import ALL_LINEAR, QV, Options, write_adapter
from tests.server.process import Serving, serving
from tests.server.tiny_model import write_tiny_model

ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def base(place: Path) -> BaseTargets:
    config = EngineConfig(model=str(write_tiny_model(place / "tiny")))
    files, program = open_program(config, open_backend(config))
    files.close()
    return targets_of(program)


@pytest.fixture(scope="module")
def up(place: Path, base: BaseTargets) -> Iterator[Serving]:
    for seed, name in enumerate(("red", "blue")):
        write_adapter(place / "adapters" / name, base, Options(rank=4, modules=QV, seed=seed))
    write_adapter(place / "outside", base, Options(modules=QV))
    engine = EngineConfig(
        model=str(place / "tiny"),
        threads=1,
        max_num_seqs=4,
        max_model_len=256,
        adapter_dir=(str(place / "adapters"),),
        max_lora_rank=16,
        adapter_host_memory=1 << 20,
    )
    with serving(place, engine, ServerConfig(port=0, admin_key=("secret",))) as up:
        yield up


@pytest.fixture
def http(up: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=up.url, timeout=120, headers=ADMIN) as client:
        yield client


def text(http: httpx.Client, model: str, prompt: str = "Once upon a time") -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_adapters_of_a_folder_are_models(http: httpx.Client) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert {"tiny", "red", "blue"} <= set(cards)
    texts = {name: text(http, name) for name in ("tiny", "red", "blue")}
    assert len(set(texts.values())) == 3
    red = http.get("/v1/models/red").json()
    assert (red["parent"], red["tier"], red["rank"]) == ("tiny", "device", 4)
    metrics = http.get("/metrics").text
    assert 'running_lora_adapters="blue,red"' in metrics or 'running_lora_adapters="red,blue"' in metrics
    assert 'kvarto:pool_bytes{kind="pages_adapter",tier="device"}' in metrics


def test_loading_replacing_and_unloading_at_run_time(http: httpx.Client, place: Path, base: BaseTargets) -> None:
    path = write_adapter(place / "adapters" / "green", base, Options(rank=3, modules=ALL_LINEAR, seed=7)).folder
    body = {"lora_name": "green", "lora_path": str(path)}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    before = text(http, "green")
    write_adapter(path, base, Options(rank=5, modules=ALL_LINEAR, seed=8))
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert text(http, "green") != before
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "green"}).status_code == 200
    refused = http.post("/v1/completions", json={"model": "green", "prompt": "a"})
    assert refused.status_code == 404


def test_what_lies_outside_or_is_broken_is_a_400_and_nobody_else_notices(
    http: httpx.Client, place: Path, base: BaseTargets
) -> None:
    expected = text(http, "red")
    link = place / "adapters" / "link"
    link.symlink_to(place / "outside")
    broken = write_adapter(place / "adapters" / "broken", base, Options(modules=QV)).folder
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    large = write_adapter(place / "adapters" / "large", base, Options(rank=17, modules=QV)).folder
    for path in (link, broken, large, place / "outside", place / "nowhere"):
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(path)})
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["code"] == "adapter_refused"
    assert text(http, "red") == expected


def test_a_fresh_engine_serves_the_same_adapters(up: Serving, http: httpx.Client, place: Path) -> None:
    body = {"lora_name": "alias", "lora_path": str(place / "adapters" / "red")}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    expected = text(http, "red")
    (engine,) = up.engine_pids()
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while engine in up.engine_pids() or http.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert text(http, "red") == expected
    assert text(http, "alias") == expected


def test_an_answer_that_had_begun_goes_on_with_its_adapter_in_a_fresh_engine(up: Serving, http: httpx.Client) -> None:
    """The digest of what it began with was made by the engine before: both have the server's secret."""
    body = {"model": "red", "prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    (engine,) = up.engine_pids()
    pieces: list[str] = []
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not pieces:
                os.kill(engine, signal.SIGKILL)
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(pieces) == expected
    assert up.engine_pids() != [engine]
