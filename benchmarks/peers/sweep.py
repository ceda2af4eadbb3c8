"""How does speed grow with concurrency, and how does it fall with context? Columns for the harness, one per point."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.figures import decode_rate, output_rate
from benchmarks.peers.workload import Column, several

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT_TOKENS = (1_024, 2_048, 4_096, 8_000)
"""The last leaves room for the answer in a model of 8,192."""
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


def concurrency_columns(concurrencies: Sequence[int] = CONCURRENCIES) -> tuple[Column, ...]:
    """Output tokens/s with that many requests of equal length, all sent at once."""
    return tuple(
        Column(f"at{num}", f"{num} at once", num, several(PROMPT_TOKENS, OUTPUT_TOKENS, num), output_rate)
        for num in concurrencies
    )


def context_columns(context_tokens: Sequence[int] = CONTEXT_TOKENS) -> tuple[Column, ...]:
    """Decode tokens/s of one stream behind a prompt of that length."""
    return tuple(
        Column(f"ctx{num}", f"behind {num}", 1, several(num, OUTPUT_TOKENS, 1), decode_rate) for num in context_tokens
    )
