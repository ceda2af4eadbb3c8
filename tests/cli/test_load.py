"""The load generator asks for exactly the workload, never more at once than allowed, and adds up what it heard."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from kvarto.cli.bench_serve import LoadFlags, bench_serve
from kvarto.cli.load.report import report
from kvarto.cli.load.run import Answer, LoadSettings, find_vocabulary, run_load
from kvarto.cli.load.workload import LengthRange, PromptIds, Workload, random_workload, trace_workload
from kvarto.cli.openai_client import OpenAIClient, ServerRefused
from kvarto.core.errors import UsageError
from tests.cli.fake_server import VOCABULARY, FakeServer, serving
from tests.traces import mooncake_excerpt


async def load(server: FakeServer, workload: Workload, concurrency: int | None) -> tuple[list[Answer], float]:
    async with serving(server) as url, OpenAIClient(url) as client:
        prompts = PromptIds(await find_vocabulary(client, "fake-model"), seed=1)
        return await run_load(client, workload, prompts, LoadSettings("fake-model", concurrency))


async def test_every_request_is_sent_once_with_the_lengths_asked_for() -> None:
    server = FakeServer()
    workload = random_workload(40, LengthRange(20, 0.5), LengthRange(6, 0.5), None, seed=3)
    answers, _ = await load(server, workload, 4)
    asked = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)
    wanted = zip(workload.num_prompt_tokens.tolist(), workload.num_output_tokens.tolist(), strict=True)
    assert asked == sorted(wanted)
    assert all(body["ignore_eos"] and set(body["prompt"]) <= set(VOCABULARY) for body in server.bodies)
    assert [answer.num_output_tokens for answer in answers] == workload.num_output_tokens.tolist()
    assert [len(answer.token_s) for answer in answers] == workload.num_output_tokens.tolist()
    assert all(answer.num_cached_tokens == answer.num_prompt_tokens // 2 for answer in answers)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_no_more_requests_are_in_flight_than_allowed(concurrency: int) -> None:
    server = FakeServer(delay_s=0.005)
    await load(server, random_workload(24, LengthRange(4), LengthRange(3), None, seed=0), concurrency)
    assert server.peak_in_flight == concurrency


async def test_an_open_load_does_not_wait_for_answers() -> None:
    server = FakeServer(delay_s=0.05)
    workload = random_workload(20, LengthRange(4), LengthRange(4), rate=400, seed=0)
    await load(server, workload, None)
    assert server.peak_in_flight > 10


async def test_a_failed_request_is_counted_and_hurts_no_other() -> None:
    server = FakeServer(fail_every=4)
    answers, duration_s = await load(server, random_workload(20, LengthRange(4), LengthRange(3), None, seed=0), 2)
    result = report(answers, duration_s)
    assert (result.num_requests, result.num_failed) == (20, 5)
    assert result.errors == {"500: the cat sat on it": 5}
    assert result.num_output_tokens == 15 * 3


async def test_a_stream_that_is_cut_short_is_an_error() -> None:
    workload = random_workload(3, LengthRange(4), LengthRange(5), None, seed=0)
    answers, _ = await load(FakeServer(cut_after=2), workload, 1)
    assert all(answer.error is not None and "[DONE]" in answer.error for answer in answers)


async def test_a_server_that_is_not_there_is_named() -> None:
    async with OpenAIClient("http://127.0.0.1:9") as client:
        with pytest.raises(UsageError, match=r"127\.0\.0\.1:9"):
            await client.models()


async def test_an_unknown_path_is_the_server_s_refusal() -> None:
    async with serving(FakeServer()) as url, OpenAIClient(url) as client:
        with pytest.raises(ServerRefused, match="404"):
            await client.get("/nothing/here")


def test_poisson_arrivals_have_the_rate_and_the_spread_of_an_exponential() -> None:
    arrival_s = random_workload(20_000, LengthRange(1), LengthRange(1), rate=50, seed=5).arrival_s
    assert arrival_s is not None
    gaps = np.diff(arrival_s)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)


def test_lengths_stay_in_their_range_and_reach_its_ends() -> None:
    lengths = LengthRange(10, 0.3).draw(2000, np.random.default_rng(0))
    assert set(lengths.tolist()) == set(range(7, 14))
    assert set(LengthRange(1, 1.0).draw(100, np.random.default_rng(0)).tolist()) == {1, 2}


def test_equal_blocks_of_a_trace_become_equal_tokens() -> None:
    trace = mooncake_excerpt()
    workload = trace_workload(trace, rate_scale=10, max_tokens=6000)
    assert 0 < len(workload) < len(trace)
    assert workload.arrival_s is not None
    assert workload.arrival_s[0] == 0
    assert workload.block_ids is not None
    assert int((workload.num_prompt_tokens + workload.num_output_tokens).max()) <= 6000
    prompts = PromptIds(VOCABULARY, seed=2)
    texts = [prompts.prompt(workload, request) for request in range(len(workload))]
    assert [len(text) for text in texts] == workload.num_prompt_tokens.tolist()
    by_block: dict[int, list[int]] = {}
    for text, ids in zip(texts, workload.block_ids, strict=True):
        for index, block_id in enumerate(ids.tolist()):
            block = text[index * 512 : (index + 1) * 512]
            known = by_block.setdefault(block_id, block)
            assert known[: len(block)] == block[: len(known)]
    assert len({tuple(block) for block in by_block.values()}) == len(by_block)


def test_figures_are_those_of_known_times() -> None:
    answers = [
        Answer(10, sent_s=float(i), token_s=[i + 0.1 * (i + 1), i + 0.1 * (i + 1) + 0.02], num_output_tokens=2)
        for i in range(10)
    ]
    answers.append(Answer(10, error="lost"))
    result = report(answers, duration_s=5.0)
    assert result.time_to_first_token is not None
    assert result.time_to_first_token.mean_ms == pytest.approx(550)
    assert result.time_to_first_token.percentiles_ms["p50"] == pytest.approx(550)
    assert result.inter_token_latency is not None
    assert result.inter_token_latency.percentiles_ms["p99"] == pytest.approx(20)
    assert result.time_per_output_token is not None
    assert result.time_per_output_token.mean_ms == pytest.approx(20)
    assert (result.requests_per_s, result.output_tokens_per_s, result.num_failed) == (2.0, 4.0, 1)


def test_nothing_answered_is_a_report_without_times() -> None:
    result = report([Answer(1, error="lost")], 1.0)
    assert result.time_to_first_token is None
    assert result.end_to_end is None


def test_the_command_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> int:
        async with serving(FakeServer()) as url:
            flags = LoadFlags(url=url, num_prompts=5, input_len=7, output_len=3, json=tmp_path / "out.json")
            return await asyncio.to_thread(bench_serve, flags=flags)

    assert asyncio.run(run()) == 0
    assert "5 of 5 requests answered" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["num_requests"], written["num_prompt_tokens"], written["num_output_tokens"]) == (5, 35, 15)
