"""Adapters over HTTP: who may load them, how they are listed and called, and what the metrics say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvarto.server.config import ServerConfig
from tests.engine.fake_engine import token_at
from tests.server.running import Running, running

ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(server=ServerConfig(port=0, admin_key=("secret",))) as up:
        yield up


async def load(server: Running, name: str, path: str = "/adapters/x") -> int:
    body = {"lora_name": name, "lora_path": path}
    return (await server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)).status_code


async def test_an_adapter_is_loaded_listed_called_by_name_and_unloaded(server: Running) -> None:
    assert await load(server, "math") == 200
    cards = (await server.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["org/fake", "math"]
    assert cards[1]["parent"] == "org/fake"
    assert (cards[1]["root"], cards[1]["rank"], cards[1]["tier"]) == ("x", 8, "disk")
    assert (await server.http.get("/v1/models/math")).json() == cards[1]
    answer = (await server.post("/v1/completions", {"model": "math", "prompt": [5], "seed": 7, "max_tokens": 4})).json()
    assert answer["model"] == "math"
    assert answer["choices"][0]["text"] == bytes(token_at((5,), 7, 0, position) for position in range(4)).decode()
    gone = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "math"}, headers=ADMIN)
    assert gone.status_code == 200
    refused = await server.post("/v1/completions", {"model": "math", "prompt": [5]})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


async def test_only_an_admin_may_load_and_only_where_there_is_one(server: Running) -> None:
    body = {"lora_name": "a", "lora_path": "/adapters/a"}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await server.http.post(path, json=body, headers=headers)).status_code == 401
    async with running() as plain:
        assert (await plain.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)).status_code == 403
    async with running(server=ServerConfig(port=0, admin_key=("secret",), api_key=("user",))) as both:
        assert await load(both, "a") == 200
        user = {"authorization": "Bearer user"}
        assert (await both.http.post("/v1/load_lora_adapter", json=body, headers=user)).status_code == 401
        assert (await both.http.get("/v1/models", headers=user)).status_code == 200
        assert (await both.http.get("/v1/models")).status_code == 401


async def test_what_cannot_be_loaded_is_a_4xx_with_the_reason(server: Running) -> None:
    for body, status in (
        ({"lora_name": "a", "lora_path": "/missing"}, 400),
        ({"lora_name": "", "lora_path": "/adapters/a"}, 400),
        ({"lora_name": "a,b", "lora_path": "/adapters/a"}, 400),
        ({"lora_name": "org/fake", "lora_path": "/adapters/a"}, 400),
        ({"lora_name": "a"}, 400),
        ({"lora_name": 7, "lora_path": "/adapters/a"}, 400),
    ):
        answer = await server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert answer.status_code == status, body
        assert answer.json()["error"]["message"]
    unknown = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=ADMIN)
    assert unknown.status_code == 404


async def test_a_flood_of_one_adapter_is_answered_429_and_others_are_served() -> None:
    async with running("fake?step_s=0.01", server=ServerConfig(port=0, admin_key=("secret",)),
                       max_requests_per_adapter=2) as up:  # fmt: skip
        for name in ("hot", "cold"):
            assert await load(up, name) == 200
        body = {"prompt": [5], "max_tokens": 20, "seed": 7}
        asked = [up.post("/v1/completions", {**body, "model": name}) for name in ["hot"] * 6 + ["cold", "org/fake"]]
        answers = await asyncio.gather(*asked)
        statuses = [answer.status_code for answer in answers]
        assert sorted(statuses[:6]) == [200, 200, 429, 429, 429, 429]
        assert statuses[6:] == [200, 200]
        refused = answers[statuses.index(429)]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("adapter_queue_full", "model")
        metrics = (await up.http.get("/metrics")).text
        assert 'kvarto:requests_refused_total{code="adapter_queue_full"} 4.0' in metrics
        assert 'kvarto:requests_refused_total{code="queue_full"} 0.0' in metrics


async def test_a_name_that_nothing_has_is_answered_with_near_ones(server: Running) -> None:
    await load(server, "mathematics")
    answer = await server.post("/v1/completions", {"model": "mathematic", "prompt": [5]})
    assert answer.status_code == 404
    assert "`mathematics`" in answer.json()["error"]["message"]


async def test_metrics_name_adapters_in_one_series_whatever_their_number(server: Running) -> None:
    for index in range(40):
        assert await load(server, f"a{index}") == 200
    lines = (await server.http.get("/metrics")).text.splitlines()
    assert len([line for line in lines if line.startswith("vllm:lora_requests_info{")]) == 1
    assert not any("a17" in line for line in lines if not line.startswith("vllm:lora_requests_info"))
    for name in ("kvarto:adapter_bytes", "kvarto:adapters", "kvarto:adapter_loads_total"):
        assert any(line.startswith(name) for line in lines), name
