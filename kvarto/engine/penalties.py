"""SeenTokens: the distinct tokens of one choice and how often the output has them, kept as tokens come."""

from __future__ import annotations

import numpy as np

from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Int32


class SeenTokens:
    """Grows by one token at a time; a step takes views, so nothing is counted twice."""

    def __init__(self, prompt: Int32, *, includes_prompt: bool) -> None:
        """`includes_prompt`: the repetition penalty looks at the prompt too, the others at the output alone."""
        self._ids = np.unique(prompt) if includes_prompt else np.empty(0, dtype=np.int32)
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._num_seen = len(self._ids)
        self._place = {token: place for place, token in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> Int32:
        """Distinct tokens, in order of first sight."""
        return self._ids[: self._num_seen]

    @property
    def output_counts(self) -> Int32:
        """For each of `ids` its occurrences in the output."""
        return self._counts[: self._num_seen]

    def add(self, token_id: int) -> None:
        """A token was drawn."""
        place = self._place.get(token_id)
        if place is None:
            place = self._num_seen
            self._append(token_id)
        self._counts[place] += 1

    def _append(self, token_id: int) -> None:
        if self._num_seen == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int32)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
        self._ids[self._num_seen] = token_id
        self._place[token_id] = self._num_seen
        self._num_seen += 1


def seen_tokens(sampling: SamplingParams, prompt: Int32, output: list[int]) -> SeenTokens | None:
    """What penalties of these parameters need; None where none is on."""
    is_repetition_on = sampling.repetition_penalty != 1.0
    if not (is_repetition_on or sampling.presence_penalty or sampling.frequency_penalty):
        return None
    seen = SeenTokens(prompt, includes_prompt=is_repetition_on)
    for token_id in output:
        seen.add(token_id)
    return seen
