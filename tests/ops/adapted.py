"""Requests with adapters, run alone or in chunks together, on an open backend: logits of all their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.ops.adapters import with_adapters
from tests.ops.one_op import Array
from tests.ops.opened import Opened


@dataclass(frozen=True)
class Request:
    """A prompt, its adapter, and where that begins."""

    prompt: Array
    adapter: int | None
    start: int = 0


def alone(opened: Opened, request: Request) -> Array:
    """Logits of all its tokens, in one step."""
    opened.poison()
    length = len(request.prompt)
    step = opened.step([(request.prompt, opened.tables([length])[0], 0, length)])
    if request.adapter is not None:
        step = with_adapters(step, [request.adapter], [request.start])
    drawn_ids = opened.backend.run(step).token_ids
    logits = opened.backend.logits_of_last_step()
    np.testing.assert_array_equal(drawn_ids, logits.argmax(-1))
    return logits


def mixed(opened: Opened, asked: Sequence[Request], max_chunk: int) -> list[Array]:
    """The same of all of them together: random chunks of random subsets until all are done."""
    rng = np.random.default_rng(max_chunk)
    opened.poison()
    tables = opened.tables([len(request.prompt) for request in asked])
    done = np.zeros(len(asked), np.int64)
    logits: list[list[Array]] = [[] for _ in asked]
    while left := [s for s, request in enumerate(asked) if done[s] < len(request.prompt)]:
        chosen = rng.permutation(left)[: rng.integers(1, len(left) + 1)]
        ends = [min(len(asked[s].prompt), int(done[s]) + int(rng.integers(1, max_chunk + 1))) for s in chosen]
        parts = [(asked[s].prompt, tables[s], int(done[s]), end) for s, end in zip(chosen, ends, strict=True)]
        handles, starts = [asked[s].adapter for s in chosen], [asked[s].start for s in chosen]
        opened.backend.run(with_adapters(opened.step(parts), handles, starts))
        rows = np.split(opened.backend.logits_of_last_step(), np.cumsum(ends - done[chosen])[:-1])
        for s, end, part in zip(chosen, ends, rows, strict=True):
            logits[s].append(part)
            done[s] = end
    return [np.concatenate(parts) for parts in logits]
