"""The client against a real process that speaks the real frames: engines die, readers see nothing of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvarto.core.errors import (
    AdapterRefused,
    BudgetTooSmall,
    ContextLengthExceeded,
    EngineDied,
    EngineError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnknownAdapter,
)
from kvarto.core.sampling import SamplingParams
from kvarto.engine.carried_errors import error_from, error_of, refused_by
from kvarto.engine.client import EngineClient
from kvarto.engine.config import EngineConfig, FaultPlan
from kvarto.engine.generation import Generation
from kvarto.engine.messages import Cancel, StepOut, ToEngine
from kvarto.engine.outputs import ChoiceOutput
from kvarto.engine.supervisor import State
from tests.engine.fake_engine import EOS, VOCAB_SIZE, token_at

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


class Bytes:
    """Token ids are bytes; EOS is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


@asynccontextmanager
async def client_of(model: str = "fake", **settings: object) -> AsyncIterator[EngineClient]:
    client_settings = {key: settings.pop(key) for key in ("silence_limit_s", "observer", "on_phase") if key in settings}
    config = EngineConfig(model=model, seed=1, **settings)  # type: ignore[arg-type]
    client = EngineClient(config, Bytes(), eos_token_ids=(EOS,), command=COMMAND, **client_settings)  # type: ignore[arg-type]
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def expected(prompt: tuple[int, ...], seed: int, choice: int, count: int) -> list[int]:
    return [token_at(prompt, seed, choice, position) for position in range(count)]


async def collect(generation: Generation) -> dict[tuple[int, int], list[ChoiceOutput]]:
    by_choice: dict[tuple[int, int], list[ChoiceOutput]] = {}
    async for output in generation:
        by_choice.setdefault((output.prompt_index, output.choice), []).append(output)
    return by_choice


def token_ids(outputs: list[ChoiceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_outputs_of_all_prompts_and_choices() -> None:
    phases: list[str] = []
    async with client_of("fake?eos_after=20", on_phase=phases.append) as client:
        prompts = [(5, 6), (7,)]
        outputs = await collect(client.submit(prompts, SamplingParams(n=2, seed=3, max_tokens=9, logprobs=1)))
        assert set(outputs) == {(0, 0), (0, 1), (1, 0), (1, 1)}
        for (prompt, choice), some in outputs.items():
            want = expected(prompts[prompt], 3, choice, 9)
            assert token_ids(some) == want
            assert "".join(output.text for output in some) == bytes(want).decode()
            assert [output.finish_reason for output in some] == [None] * 8 + ["length"]
            assert all(output.logprobs is not None and len(output.logprobs) == 1 for output in some)
        assert [some[0].num_cached_tokens for some in outputs.values()].count(3) == 2  # once for each prompt
        ended = (await collect(client.submit([(5, 6)], SamplingParams(seed=3))))[0, 0]
        assert token_ids(ended)[-1] == EOS
        assert (ended[-1].finish_reason, ended[-1].stop_reason, ended[-1].text) == ("stop", None, "")
    assert phases == ["find", "read"]


async def test_stop_string_ends_one_choice_and_the_others_go_on() -> None:
    async with client_of("fake?step_s=0.001") as client:
        whole = bytes(expected((5,), 3, 0, 40)).decode()
        stop = whole[10:13]
        end = whole.index(stop)
        outputs = await collect(client.submit([(5,)], SamplingParams(n=2, seed=3, max_tokens=40, stop=(stop,))))
        assert "".join(output.text for output in outputs[0, 0]) == whole[:end]
        assert (outputs[0, 0][-1].finish_reason, outputs[0, 0][-1].stop_reason) == ("stop", stop)
        assert len(token_ids(outputs[0, 0])) == end + 3
        assert token_ids(outputs[0, 1]) == expected((5,), 3, 1, 40)
        await until_engine_is_idle(client)


@pytest.mark.parametrize("stops", [False, True])
async def test_an_engine_hears_of_an_end_only_when_it_does_not_know(stops: bool) -> None:
    """It does not know of a stop string, whether other choices go on or not, unless the length is reached with it."""
    for position in (10, 30):
        stop = bytes(expected((5,), 3, 0, 40)).decode()[position : position + 4]
        async with client_of("fake?step_s=0.001") as client:
            cancels: list[Cancel] = []
            send = client._engine.send

            def spy(message: ToEngine, cancels: list[Cancel] = cancels, send: Any = send) -> None:
                cancels += [message] if isinstance(message, Cancel) else []
                send(message)

            client._engine.send = spy  # type: ignore[method-assign]
            for n, max_tokens in ((1, 40), (2, 40), (2, position + 4)):
                sampling = SamplingParams(n=n, seed=3, max_tokens=max_tokens, stop=(stop,) if stops else ())
                await collect(client.submit([(5,)], sampling))
            assert [cancel.choice for cancel in cancels] == ([None, 0] if stops else [])
            await until_engine_is_idle(client)


async def until_engine_is_idle(client: EngineClient) -> None:
    for _ in range(200):
        if (await client.stats()).num_running == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine still runs requests that nobody waits for")


async def test_cancel_reaches_the_engine() -> None:
    async with client_of("fake?step_s=0.002") as client:
        async with client.submit([(5,), (6,)], SamplingParams(max_tokens=4000)) as generation:
            assert await generation.batch()
        assert client.num_open == 0
        await until_engine_is_idle(client)


async def test_a_killed_engine_leaves_no_seam() -> None:
    """Ten requests, the engine killed again and again: every reader gets exactly the tokens of an undisturbed run."""
    sampling = SamplingParams(n=2, seed=11, max_tokens=120, stop=("never",))
    async with client_of("fake?step_s=0.002", max_num_seqs=8) as client:
        readers = [asyncio.create_task(collect(client.submit([(5, index)], sampling))) for index in range(10)]
        for _ in range(3):
            await asyncio.sleep(0.05)
            await until(lambda: client.state is State.RUNNING)
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)
            await until(lambda: client.state is not State.RUNNING)
        results = await asyncio.gather(*readers)
        assert client.num_restarts >= 2
    for index, outputs in enumerate(results):
        for choice in range(2):
            assert token_ids(outputs[0, choice]) == expected((5, index), 11, choice, 120)
            assert "".join(o.text for o in outputs[0, choice]) == bytes(expected((5, index), 11, choice, 120)).decode()
            assert [o.finish_reason for o in outputs[0, choice] if o.finish_reason] == ["length"]
            assert sum(o.num_cached_tokens is not None for o in outputs[0, 0] + outputs[0, 1]) == 1


async def test_an_operator_who_kills_again_and_again_makes_no_request_guilty() -> None:
    """Each engine is killed as soon as it serves, so the first request is in every step that dies."""
    async with client_of("fake?step_s=0.05") as client:
        reader = asyncio.create_task(collect(client.submit([(5,)], SamplingParams(seed=1, max_tokens=6))))
        for number in range(4):
            await until(lambda number=number: client.num_restarts == number and bool(client._in_step))  # type: ignore[misc]
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)
        assert token_ids((await reader)[0, 0]) == expected((5,), 1, 0, 6)


async def test_the_poison_fails_alone() -> None:
    poison = (66, 6)
    async with client_of("fake?step_s=0.002", faults=FaultPlan(abort_on_tokens=poison)) as client:
        innocent = [client.submit([(5, index)], SamplingParams(seed=1, max_tokens=60)) for index in range(6)]
        guilty = client.submit([(*poison, 1)], SamplingParams(seed=1, max_tokens=60))
        with pytest.raises(EngineDied, match="3 times"):
            await collect(guilty)
        for index, generation in enumerate(innocent):
            assert token_ids((await collect(generation))[0, 0]) == expected((5, index), 1, 0, 60)
        assert client.num_restarts == 3
        assert client.num_open == 0
        after = await collect(client.submit([(1,)], SamplingParams(seed=1, max_tokens=5)))
        assert len(token_ids(after[0, 0])) == 5


async def test_poison_in_every_prompt_of_a_submission_fails_it_once() -> None:
    poison = (66, 6)
    async with client_of("fake?step_s=0.002", faults=FaultPlan(abort_on_tokens=poison)) as client:
        with pytest.raises(EngineDied, match="3 times"):
            await collect(client.submit([poison, poison], SamplingParams(max_tokens=5)))
        assert client.num_open == 0
        await until(lambda: client.state is State.RUNNING)


async def test_an_engine_that_would_compute_other_tokens_does_not_go_on_with_begun_ones() -> None:
    async with client_of("fake?step_s=0.01&changes=1", max_num_seqs=1) as client:
        begun = client.submit([(5,)], SamplingParams(seed=1, max_tokens=400))
        await begun.batch()
        waiting = client.submit([(6,)], SamplingParams(seed=1, max_tokens=5))
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="changed from `fake-"):
            await collect(begun)
        assert token_ids((await collect(waiting))[0, 0]) == expected((6,), 1, 0, 5)


async def test_a_silent_engine_is_replaced() -> None:
    """Each engine stops itself at its step 3; the fresh one begins where the last ended."""
    async with client_of("fake?mute_after=3", silence_limit_s=0.6) as client:
        outputs = await collect(client.submit([(5,)], SamplingParams(seed=1, max_tokens=5)))
        assert token_ids(outputs[0, 0]) == expected((5,), 1, 0, 5)
        assert client.num_restarts == 1


async def test_an_engine_that_miscounts_its_tokens_is_not_believed() -> None:
    async with client_of("fake?step_s=0.01") as client:
        reader = asyncio.create_task(collect(client.submit([(5,)], SamplingParams(seed=1, max_tokens=9))))
        await until(lambda: bool(client._in_step))
        with pytest.raises(EngineDied, match="1 tokens of 2 requests"):
            client.take(StepOut(step=1, going_on=("a", "b"), next_token_ids=(1,)))
        assert token_ids((await reader)[0, 0]) == expected((5,), 1, 0, 9)


async def test_load_errors_come_as_what_they_are() -> None:
    client = EngineClient(EngineConfig(model="fake?fail=BudgetTooSmall:needs 3 GiB"), Bytes(), command=COMMAND)
    with pytest.raises(BudgetTooSmall, match="needs 3 GiB"):
        await client.start()
    await client.close()
    client = EngineClient(EngineConfig(model="x"), Bytes(), command=(sys.executable, "-c", "import sys; sys.exit(7)"))
    with pytest.raises(EngineDied, match="exit code 7"):
        await client.start()
    await client.close()


async def test_gives_up_when_fresh_engines_fail_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarto.engine.supervisor.MAX_FAILED_STARTS", 2)
    async with client_of("fake?step_s=0.01") as client:
        generation = client.submit([(5,)], SamplingParams(max_tokens=1000))
        await generation.batch()
        client._engine.command = (sys.executable, "-c", "import sys; sys.exit(7)")
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="could not be restarted"):
            await collect(generation)
        assert client.state is State.BROKEN
        assert not client.is_alive
        assert not client.can_admit
        with pytest.raises(Unavailable):
            client.submit([(5,)], SamplingParams())


async def test_refusals_at_the_door() -> None:
    async with client_of("fake?step_s=0.01&max_len=64", max_num_seqs=2, max_num_queued=3) as client:
        with pytest.raises(ContextLengthExceeded):
            client.submit([(1,) * 64], SamplingParams())
        with pytest.raises(InvalidRequest, match="scheduling-policy"):
            client.submit([(1,)], SamplingParams(), priority=1)
        with pytest.raises(InvalidRequest):
            client.submit([(1,), (VOCAB_SIZE,)], SamplingParams())
        for num_prompts in (0, 6):
            with pytest.raises(InvalidRequest, match=f"{num_prompts} prompts in one request; .* at most 5 fit at all"):
                client.submit([(5,)] * num_prompts, SamplingParams())
        assert client.num_open == 0
        running = [client.submit([(5,)], SamplingParams(max_tokens=50)) for _ in range(5)]
        assert not client.can_admit
        with pytest.raises(Overloaded) as refused:
            client.submit([(5,)], SamplingParams())
        assert 1 <= refused.value.retry_after_s <= 60
        for generation in running:
            generation.cancel()
        assert client.can_admit


async def test_an_adapter_has_its_share_of_the_queue_also_after_an_engine_died() -> None:
    async with client_of("fake?step_s=0.01", max_num_seqs=4, max_num_queued=8, max_requests_per_adapter=2) as client:
        long = SamplingParams(max_tokens=400)
        running = [client.submit([(5,)], long, adapter="a") for _ in range(2)]
        with pytest.raises(Overloaded, match="prompts of `a`.*--max-requests-per-adapter") as refused:
            client.submit([(5,)], long, adapter="a")
        assert (refused.value.param, refused.value.code) == ("model", "adapter_queue_full")
        with pytest.raises(InvalidRequest, match="at most 2"):
            client.submit([(5,)] * 3, long, adapter="b")
        running += [client.submit([(5,)] * 2, long, adapter="b"), client.submit([(5,)] * 4, long)]
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1)
        with pytest.raises(Overloaded):
            client.submit([(5,)], long, adapter="b")
        running[0].cancel()
        running.append(client.submit([(5,)], long, adapter="a"))
        for generation in running:
            generation.cancel()
        assert client.num_open == 0


async def test_a_fresh_engine_is_never_handed_more_than_its_queue_takes() -> None:
    """As many requests as the server takes, then the engine dies: the fake one fails when its queue overflows."""
    sampling = SamplingParams(seed=1, max_tokens=20)
    async with client_of("fake?step_s=0.002", max_num_seqs=4, max_num_queued=5) as client:
        readers = [asyncio.create_task(collect(client.submit([(5, index)], sampling))) for index in range(9)]
        await asyncio.sleep(0.03)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        for index, outputs in enumerate(await asyncio.gather(*readers)):
            assert token_ids(outputs[0, 0]) == expected((5, index), 1, 0, 20)
        assert client.num_restarts == 1


async def test_what_no_frame_holds_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many choices with many tokens may be more than a frame when they move to a fresh engine."""
    sampling = SamplingParams(seed=1, max_tokens=5)
    async with client_of("fake?max_len=4096") as client:
        monkeypatch.setattr("kvarto.engine.frames.MAX_FRAME_BYTES", 2000)
        small = asyncio.create_task(collect(client.submit([(5,)], sampling)))
        with pytest.raises(EngineError, match="frame of .* exceeds the limit of 2000 bytes"):
            await collect(client.submit([(5,) * 3000, (6,)], sampling))
        assert token_ids((await small)[0, 0]) == expected((5,), 1, 0, 5)
        assert client.num_open == 0
        assert client.num_restarts == 0


async def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async with client_of("fake?step_s=0.002") as client:
        reader = asyncio.create_task(collect(client.submit([(5,)], SamplingParams(seed=1, max_tokens=50))))
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(client.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            client.submit([(5,)], SamplingParams())
        await draining
        assert token_ids((await reader)[0, 0]) == expected((5,), 1, 0, 50)


async def test_counters_never_fall_when_engines_change() -> None:
    async with client_of("fake?step_s=0.002") as client:
        assert (await client.stats()).num_preemptions == 1
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1)
        assert (await client.stats()).num_preemptions == 2


async def test_adapters_are_loaded_listed_and_unloaded() -> None:
    async with client_of() as client:
        info = await client.adapters.load("a", Path("/adapters/a"))
        assert (info.name, info.path, info.rank) == ("a", "/adapters/a", 8)
        await client.adapters.load("b", Path("/adapters/b"))
        assert [info.name for info in await client.adapters.list()] == ["a", "b"]
        assert client.adapters.names == {"a", "b"}
        with pytest.raises(AdapterRefused, match="cannot be had"):
            await client.adapters.load("c", Path("/missing"))
        with pytest.raises(InvalidRequest):
            await client.adapters.load("", Path("/adapters/a"))
        await client.adapters.unload("a")
        with pytest.raises(UnknownAdapter):
            await client.adapters.unload("a")
        assert client.adapters.names == {"b"}


async def test_a_fresh_engine_hears_which_adapters_were_loaded_before_it_hears_of_requests() -> None:
    async with client_of("fake?step_s=0.002") as client:
        await client.adapters.load("a", Path("/adapters/a"))
        await client.adapters.load("b", Path("/adapters/b"))
        await client.adapters.unload("b")
        generation = client.submit([(5, 6)], SamplingParams(seed=3, max_tokens=200), adapter="a")
        reader = asyncio.create_task(collect(generation))
        await asyncio.sleep(0.05)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1)
        assert [info.name for info in await client.adapters.list()] == ["a"]
        assert token_ids((await reader)[0, 0]) == expected((5, 6), 3, 0, 200)


def test_unknown_errors_stay_errors_of_ours() -> None:
    assert type(error_from("InvalidRequest", "no", "stop")) is InvalidRequest
    assert type(error_from("Overloaded", "no")) is Overloaded
    assert str(error_from("SystemExit", "text")) == "text"
    assert str(error_from("annotations", "text")) == "text"


def test_what_an_engine_refuses_arrives_as_it_left() -> None:
    for error in (
        Overloaded("full", param="model", code="adapter_wait_too_long", retry_after_s=17),
        Overloaded("full"),
        InvalidRequest("no", param="stop"),
        ContextLengthExceeded("long", param="max_tokens"),
    ):
        got = error_of(refused_by("r", error))
        assert type(got) is type(error)
        assert (str(got), vars(got)) == (str(error), vars(error) | {"code": error.code})
