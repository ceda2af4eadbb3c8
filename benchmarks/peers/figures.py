"""From the times of answers to figures: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """When one request was sent and answered, in seconds of one clock."""

    num_prompt_tokens: int
    num_output_tokens: int
    sent_s: float
    first_s: float
    """The first text came."""
    last_s: float
    """The last text came."""

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_s - self.sent_s


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens/s after the first token; the median of the answers."""
    return statistics.median((answer.num_output_tokens - 1) / (answer.last_s - answer.first_s) for answer in answers)


def prefill_rate(answers: Sequence[Answer]) -> float:
    """Prompt tokens/s until the first token; the median of the answers."""
    return statistics.median(answer.num_prompt_tokens / answer.ttft_s for answer in answers)


def output_rate(answers: Sequence[Answer]) -> float:
    """Output tokens/s of all together, from the first request sent to the last token received."""
    duration_s = max(answer.last_s for answer in answers) - min(answer.sent_s for answer in answers)
    return sum(answer.num_output_tokens for answer in answers) / duration_s


def spread_fraction(values: Sequence[float]) -> float:
    """How far values lie apart, as a share of their median: (largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)
