"""SamplingTable: parameters of the choices that have slots, as columns, so that a step gathers its rows at once.

Bias, bans before `min_tokens` and penalties are ragged and rare: rows without them cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvarto.core.step import Float32, Int32, Int64, SamplingRows
from kvarto.engine.request import Choice

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by less overflows."""
_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NO_IDS = np.empty(0, dtype=np.int32)
_NO_VALUES = np.empty(0, dtype=np.float32)


class SamplingTable:
    """One row per slot, and a neutral last row for prompt positions."""

    def __init__(self, num_slots: int) -> None:
        self.neutral_slot = num_slots
        size = num_slots + 1
        self._temperature = np.zeros(size, dtype=np.float32)
        self._top_k = np.zeros(size, dtype=np.int32)
        self._top_p = np.ones(size, dtype=np.float32)
        self._min_p = np.zeros(size, dtype=np.float32)
        self._repetition_penalty = np.ones(size, dtype=np.float32)
        self._presence_penalty = np.zeros(size, dtype=np.float32)
        self._frequency_penalty = np.zeros(size, dtype=np.float32)
        self._seed = np.zeros(size, dtype=np.int64)
        self._choice = np.zeros(size, dtype=np.int32)
        self._num_logprobs = np.full(size, -1, dtype=np.int32)
        self._occupants: list[Choice | None] = [None] * size
        self._ragged: set[int] = set()
        """Slots whose choices may have bias, bans or penalties."""

    def seat(self, choice: Choice) -> None:
        """Make the row of the choice's slot its own; nothing to do when it is already."""
        slot = choice.slot
        if self._occupants[slot] is choice:
            return
        self._occupants[slot] = choice
        sampling = choice.request.sampling
        for column in _COLUMNS:
            getattr(self, f"_{column}")[slot] = getattr(sampling, column)
        if sampling.temperature < GREEDY_BELOW:
            self._temperature[slot] = 0.0
        self._seed[slot] = sampling.seed or 0
        self._choice[slot] = choice.index
        self._num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._ragged.discard(slot)
        if choice.seen is not None or len(choice.request.bias_ids) or sampling.min_tokens:
            self._ragged.add(slot)

    def rows(self, slots: Sequence[int], positions: Sequence[int]) -> SamplingRows:
        """Rows of a step: for each its slot (the neutral one for prompt positions) and the position that it draws."""
        index = np.array(slots, dtype=np.intp)
        bias_indptr, bias_ids, bias_values = self._bias(slots)
        seen_indptr, seen_ids, seen_counts = self._seen(slots)
        return SamplingRows(
            temperature=self._temperature[index],
            top_k=self._top_k[index],
            top_p=self._top_p[index],
            min_p=self._min_p[index],
            repetition_penalty=self._repetition_penalty[index],
            presence_penalty=self._presence_penalty[index],
            frequency_penalty=self._frequency_penalty[index],
            seed=self._seed[index],
            choice=self._choice[index],
            position=np.array(positions, dtype=np.int32),
            num_logprobs=self._num_logprobs[index],
            target=np.full(len(index), -1, dtype=np.int32),
            bias_indptr=bias_indptr,
            bias_ids=bias_ids,
            bias_values=bias_values,
            seen_indptr=seen_indptr,
            seen_ids=seen_ids,
            seen_output_counts=seen_counts,
        )

    def next_rows(self, last: SamplingRows, slots: Int64) -> SamplingRows:
        """Rows of a step that repeats the one of `last`, each a position later. Makes them of `last` itself."""
        if not self._ragged.isdisjoint(slots.tolist()):
            return self.rows(slots.tolist(), (last.position + 1).tolist())
        last.position = last.position + 1
        return last

    def _bias(self, slots: Sequence[int]) -> tuple[Int32, Int32, Float32]:
        indptr = np.zeros(len(slots) + 1, dtype=np.int32)
        if not self._ragged:
            return indptr, _NO_IDS, _NO_VALUES
        ids, values = [_NO_IDS], [_NO_VALUES]
        for row, slot in enumerate(slots):
            occupant = self._occupants[slot] if slot in self._ragged else None
            if occupant is not None:
                row_ids, row_values = _bias_of(occupant)
                ids.append(row_ids)
                values.append(row_values)
                indptr[row + 1] = len(row_ids)
        return _accumulated(indptr), np.concatenate(ids), np.concatenate(values)

    def _seen(self, slots: Sequence[int]) -> tuple[Int32, Int32, Int32]:
        indptr = np.zeros(len(slots) + 1, dtype=np.int32)
        if not self._ragged:
            return indptr, _NO_IDS, _NO_IDS
        ids, counts = [_NO_IDS], [_NO_IDS]
        for row, slot in enumerate(slots):
            occupant = self._occupants[slot] if slot in self._ragged else None
            if occupant is not None and occupant.seen is not None:
                ids.append(occupant.seen.ids)
                counts.append(occupant.seen.output_counts)
                indptr[row + 1] = len(ids[-1])
        return _accumulated(indptr), np.concatenate(ids), np.concatenate(counts)


def _bias_of(choice: Choice) -> tuple[Int32, Float32]:
    """The client's bias, and before `min_tokens` a ban on everything that would end the choice. Ids are distinct."""
    request = choice.request
    if len(choice.output) >= request.sampling.min_tokens or not len(request.banned_ids):
        return request.bias_ids, request.bias_values
    is_free = ~np.isin(request.bias_ids, request.banned_ids)
    bans = np.full(len(request.banned_ids), -np.inf, dtype=np.float32)
    return (
        np.concatenate([request.bias_ids[is_free], request.banned_ids]),
        np.concatenate([request.bias_values[is_free], bans]),
    )


def _accumulated(indptr: Int32) -> Int32:
    return np.cumsum(indptr, dtype=np.int32)
