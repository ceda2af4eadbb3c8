"""Outputs on their way from the client to a reader, who waits or is called: none lost, none twice, errors last."""

from __future__ import annotations

import asyncio

import pytest

from kvarto.core.errors import EngineError
from kvarto.core.sampling import SamplingParams
from kvarto.engine.generation import Generation
from kvarto.engine.outputs import ChoiceOutput
from tests.engine.test_client import client_of, expected, token_ids


def output(choice: int, reason: str | None = None) -> ChoiceOutput:
    return ChoiceOutput(prompt_index=0, choice=choice, text="a", token_ids=(1,), finish_reason=reason)


def test_only_the_first_output_since_the_last_take_is_news() -> None:
    generation = Generation(2, lambda: None)
    some = [output(0), output(1), output(0, "stop"), output(1, "length")]
    assert [generation.put(each) for each in some[:2]] == [True, False]
    assert generation.take() == some[:2]
    assert generation.take() == []
    assert not generation.is_over
    assert [generation.put(each) for each in some[2:]] == [True, False]
    assert not generation.is_over
    assert generation.take() == some[2:]
    assert generation.is_over
    generation.check()


async def test_an_error_comes_after_what_came_before_it() -> None:
    generation, calls = Generation(2, lambda: None), []
    generation.listen(lambda: calls.append(1))
    generation.put(output(0, "stop"))
    generation.fail(EngineError("no"))
    assert calls == [1]
    assert not generation.is_over
    assert len(await generation.batch()) == 1
    assert generation.is_over
    for _ in range(2):
        with pytest.raises(EngineError, match="no"):
            await generation.batch()


async def test_an_error_after_all_have_ended_is_none() -> None:
    generation = Generation(1, lambda: None)
    generation.put(output(0, "stop"))
    generation.fail(EngineError("the server is shutting down"))
    assert len(await generation.batch()) == 1
    assert await generation.batch() == []


async def test_what_came_together_is_announced_once() -> None:
    """Four choices of two prompts: the listener is called once for each step, and finds all of its outputs."""
    async with client_of("fake?step_s=0.002") as client:
        generation = client.submit([(5,), (6,)], SamplingParams(n=2, seed=3, max_tokens=9))
        taken: list[list[ChoiceOutput]] = []
        generation.listen(lambda: taken.append(generation.take()))
        async with asyncio.timeout(20):
            while not generation.is_over:
                await asyncio.sleep(0.005)
    for outputs in taken:  # the second prompt may come a step late
        prompts = sorted({each.prompt_index for each in outputs})
        together = sorted((each.prompt_index, each.choice) for each in outputs)
        assert together == [(prompt, choice) for prompt in prompts for choice in (0, 1)]
        assert outputs, "a reader is called for nothing"
    for prompt, choice in ((0, 0), (0, 1), (1, 0), (1, 1)):
        own = [each for outputs in taken for each in outputs if (each.prompt_index, each.choice) == (prompt, choice)]
        assert token_ids(own) == expected(((5,), (6,))[prompt], 3, choice, 9)
