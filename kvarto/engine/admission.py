"""Admission: may the next in the queue run beside those that run? Pure arithmetic on pages.

Each that runs keeps a claim on the pages of its prompt and of the next tokens of its output; a newcomer must fit into
what is left. Without that, it would be admitted into pages that others need a few steps later, and be preempted.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from kvarto.engine.request import Choice

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache
    from kvarto.cache.sequence import Sequence

HORIZON_TOKENS = 64
"""Output tokens ahead that count as claimed: small beside a sequence, yet tens of steps without preemption."""


class AdmissionGate:
    """Remembers why the head of the queue did not fit, so that it is not opened again before something changed."""

    def __init__(self, cache: KVCache, chunk_tokens: int) -> None:
        """`chunk_tokens`: of one step."""
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._refused: Choice | None = None
        self._needs_available = 0

    def note_room(self) -> None:
        """Someone gave back pages, or a claim on them."""
        self._refused = None

    def may_try(self, choice: Choice, running: Items[Choice]) -> bool:
        """False while nothing has changed since `choice` did not fit."""
        return choice is not self._refused or not running or self._cache.num_available_pages >= self._needs_available

    def admits(self, choice: Choice, sequence: Sequence, running: Items[Choice]) -> bool:
        """Whether `choice`, opened as `sequence`, fits beside the claims of those that run."""
        claimed = sum(self._wanted(other, other.sequence) for other in running if other.sequence)
        missing = self._wanted(choice, sequence) + claimed - self._cache.num_available_pages
        if missing > 0:
            self.refuse(choice, missing=missing)
        return missing <= 0

    @property
    def refused(self) -> Choice | None:
        """Who did not fit, as long as nothing has changed since."""
        return self._refused

    def admits_adapter(self, choice: Choice, num_pages: int, running: Items[Choice], before: Items[Choice]) -> bool:
        """Whether an adapter's pages fit beside the claims of those that run, of those `before`, whose adapters are
        there and whose turn comes first, and of `choice` itself. With nobody else, the pool decides.
        """
        if not running and not before:
            return True
        available = self._cache.num_available_pages - num_pages - self._wanted_new(choice)
        for other in running:
            available -= self._wanted(other, other.sequence) if other.sequence else 0
        for other in before:
            if available < 0:
                break
            available -= self._wanted_new(other)
        return available >= 0

    def refuse(self, choice: Choice, *, missing: int) -> None:
        """Do not try `choice` again before `missing` more pages are available, or someone gave back room."""
        self._refused = choice
        self._needs_available = self._cache.num_available_pages + missing

    def _wanted(self, choice: Choice, sequence: Sequence) -> int:
        """Pages that the choice still lacks for its known tokens and the next ones of its output."""
        last = choice.request.num_prompt_tokens + choice.request.max_tokens
        chunk = min(self._chunk_tokens, choice.num_tokens - sequence.num_computed_tokens)
        return self._cache.pages_to_reach(sequence, min(choice.num_tokens + HORIZON_TOKENS, last), chunk)

    def _wanted_new(self, choice: Choice) -> int:
        """The same for one that has no sequence, as if nothing of it were cached."""
        last = choice.request.num_prompt_tokens + choice.request.max_tokens
        num_tokens = min(choice.num_tokens + HORIZON_TOKENS, last)
        return self._cache.pages_for(num_tokens, min(self._chunk_tokens, choice.num_tokens))
