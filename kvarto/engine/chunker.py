"""Chunker: how much of a choice that runs goes into the step. Pages, copies, forks and guesses decide with the room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarto.core.errors import OutOfPages, TransferFailed
from kvarto.engine.chunk import Chunk
from kvarto.engine.lookup import guess_next
from kvarto.engine.page_pressure import PagePressure
from kvarto.engine.request import Choice, Status, sequence_of
from kvarto.engine.roster import Roster
from kvarto.engine.step_plan import StepPlan

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache


class Chunker:
    """Cuts chunks and puts them into the plan."""

    def __init__(
        self, cache: KVCache, roster: Roster, plan: StepPlan, pressure: PagePressure, *, num_lookup_tokens: int
    ) -> None:
        self._cache = cache
        self._roster = roster
        self._plan = plan
        self._pressure = pressure
        self._num_lookup_tokens = num_lookup_tokens

    def put(self, choice: Choice) -> None:
        """Put as much of the choice into the step as fits; nothing when it has to give way or wait."""
        if choice.status is not Status.RUNNING or self._plan.tokens_left == 0:
            return
        length, num_prompt_rows = self._plan.fitting(choice)
        stop = choice.num_computed_tokens + length
        if length == 0 or not self._pressure.grow(choice, stop) or not self._is_ready(choice):
            return
        choice.num_misses = 0
        draws = stop == choice.num_tokens
        forks = self._roster.seat_forks(choice) if draws and choice.request.held and not choice.output else []
        guess = self._guess(choice) if self._num_lookup_tokens and choice.is_decoding else ()
        length += len(guess)
        self._plan.put(Chunk(choice, choice.num_computed_tokens, length, draws, forks, num_prompt_rows, guess))

    def _is_ready(self, choice: Choice) -> bool:
        try:
            return self._cache.is_ready(sequence_of(choice))
        except TransferFailed:
            choice.distrusts_cache = True
            self._pressure.requeue(choice)
            return False

    def _guess(self, choice: Choice) -> tuple[int, ...]:
        """Tokens to verify beside the one that is drawn: as many as there are rows, pages and tokens to come, none at
        another's cost. None where what is drawn depends on more than the logits of its row.
        """
        request, sequence, plan = choice.request, sequence_of(choice), self._plan
        if choice.seen is not None or len(choice.output) < request.sampling.min_tokens or not choice.pause.is_over():
            return ()
        num_missing = request.num_prompt_tokens + request.max_tokens - choice.num_tokens
        # One token of the step is the drawn one's own, and the last to come needs no successor.
        count = min(self._num_lookup_tokens, plan.prompt_rows_left, plan.tokens_left - 1, num_missing - 1)
        guess = guess_next(sequence.tokens, choice.output[-1], count) if count > 0 else ()
        if guess:
            try:
                self._cache.grow(sequence, choice.num_tokens + len(guess))
            except OutOfPages:
                return ()
        return guess
