"""The columns of the table: what is sent, how many at once, and which figure is read off the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.figures import Answer, decode_rate, output_rate, prefill_rate
from benchmarks.peers.prompts import Prompt, PromptMaker


@dataclass(frozen=True, slots=True)
class Column:
    """One figure, in tokens per second: the more the better."""

    name: str
    title: str
    concurrency: int
    prompts: Callable[[PromptMaker, str], list[Prompt]]
    """From the maker and a fresh salt."""
    figure: Callable[[Sequence[Answer]], float]
    needs_adapters: bool = False
    """Servers are started with the adapters, and asked for them."""


def several(prompt_tokens: int, output_tokens: int, num: int = 3) -> Callable[[PromptMaker, str], list[Prompt]]:
    """Prompts of one length."""
    return lambda maker, salt: [maker.one(f"{salt}/{i}", prompt_tokens, output_tokens) for i in range(num)]


ADAPTERS = tuple(f"adapter-{index}" for index in range(8))
"""Names of the adapters that `python -m benchmarks.peers adapters` writes."""
ADAPTER_RANK = 16
"""Of all of them, on all linears of the demo model."""

COLUMNS: tuple[Column, ...] = (
    Column("single", "one stream, decode", 1, several(64, 128), decode_rate),
    Column("prefill", "one stream, prefill of 512", 1, several(512, 1), prefill_rate),
    Column("c8", "8 concurrent, output", 8, lambda maker, salt: maker.mixed(salt), output_rate),
    Column("c32", "32 concurrent, output", 32, lambda maker, salt: maker.mixed(salt), output_rate),
    Column("prefix", "32 share 512, output", 32, lambda maker, salt: maker.sharing(salt), output_rate),
)

ADAPTER_COLUMNS: tuple[Column, ...] = (
    Column("lora", "32 over 8 adapters", 32, lambda maker, salt: maker.adapted(salt, ADAPTERS), output_rate, True),
)
"""Only measured when named."""
BARE_COLUMN = "c32"
"""The same work without adapters."""
