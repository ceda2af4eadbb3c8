"""A model on a backend without an engine: page tables made by hand, chunks drawn from a seed.

Pages come in random order, those behind a window are given back at once and handed to others, so that a read outside
of a window or of a sequence finds somebody else's numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.targets import targets_of
from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.ids import NO_ADAPTER, NO_PAGE
from kvarto.core.layout import Budget
from kvarto.core.program import Program
from kvarto.core.step import SamplingRows, Step
from kvarto.models.base import WeightFiles
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.loader import check_tensors, load_weights
from kvarto.models.packing import pack_matrices
from kvarto.ops.base import Backend
from kvarto.ops.reference.backend import ReferenceBackend
from kvarto.planning.plan import plan
from tests.ops.adapters import Shelf

Logits = NDArray[np.float32]

MAX_CONTEXT = 128
NUM_PAGES = 256


def greedy_rows(num_samples: int) -> SamplingRows:
    zeros, counts = np.zeros(num_samples, np.float32), np.zeros(num_samples, np.int32)
    nothing = np.zeros(num_samples + 1, np.int32)
    return SamplingRows(
        temperature=zeros,
        top_k=counts,
        top_p=np.ones(num_samples, np.float32),
        min_p=zeros,
        repetition_penalty=np.ones(num_samples, np.float32),
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seed=np.zeros(num_samples, np.int64),
        choice=counts,
        position=counts,
        num_logprobs=counts,
        target=np.full(num_samples, -1, np.int32),
        bias_indptr=nothing,
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        seen_indptr=nothing,
        seen_ids=np.zeros(0, np.int32),
        seen_output_counts=np.zeros(0, np.int32),
    )


@dataclass
class PagedSequence:
    """One prompt on its way: how far it is, and its page table for each layer group."""

    tokens: Sequence[int]
    page_tables: NDArray[np.int32]
    num_computed: int = 0
    adapter: int = NO_ADAPTER
    adapter_start: int = 0
    logits: list[Logits] = field(default_factory=list)


class TestedBackend(Backend, Protocol):
    """A backend that shows its logits."""

    def logits_of_last_step(self) -> Logits: ...


class PagedModel:
    """Weights of `files`, arithmetic of `config`."""

    def __init__(
        self,
        files: WeightFiles,
        config: dict[str, Any],
        *,
        page_size: int,
        max_tokens: int,
        backend: TestedBackend | None = None,
        num_pages: int = NUM_PAGES,
        max_lora_rank: int = 0,
    ) -> None:
        self.backend: TestedBackend = backend or ReferenceBackend(threads=1)
        program = build_program(parse_config(config), DType.F32)
        check_tensors(program, files)
        self.program: Program = pack_matrices(program, files, self.backend.weight_format)
        self.page_size = page_size
        self.is_sampled: Callable[[int], bool] = lambda position: True
        """Logits of other positions are not asked for: they are NaN in what is returned."""
        self.limits = StepLimits(max_tokens, 8, max_tokens, MAX_CONTEXT, max_lora_rank)
        kv_dtype = self.backend.default_kv_dtype(self.program)
        kv_format = self.program.kv_format(kv_dtype, page_size)
        scratch_bytes = {
            index: self.backend.scratch_bytes(op, self.program, self.limits, kv_format)
            for index, op in enumerate(self.program.ops)
        }
        budget = Budget(1 << 30, "test", kv_bytes=num_pages * kv_format.page_bytes)
        self.layout = plan(self.program, budget, self.limits, kv_dtype, page_size, scratch_bytes)
        self.backend.open(self.program, self.layout)
        load_weights(self.program, files, self.backend)

    def close(self) -> None:
        self.backend.close()

    def shelf(self) -> Shelf:
        """Where adapters are bound: pages behind those that sequences take."""
        free = list(range(NUM_PAGES, self.layout.num_pages))
        random.Random(0).shuffle(free)
        return Shelf(self.backend, targets_of(self.program), self.layout.kv_format.page_bytes, free)

    def logits(
        self, prompts: Sequence[Sequence[int]], seed: int, adapters: Sequence[tuple[int, int]] = ()
    ) -> list[Logits]:
        """Logits of every position of every prompt, computed in ragged batches of random chunks.

        `adapters`: of each prompt, the handle of its adapter, and the position from which that is active.
        """
        rng = random.Random(seed)
        free = list(range(NUM_PAGES))
        rng.shuffle(free)
        shape = (len(self.program.layer_groups), MAX_CONTEXT // self.page_size)
        sequences = [PagedSequence(prompt, np.full(shape, NO_PAGE, np.int32)) for prompt in prompts]
        for sequence, (handle, start) in zip(sequences, adapters, strict=False):
            sequence.adapter, sequence.adapter_start = handle, start
        while waiting := [s for s in sequences if s.num_computed < len(s.tokens)]:
            chunks, room = [], self.limits.max_tokens
            for sequence in rng.sample(waiting, rng.randint(1, min(len(waiting), self.limits.max_seqs))):
                left = min(len(sequence.tokens) - sequence.num_computed, room)
                if left:
                    chunks.append((sequence, rng.randint(1, left)))
                    room -= chunks[-1][1]
            self._run(chunks, free)
        return [np.concatenate(sequence.logits) for sequence in sequences]

    def whole(self, prompt: Sequence[int]) -> Logits:
        """Logits of every position of one prompt, computed in one step."""
        shape = (len(self.program.layer_groups), MAX_CONTEXT // self.page_size)
        sequence = PagedSequence(prompt, np.full(shape, NO_PAGE, np.int32))
        self._run([(sequence, len(prompt))], list(range(NUM_PAGES)))
        return sequence.logits[0]

    def _run(self, chunks: list[tuple[PagedSequence, int]], free: list[int]) -> None:
        for sequence, num_tokens in chunks:
            self._give_back_behind_windows(sequence, free)
            self._take_pages(sequence, sequence.num_computed + num_tokens, free)
        self.backend.run(self._step(chunks))
        found = np.asarray(self.backend.logits_of_last_step())
        first = 0
        for sequence, num_tokens in chunks:
            rows = self._sampled_rows(range(sequence.num_computed, sequence.num_computed + num_tokens))
            logits = np.full((num_tokens, self.program.vocab_size), np.nan, np.float32)
            logits[rows] = found[first : first + len(rows)]
            sequence.logits.append(logits)
            sequence.num_computed += num_tokens
            first += len(rows)

    def _sampled_rows(self, positions: Sequence[int]) -> NDArray[np.int32]:
        return np.flatnonzero([self.is_sampled(position) for position in positions]).astype(np.int32)

    def _give_back_behind_windows(self, sequence: PagedSequence, free: list[int]) -> None:
        for table, group in zip(sequence.page_tables, self.program.layer_groups, strict=True):
            first_seen = 0 if group.window is None else max(0, sequence.num_computed - group.window + 1)
            for index in range(first_seen // self.page_size):
                if table[index] != NO_PAGE:
                    free.append(int(table[index]))
                    table[index] = NO_PAGE

    def _take_pages(self, sequence: PagedSequence, num_tokens: int, free: list[int]) -> None:
        first = sequence.num_computed // self.page_size
        for table in sequence.page_tables:
            for index in range(first, -(-num_tokens // self.page_size)):
                if table[index] == NO_PAGE:
                    table[index] = free.pop()

    def _step(self, chunks: list[tuple[PagedSequence, int]]) -> Step:
        spans = [(s, range(s.num_computed, s.num_computed + n)) for s, n in chunks]
        positions = np.concatenate([np.asarray(span, np.int32) for _, span in spans])
        page_tables = np.stack([s.page_tables for s, _ in spans], axis=1)
        slots = [
            s.page_tables[:, np.asarray(span) // self.page_size].astype(np.int64) * self.page_size
            + np.asarray(span) % self.page_size
            for s, span in spans
        ]
        sample_rows = self._sampled_rows(positions.tolist())
        has_adapters = any(s.adapter != NO_ADAPTER for s, _ in spans)
        return Step(
            token_ids=np.concatenate([np.asarray(s.tokens[span.start : span.stop], np.int32) for s, span in spans]),
            positions=positions,
            cu_seqlens=np.cumsum([0, *(n for _, n in chunks)], dtype=np.int32),
            context_lens=np.asarray([span.stop for _, span in spans], np.int32),
            page_tables=np.ascontiguousarray(page_tables),
            slot_mapping=np.ascontiguousarray(np.concatenate(slots, axis=1)),
            sample_rows=sample_rows,
            sampling=greedy_rows(len(sample_rows)),
            adapters=np.array([s.adapter for s, _ in spans], np.int32) if has_adapters else None,
            adapter_starts=np.array([s.adapter_start for s, _ in spans], np.int32) if has_adapters else None,
        )
