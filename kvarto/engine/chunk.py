"""Chunk: what one choice does in one step. Decided by the scheduler, laid out by the batch, answered by the results."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.engine.request import Choice


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens `[start, start + length)` of a choice are computed."""

    choice: Choice
    start: int
    length: int
    draws: bool
    """The last row yields the choice's next token."""
    forks: list[Choice]
    """Choices that draw from the same last row, and then continue on shared pages."""
    num_prompt_rows: int
    """Rows, from the first on, that are asked for the log-probability of the prompt token that follows."""
    guess: tuple[int, ...] = ()
    """The chunk's last tokens, after one that was drawn: guessed by look-up. Each of its rows is drawn."""

    @property
    def is_decode(self) -> bool:
        """One drawn token in, the next one out, and nothing else: what the same choice does step after step."""
        return self.length == 1 and self.draws and not self.forks and self.choice.is_decoding

    @property
    def num_drawn_rows(self) -> int:
        """Rows that yield a token: for the choice, for each guess that may prove right, and for each fork."""
        return (1 + len(self.guess) + len(self.forks)) if self.draws else 0

    @property
    def stop(self) -> int:
        """First position behind it."""
        return self.start + self.length
