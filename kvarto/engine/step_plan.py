"""StepPlan: the step that is being made. Its chunks, and what is left of its limits."""

from __future__ import annotations

from kvarto.core.buffers import StepLimits
from kvarto.engine.chunk import Chunk
from kvarto.engine.request import Choice


class StepPlan:
    """At most one chunk per choice. Law: what is left and what the chunks take make the limits."""

    def __init__(self, limits: StepLimits) -> None:
        self.tokens_left = 0
        self.prompt_rows_left = 0
        """Rows that may be drawn beside one for each slot: prompt tokens asked for, and guesses."""
        self._limits = limits
        self._chunks: dict[Choice, Chunk] = {}

    @property
    def chunks(self) -> list[Chunk]:
        """In the order in which they were put."""
        return list(self._chunks.values())

    def begin(self) -> None:
        """A new step, without chunks."""
        self._chunks = {}
        self.tokens_left = self._limits.max_tokens
        self.prompt_rows_left = self._limits.max_samples - self._limits.max_seqs

    def fitting(self, choice: Choice) -> tuple[int, int]:
        """Tokens of the choice, and prompt rows among them, that fit into what is left."""
        length = min(choice.num_tokens - choice.num_computed_tokens, self.tokens_left)
        request = choice.request
        if request.collector is not choice:
            return length, 0
        # The prompt's last row draws and asks nothing, so it needs no row of the prompt's share.
        last = request.num_prompt_tokens - 1
        num_rows = min(choice.num_computed_tokens + length, last) - choice.num_computed_tokens
        if num_rows <= self.prompt_rows_left:
            return length, num_rows
        return self.prompt_rows_left, self.prompt_rows_left

    def put(self, chunk: Chunk) -> None:
        """Take a chunk in, that fits."""
        self._chunks[chunk.choice] = chunk
        self.tokens_left -= chunk.length
        self.prompt_rows_left -= chunk.num_prompt_rows + len(chunk.guess)

    def drop(self, choice: Choice) -> Chunk | None:
        """Take the chunk of a choice out again; None where it has none."""
        chunk = self._chunks.pop(choice, None)
        if chunk is not None:
            self.tokens_left += chunk.length
            self.prompt_rows_left += chunk.num_prompt_rows + len(chunk.guess)
        return chunk
