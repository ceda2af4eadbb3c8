"""Rows that are sampled from one token's row have one row of logits, whatever shares the step with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvarto.core.step import Step, StepResult
from kvarto.engine.assemble import build
from kvarto.engine.channel import LocalChannel
from kvarto.engine.config import EngineConfig
from tests.engine.test_process import request
from tests.engine.tiny_model import write_tiny_model


class Watched:
    """A backend whose logits are compared after each step."""

    def __init__(self, backend: object) -> None:
        self._backend = backend
        self.num_pairs = 0
        self.num_unequal = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def run(self, step: Step) -> StepResult:
        result: StepResult = self._backend.run(step)  # type: ignore[attr-defined]
        logits = self._backend.logits_of_last_step()  # type: ignore[attr-defined]
        first_of: dict[int, int] = {}
        for index, row in enumerate(step.sample_rows.tolist()):
            first = first_of.setdefault(row, index)
            self.num_pairs += index != first
            self.num_unequal += not np.array_equal(logits[index].view(np.uint32), logits[first].view(np.uint32))
        return result


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_choices_of_one_prompt_see_the_same_logits(tmp_path: Path, backend: str) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    channel = LocalChannel()
    config = EngineConfig(model=str(model), device_memory=8 << 20, max_num_seqs=8, threads=1, seed=3, backend=backend)
    engine = build(config, channel)
    watched = Watched(engine.backend)
    engine.loop._parts = dataclasses.replace(engine.loop._parts, backend=watched)
    channel.inbox.append(request("a", 50))
    engine.loop.step()
    channel.inbox += [request("bb", 120), request("ccc", 3, n=3)]
    while engine.loop.has_work or channel.inbox:
        engine.loop.step()
    engine.close()
    assert watched.num_unequal == 0
    assert watched.num_pairs == 2
