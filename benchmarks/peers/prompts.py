"""The prompts: real text as token ids, the same for every engine, with a fresh salt so that no cache knows them.

Ids rather than text, so that every engine computes exactly the same number of tokens. Lengths are evenly spread and
only their order is drawn, so the work is the same for every seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.folders import CHECKOUT

SALT_TOKENS = 4
SALT_IDS = range(1_000, 30_000)
"""Ordinary words of the vocabulary; control tokens are below."""
SOURCES = ("LICENSE", "CONTRIBUTING.md", "docs/design.md", "docs/life-of-a-request.md", "docs/known-limits.md")
"""Real text, part of every checkout."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to send, and how many tokens to ask for."""

    ids: tuple[int, ...]
    num_output_tokens: int
    adapter: str | None = None
    """Whom it asks; None: the base."""


def spread(low: int, high: int, num: int) -> list[int]:
    """`num` lengths, evenly from `low` to `high`, both included."""
    return [round(low + (high - low) * index / max(1, num - 1)) for index in range(num)]


def corpus_text(checkout: Path = CHECKOUT) -> str:
    """The text that prompts are cut from."""
    return "\n".join((checkout / name).read_text(encoding="utf-8") for name in SOURCES if (checkout / name).exists())


class PromptMaker:
    """Cuts prompts from one tokenised corpus. Equal arguments give equal prompts, another `salt` other prefixes."""

    def __init__(self, corpus: Sequence[int], seed: int = 0) -> None:
        assert len(corpus) > 0, "prompts are cut from a corpus"
        self._corpus = corpus
        self._seed = seed

    def mixed(self, salt: str, num: int = 32, prompt_tokens: tuple[int, int] = (32, 512),
              output_tokens: tuple[int, int] = (64, 128)) -> list[Prompt]:  # fmt: skip
        """Prompts of different lengths that share nothing."""
        order = random.Random(f"{self._seed}/order")
        lengths, outputs = spread(*prompt_tokens, num), spread(*output_tokens, num)
        order.shuffle(lengths)
        order.shuffle(outputs)
        return [
            self.one(f"{salt}/{index}", length, output)
            for index, (length, output) in enumerate(zip(lengths, outputs, strict=True))
        ]

    def adapted(self, salt: str, names: Sequence[str]) -> list[Prompt]:
        """As `mixed`, each asking the next adapter."""
        prompts = self.mixed(salt)
        return [replace(prompt, adapter=names[index % len(names)]) for index, prompt in enumerate(prompts)]

    def sharing(self, salt: str, num: int = 32, prefix_tokens: int = 512, suffix_tokens: int = 16,
                output_tokens: int = 64) -> list[Prompt]:  # fmt: skip
        """Prompts with one prefix, which no earlier one had, and endings of their own."""
        prefix = self._ids(salt, prefix_tokens)
        return [Prompt(prefix + self._ids(f"{salt}/{index}", suffix_tokens), output_tokens) for index in range(num)]

    def one(self, salt: str, prompt_tokens: int, output_tokens: int) -> Prompt:
        """One prompt of exactly that length."""
        return Prompt(self._ids(salt, prompt_tokens), output_tokens)

    def _ids(self, salt: str, num: int) -> tuple[int, ...]:
        """The salt, then a piece of the corpus from a place that the salt draws; the corpus goes round."""
        draw = random.Random(f"{self._seed}/{salt}")
        head = [draw.choice(SALT_IDS) for _ in range(min(SALT_TOKENS, num))]
        start = draw.randrange(len(self._corpus))
        return tuple(head + [self._corpus[(start + index) % len(self._corpus)] for index in range(num - len(head))])


def digest(prompts: Sequence[Prompt]) -> str:
    """Names a set of prompts, so that two tables can be seen to have measured the same."""
    text = "\n".join(f"{prompt.ids}{prompt.num_output_tokens}" for prompt in prompts)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
