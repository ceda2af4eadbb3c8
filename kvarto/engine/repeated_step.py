"""RepeatedStep: the last step a token later, instead of one decided anew.

While all that run draw one token each and nobody can join them, deciding would find the same chunks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarto.core.errors import OutOfPages
from kvarto.engine.chunk import Chunk
from kvarto.engine.request import sequence_of

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache


class RepeatedStep:
    """Remembers a step until something happens after which the next may differ."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._chunks: list[Chunk] = []

    def keep(self, chunks: list[Chunk]) -> None:
        """These chunks, each of which is a decode, come again as long as nobody calls `forget`."""
        self._chunks = chunks

    def forget(self) -> None:
        """Somebody came, ended or failed."""
        self._chunks = []

    def next(self) -> list[Chunk]:
        """The same list, its chunks a token on. Empty where nothing is kept, the last step did not run, a page is
        missing, or a copy has to be waited for.
        """
        return self._chunks if self._chunks and self._move_on() else []

    def _move_on(self) -> bool:
        first = self._chunks[0]
        if first.choice.num_computed_tokens != first.start + 1:  # the last plan did not run
            return False
        for chunk in self._chunks:
            sequence = sequence_of(chunk.choice)
            num_tokens = chunk.start + 2
            if num_tokens > sequence.num_writable_tokens:
                try:
                    self._cache.grow(sequence, num_tokens)
                except OutOfPages:
                    return False
                if sequence.copies:
                    return False
        for chunk in self._chunks:
            chunk.start += 1
        return True
