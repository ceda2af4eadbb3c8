"""A step that is made from the last one equals the step made from nothing."""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar

import numpy as np
import pytest

from kvarto.core.ids import NO_PAGE
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Step
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.chunk import Chunk
from kvarto.engine.messages import AddRequest, Cancel
from tests.engine import hashed_engine
from tests.engine.hashed_engine import Harness, Shape


class CheckedBuilder(BatchBuilder):
    """Builds each step twice: as an engine does, and by a builder that has seen nothing before."""

    num_repeats = 0
    num_steps = 0
    differences: ClassVar[list[str]] = []

    def __init__(self, limits, *, groups, page_size) -> None:
        super().__init__(limits, groups=groups, page_size=page_size)
        self._fresh = lambda: BatchBuilder(limits, groups=groups, page_size=page_size)

    def build(self, chunks: list[Chunk]) -> Step:
        CheckedBuilder.num_steps += 1
        CheckedBuilder.num_repeats += self._last is not None and self._last[0] is chunks
        step = super().build(chunks)
        expected = self._fresh().build(list(chunks))
        try:
            _assert_equal(step, expected, chunks, self._page_size)
        except AssertionError as error:  # the loop takes it for a failed step and goes on
            CheckedBuilder.differences.append(str(error))
        return step


def _assert_equal(step: Step, expected: Step, chunks: list[Chunk], page_size: int) -> None:
    for name in ("token_ids", "positions", "cu_seqlens", "context_lens", "slot_mapping", "sample_rows"):
        np.testing.assert_array_equal(getattr(step, name), getattr(expected, name), err_msg=name)
    for field in dataclasses.fields(step.sampling):
        np.testing.assert_array_equal(
            getattr(step.sampling, field.name), getattr(expected.sampling, field.name), err_msg=field.name
        )
    for row, chunk in enumerate(chunks):
        num_pages = -(-chunk.stop // page_size)
        np.testing.assert_array_equal(step.page_tables[:, row, :num_pages], expected.page_tables[:, row, :num_pages])
        beyond = step.page_tables[:, row, chunk.choice.sequence.num_pages :]
        assert (beyond == NO_PAGE).all(), "a table names pages that its sequence does not have"


@pytest.mark.parametrize("windows", [(None,), (None, 20), (24,)])
@pytest.mark.parametrize("page_size", [8, 16])
def test_a_repeated_step_is_the_step_made_anew(monkeypatch, windows, page_size) -> None:
    monkeypatch.setattr(hashed_engine, "BatchBuilder", CheckedBuilder)
    monkeypatch.setattr(CheckedBuilder, "num_repeats", 0)
    monkeypatch.setattr(CheckedBuilder, "num_steps", 0)
    monkeypatch.setattr(CheckedBuilder, "differences", [])
    rng = random.Random(7)
    harness = Harness(Shape(page_size=page_size, windows=windows, num_pages=60, max_seqs=4))
    for index in range(30):
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 60),
            n=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((0.0, 0.8)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
            min_tokens=rng.choice((0, 0, 1)),
            seed=index,
        )
        prompt = tuple(rng.randrange(10, 60) for _ in range(rng.randint(1, 100)))
        harness.inbox.append(AddRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        if rng.random() < 0.2:
            harness.inbox.append(Cancel(str(rng.randrange(index + 1))))
        for _ in range(rng.randint(0, 40)):
            harness.engine.loop.step()
            harness.engine.executor.run_due()
    while harness.engine.loop.has_work or harness.engine.transfers.num_unreported:
        harness.engine.loop.step()
        harness.clock.advance(0.001)
        harness.engine.executor.run_due()
    harness.engine.check_empty()
    assert not CheckedBuilder.differences, CheckedBuilder.differences[0]
    assert CheckedBuilder.num_repeats > CheckedBuilder.num_steps // 4, "the test hardly saw what it tests"
