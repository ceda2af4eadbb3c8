"""From timed answers to figures: rates, and percentiles of the times that a client feels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvarto.cli.load.run import Answer

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some times, in milliseconds."""

    mean_ms: float
    percentiles_ms: dict[str, float]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None of nothing."""
        if not seconds:
            return None
        times_ms = np.array(seconds) * 1000
        values = np.percentile(times_ms, PERCENTILES)
        return cls(float(times_ms.mean()), {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)})


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Figures of one run."""

    num_requests: int
    num_failed: int
    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token: Spread | None
    """From sending to the first piece of text."""
    inter_token_latency: Spread | None
    """Between pieces of text, over all requests."""
    time_per_output_token: Spread | None
    """(last piece - first piece) / (output tokens - 1), per request."""
    end_to_end: Spread | None
    """From sending to the last piece."""
    errors: dict[str, int]
    """How often each error came."""


def report(answers: Sequence[Answer], duration_s: float) -> LoadReport:
    """Summarise a run; failed requests count as failed and nowhere else."""
    done = [answer for answer in answers if answer.error is None]
    heard = [answer for answer in done if answer.token_s]
    prompt_tokens = sum(answer.num_prompt_tokens for answer in done)
    output_tokens = sum(answer.num_output_tokens for answer in done)
    return LoadReport(
        num_requests=len(answers),
        num_failed=len(answers) - len(done),
        duration_s=duration_s,
        requests_per_s=len(done) / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        num_prompt_tokens=prompt_tokens,
        num_cached_tokens=sum(answer.num_cached_tokens for answer in done),
        num_output_tokens=output_tokens,
        time_to_first_token=Spread.of([answer.token_s[0] - answer.sent_s for answer in heard]),
        inter_token_latency=Spread.of([b - a for answer in heard for a, b in pairwise(answer.token_s)]),
        time_per_output_token=Spread.of(
            [
                (answer.token_s[-1] - answer.token_s[0]) / (answer.num_output_tokens - 1)
                for answer in heard
                if answer.num_output_tokens > 1
            ]
        ),
        end_to_end=Spread.of([answer.token_s[-1] - answer.sent_s for answer in heard]),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )
