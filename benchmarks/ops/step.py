"""Where does the time of a step go? Milliseconds by kind of op, of real steps of a model.

    python -m benchmarks.ops.step [--model DEMO] [--threads 2] [--activations auto] [--rows 1,8,32,511] [--context 60]

One engine in this process; for each number of rows, steps that decode as many sequences, each behind so much context,
or that prefill one prompt (from 64 rows on). The lower quartile of several steps; each op's time includes the barrier
behind it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvarto.adapters.resident import Resident
from kvarto.core.ops import Linear, Op
from kvarto.core.program import Program
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Step, StepResult
from kvarto.engine.assemble import build
from kvarto.engine.channel import LocalChannel
from kvarto.engine.config import EngineConfig
from kvarto.engine.messages import AddRequest
from kvarto.models.demo import pull_demo
from kvarto.ops.native.backend import NativeBackend, empty_result

FIRST_PROMPT_ROWS = 64
ROUNDS = 6
"""For each number of rows."""
SETTLE_S = 6.0
"""The arena is touched in the background at first."""


class TimedBackend:
    """A native backend whose steps are measured phase by phase."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self.steps: list[tuple[int, Counter[str]]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def run(self, step: Step) -> StepResult:
        """See `ops.base.Backend`."""
        opened, result = self._backend._open(), empty_result(step)
        tables, slots = np.ascontiguousarray(step.page_tables), np.ascontiguousarray(step.slot_mapping)
        times: Counter[str] = Counter()
        for index, seconds in opened.compiled.run_timed(step, tables, slots, result):
            times[_name(opened.program.ops[index], opened.program)] += seconds  # type: ignore[assignment]
        opened.num_logits = step.num_samples
        self.steps.append((step.num_tokens, times))
        return result


class TimedEngine:
    """One engine in this process, whose steps are measured. Quiet once it is made."""

    def __init__(self, config: EngineConfig) -> None:
        self._channel = LocalChannel()
        engine = build(config, self._channel)
        assert isinstance(engine.backend, NativeBackend)
        self.backend = TimedBackend(engine.backend)
        self._loop = engine.loop
        self._loop._parts = dataclasses.replace(self._loop._parts, backend=self.backend)  # type: ignore[arg-type]
        print(engine.fingerprint)
        time.sleep(SETTLE_S)

    @property
    def residents(self) -> list[Resident]:
        """Adapters on the device."""
        adapters = self._loop._parts.adapters
        return [] if adapters is None else adapters.residents

    def run(self, requests: Iterable[AddRequest]) -> None:
        """To the last token."""
        self._channel.inbox.extend(requests)
        self._loop.step()
        while self._loop.has_work:
            self._loop.step()
            self._channel.outbox.clear()


def _name(op: Op, program: Program) -> str:
    if not isinstance(op, Linear):
        return type(op).__name__
    return "Linear " + "x".join(map(str, program.weights[op.weight].shape))


def _requests(num_rows: int, turn: int, context: int) -> list[AddRequest]:
    """Decodes of as many sequences, or prompts of that length that share nothing."""
    is_prompt = num_rows >= FIRST_PROMPT_ROWS
    num_seqs, length, max_tokens = (1, num_rows, 2) if is_prompt else (num_rows, context, 24)
    return [
        AddRequest(
            request_id=f"{num_rows}-{turn}-{i}",
            prompt_token_ids=tuple((37 * j + 101 * i + 977 * turn) % 40_000 + 10 for j in range(length)),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=1),
        )
        for i in range(num_seqs)
    ]


def _quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


def _print(num_rows: int, steps: list[Counter[str]]) -> None:
    totals = [sum(times.values()) for times in steps]
    if not steps:
        return print(f"{num_rows} rows: no step had as many; a prompt's last token may stand alone")
    median = statistics.median(totals)
    print(f"{num_rows} rows: {_quartile(totals) * 1e3:.2f} ms (median {median * 1e3:.2f}, {len(steps)} steps)")
    for name in steps[0]:
        print(f"    {name:24} {_quartile(times[name] for times in steps) * 1e3:8.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="default: the demo model, which `kvarto pull` fetches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--rows", default="1,8,32,511")
    parser.add_argument("--context", type=int, default=60)
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model or str(pull_demo()),
        max_model_len=max(2048, options.context + 32),
        threads=options.threads,
        activations=options.activations,
    )
    engine = TimedEngine(config)
    for num_rows in map(int, options.rows.split(",")):
        for turn in range(ROUNDS):
            engine.run(_requests(num_rows, turn, options.context))
        _print(num_rows, [times for count, times in engine.backend.steps if num_rows <= count <= num_rows + 1])


if __name__ == "__main__":
    main()
