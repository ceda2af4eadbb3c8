"""BatchBuilder: from chunks to a Step's flat arrays. Knows slots, pages and rows; decides nothing.

Page tables of the running choices stay in one array from step to step, a row per slot; a row is copied only when the
table of its sequence changed. A step that repeats the last one a token later is made from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvarto.core.buffers import StepLimits
from kvarto.core.ids import NO_ADAPTER, NO_PAGE
from kvarto.core.kv_format import LayerGroup
from kvarto.core.step import Int32, Int64, SamplingRows, Step
from kvarto.core.units import ceil_div
from kvarto.engine.chunk import Chunk
from kvarto.engine.request import Choice, is_adapted
from kvarto.engine.sampling_table import SamplingTable

_TABLE_ROUND = 8
"""Pages: tables of decode steps are that much wider than needed, so that they are gathered anew every so many pages."""

if TYPE_CHECKING:
    from kvarto.cache.sequence import Sequence


class BatchBuilder:
    """One per engine."""

    def __init__(self, limits: StepLimits, *, groups: tuple[LayerGroup, ...], page_size: int) -> None:
        self._page_size = page_size
        max_pages = ceil_div(limits.max_context, page_size)
        self._page_tables = np.full((len(groups), limits.max_seqs, max_pages), NO_PAGE, dtype=np.int32)
        self._sequences: list[Sequence | None] = [None] * limits.max_seqs
        """Whose pages a row of `_page_tables` holds."""
        self._versions = [-1] * limits.max_seqs
        """Of the sequence's table when the row was copied."""
        self._sampling = SamplingTable(limits.max_seqs)
        self._last: tuple[list[Chunk], Step, Int64] | None = None
        """Chunks of the last step, if all were decodes; the step; slots of its rows."""

    def build(self, chunks: list[Chunk]) -> Step:
        """The step that computes `chunks`, in their order. Rows to sample: prompt rows, then draws, chunk by chunk."""
        if self._last is not None and self._last[0] is chunks:
            return self._build_next(*self._last)
        for chunk in chunks:
            self._refresh_page_table(chunk)
        slots = np.array([chunk.choice.slot for chunk in chunks], dtype=np.intp)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
        cu_seqlens = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        positions = np.repeat(starts - cu_seqlens[:-1], lengths) + np.arange(cu_seqlens[-1], dtype=np.int32)
        context_lens = starts + lengths
        sample_rows, sampling = self._sample_rows(chunks, cu_seqlens)
        step = Step(
            token_ids=_token_ids(chunks, cu_seqlens),
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            page_tables=self._gather_tables(slots, int(context_lens.max())),
            slot_mapping=self._slot_mapping(np.repeat(slots, lengths), positions),
            sample_rows=sample_rows,
            sampling=sampling,
        )
        step.adapters, step.adapter_starts = _adapters(chunks)
        self._last = (chunks, step, slots) if all(chunk.is_decode for chunk in chunks) else None
        return step

    def _build_next(self, chunks: list[Chunk], last: Step, slots: Int64) -> Step:
        """The same sequences a token later: what does not change is taken over."""
        tables = last.page_tables
        for row, chunk in enumerate(chunks):
            if chunk.choice.sequence.table_version != self._versions[chunk.choice.slot]:  # type: ignore[union-attr]
                self._refresh_page_table(chunk)
                tables[:, row] = self._page_tables[:, slots[row], : tables.shape[2]]
        positions = last.positions + 1
        context_lens = last.context_lens + 1
        longest = int(context_lens.max())
        if longest > tables.shape[2] * self._page_size:
            tables = self._gather_tables(slots, longest)
        sampling = self._sampling.next_rows(last.sampling, slots)
        step = Step(
            token_ids=np.array([chunk.choice.output[-1] for chunk in chunks], dtype=np.int32),
            positions=positions,
            cu_seqlens=last.cu_seqlens,
            context_lens=context_lens,
            page_tables=tables,
            slot_mapping=self._slot_mapping(slots, positions),
            sample_rows=last.sample_rows,
            sampling=sampling,
            adapters=last.adapters,
            adapter_starts=last.adapter_starts,
        )
        self._last = (chunks, step, slots)
        return step

    def _gather_tables(self, slots: Int64, longest: int) -> Int32:
        """[num_groups, len(slots), pages of the longest and a few more]."""
        num_pages = ceil_div(longest, self._page_size * _TABLE_ROUND) * _TABLE_ROUND
        tables: Int32 = self._page_tables[:, slots, :num_pages]
        return tables

    def _refresh_page_table(self, chunk: Chunk) -> None:
        """Copy the sequence's table when it changed. Never keep a page that went back: it is somebody else's, whose
        values would be read, if only to be weighed with 0; NaN stays.
        """
        slot, sequence = chunk.choice.slot, chunk.choice.sequence
        assert sequence is not None, f"choice {chunk.choice.order} is in a step without a sequence"
        if self._sequences[slot] is sequence and self._versions[slot] == sequence.table_version:
            return
        num_pages = min(sequence.num_pages, self._page_tables.shape[2])
        if self._sequences[slot] is not sequence:
            self._sequences[slot] = sequence
            self._page_tables[:, slot, num_pages:] = NO_PAGE
        self._versions[slot] = sequence.table_version
        self._page_tables[:, slot, :num_pages] = sequence.table[:, :num_pages]

    def _slot_mapping(self, slots: Int64, positions: Int32) -> Int64:
        """[num_groups, num_tokens]: where each token's KV goes."""
        pages, offsets = np.divmod(positions, self._page_size)
        return self._page_tables[:, slots, pages].astype(np.int64) * self._page_size + offsets

    def _sample_rows(self, chunks: list[Chunk], cu_seqlens: Int32) -> tuple[Int32, SamplingRows]:
        rows: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        asking: list[tuple[int, Chunk]] = []
        for first_row, last_row, chunk in zip(cu_seqlens.tolist(), (cu_seqlens[1:] - 1).tolist(), chunks, strict=False):
            if chunk.num_prompt_rows:
                asking.append((len(rows), chunk))
                rows += range(first_row, first_row + chunk.num_prompt_rows)
                slots += [self._sampling.neutral_slot] * chunk.num_prompt_rows
                positions += range(chunk.start + 1, chunk.start + 1 + chunk.num_prompt_rows)
            if chunk.draws:
                for choice in (chunk.choice, *chunk.forks):
                    self._sampling.seat(choice)
                    rows += range(last_row - len(chunk.guess), last_row + 1)
                    slots += [choice.slot] * (1 + len(chunk.guess))
                    positions += range(choice.num_tokens, choice.num_tokens + 1 + len(chunk.guess))
        sampling = self._sampling.rows(slots, positions)
        for first, chunk in asking:
            _ask_prompt_rows(sampling, first, chunk)
        return np.array(rows, dtype=np.int32), sampling


def _token_ids(chunks: list[Chunk], cu_seqlens: Int32) -> Int32:
    token_ids = np.empty(cu_seqlens[-1], dtype=np.int32)
    for row, chunk in zip(cu_seqlens.tolist(), chunks, strict=False):
        if chunk.choice.is_decoding:
            token_ids[row] = chunk.choice.output[-1]
            token_ids[row + 1 : row + chunk.length] = chunk.guess
        else:
            token_ids[row : row + chunk.length] = chunk.choice.tokens(chunk.start, chunk.stop)
    return token_ids


def _adapters(chunks: list[Chunk]) -> tuple[Int32 | None, Int32 | None]:
    """Handles and starts per sequence; None, None where no sequence has an adapter that is active."""
    handles = [_handle(chunk.choice) for chunk in chunks]
    if max(handles) == NO_ADAPTER:
        return None, None
    starts = [chunk.choice.request.adapter_start or 0 for chunk in chunks]
    return np.array(handles, dtype=np.int32), np.array(starts, dtype=np.int32)


def _handle(choice: Choice) -> int:
    return choice.resident.handle if choice.resident is not None and is_adapted(choice) else NO_ADAPTER


def _ask_prompt_rows(sampling: SamplingRows, first: int, chunk: Chunk) -> None:
    """Row of prompt position p is asked for the token at p + 1."""
    request, num_rows = chunk.choice.request, chunk.num_prompt_rows
    sampling.target[first : first + num_rows] = request.prompt[chunk.start + 1 : chunk.start + 1 + num_rows]
    sampling.num_logprobs[first : first + num_rows] = request.sampling.prompt_logprobs or 0
