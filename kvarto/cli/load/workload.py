"""What to ask a server, and when: lengths and arrivals, random or from a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.planning.traces import Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order; arrays are `[num_requests]`."""

    arrival_s: NDArray[np.float64] | None
    """Seconds after the start at which each is sent; None: as soon as the number in flight allows."""
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    block_ids: tuple[NDArray[np.int64], ...] | None = None
    """Ids of the prompts' blocks of `block_tokens` tokens: equal ids are equal tokens. None: no prompts are alike."""
    block_tokens: int = 512
    models: tuple[str, ...] | None = None
    """Whom each request asks; None: all of them the same."""

    def __len__(self) -> int:
        return len(self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths drawn evenly from `mean` ± `spread` × `mean`, at least 1."""

    mean: int
    spread: float = 0.0

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths."""
        low = max(1, round(self.mean * (1 - self.spread)))
        return random.integers(low, max(low, round(self.mean * (1 + self.spread))) + 1, count)


def random_workload(
    num_requests: int, prompt: LengthRange, output: LengthRange, rate: float | None, seed: int
) -> Workload:
    """Requests of random lengths. `rate` is requests per second, arriving as a Poisson process; None: all at once."""
    random = np.random.default_rng(seed)
    arrival_s = None if rate is None else np.cumsum(random.exponential(1 / rate, num_requests))
    return Workload(arrival_s, prompt.draw(num_requests, random), output.draw(num_requests, random))


def zipf_models(names: Sequence[str], num_requests: int, exponent: float, seed: int) -> tuple[str, ...]:
    """A name per request: the k-th of them is drawn in proportion to 1 / k^exponent."""
    weights = np.arange(1, len(names) + 1) ** -exponent
    drawn = np.random.default_rng(seed).choice(len(names), num_requests, p=weights / weights.sum())
    return tuple(names[index] for index in drawn)


def trace_workload(trace: Trace, *, rate_scale: float, max_tokens: int | None) -> Workload:
    """A trace, `rate_scale` times as fast as recorded, without the requests longer than `max_tokens` in all."""
    keep = np.flatnonzero(trace.num_prompt_tokens + trace.num_output_tokens <= (max_tokens or np.iinfo(np.int64).max))
    arrival_s = trace.arrival_s[keep] / rate_scale
    block_ids = None if trace.block_ids is None else tuple(trace.block_ids[index] for index in keep)
    return Workload(
        arrival_s - (arrival_s[0] if len(keep) else 0.0),
        trace.num_prompt_tokens[keep],
        trace.num_output_tokens[keep],
        block_ids,
        trace.block_tokens,
    )


class PromptIds:
    """Prompts as token ids, drawn from ids that the server's own tokenizer made, so that all of them exist."""

    def __init__(self, vocabulary: list[int], seed: int) -> None:
        self._vocabulary = np.unique(np.array(vocabulary, dtype=np.int64))
        self._seed = seed

    def prompt(self, workload: Workload, request: int) -> list[int]:
        """The ids of one request: its own, or those of its blocks."""
        num_tokens = int(workload.num_prompt_tokens[request])
        if workload.block_ids is None:
            return self._draw(num_tokens, (0, request))
        blocks = [self._draw(workload.block_tokens, (1, int(block_id))) for block_id in workload.block_ids[request]]
        return [token for block in blocks for token in block][:num_tokens]

    def _draw(self, count: int, key: tuple[int, int]) -> list[int]:
        random = np.random.default_rng((self._seed, *key))
        return [int(token) for token in random.choice(self._vocabulary, count)]
