"""Invocation: from which token on an adapter is active that is called by tokens in the prompt (aLoRA)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvarto.engine.request import Request


def set_start(request: Request) -> None:
    """Where an adapter that is called by tokens begins: at the last place in the prompt where they stand."""
    version = request.adapter
    assert version is not None
    assert version.found is not None
    tokens = version.found.adapter.invocation_tokens
    if tokens:
        request.adapter_start = last_occurrence(request.prompt, tokens)


def last_occurrence(prompt: NDArray[np.int32], tokens: Sequence[int]) -> int | None:
    """Position of the first token of the last place where `tokens` stand in a row; None where there is none."""
    num_places = len(prompt) - len(tokens) + 1
    if num_places <= 0:
        return None
    matches = np.ones(num_places, bool)
    for offset, token in enumerate(tokens):
        matches &= prompt[offset : offset + num_places] == token
    places = np.flatnonzero(matches)
    return int(places[-1]) if len(places) else None
