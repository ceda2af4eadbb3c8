"""Retries: after a step that failed in the backend, those on board one by one, on fewer tokens each time.

Nothing of such a step counts. Alone, and with less to compute, a choice runs where the step of many was too much; the
one that still fails is to blame.
"""

from __future__ import annotations

from collections import deque

from kvarto.engine.chunk import Chunk
from kvarto.engine.chunker import Chunker
from kvarto.engine.request import Choice, Status
from kvarto.engine.step_plan import StepPlan

MAX_FAILURES = 3
"""Failed steps in a row, the last ones alone, after which a choice is to blame: devices also fail for a moment."""


class Retries:
    """Choices to try alone, in the order of the step that failed."""

    def __init__(self, plan: StepPlan, chunker: Chunker) -> None:
        self._plan = plan
        self._chunker = chunker
        self._suspects: deque[Choice] = deque()

    def fail(self, chunks: list[Chunk]) -> Choice | None:
        """A step of these failed. Returns the choice that failed once too often, which is not tried again."""
        for chunk in chunks:
            chunk.choice.num_failures += 1
        if len(chunks) == 1 and chunks[0].choice.num_failures >= MAX_FAILURES:
            return chunks[0].choice
        self._suspects.extend(chunk.choice for chunk in chunks)
        return None

    def put_next(self) -> bool:
        """Put one of them into the step, alone; it may have to wait for a copy. False when none is left to try."""
        while self._suspects:
            choice = self._suspects[0]
            if choice.status is Status.RUNNING and choice.num_failures:
                num_missing = choice.num_tokens - choice.num_computed_tokens
                self._plan.tokens_left = max(1, min(self._plan.tokens_left, num_missing) // 2)
                self._chunker.put(choice)
                if choice.status is Status.RUNNING:
                    return True
            self._suspects.popleft()
        return False
