"""Faults that a test asks of a real engine process."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvarto.engine.chunk import Chunk
from kvarto.engine.config import FaultPlan


def abort_on(faults: FaultPlan) -> Callable[[list[Chunk]], None] | None:
    """What the loop calls before each step; None where nothing is to be injected."""
    begins = list(faults.abort_on_tokens)
    if not begins:
        return None

    def abort_if(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            prompt = chunk.choice.request.prompt
            if chunk.start < len(prompt) and prompt[: len(begins)].tolist() == begins:
                os.abort()

    return abort_if
