"""A model whose every token is a hash of its whole context, read back from the pages that the step names.

A wrong page table, a stale or half-copied page, a lost token, a wrong slot, seed, choice, position, bias or count, an
adapter's byte that is not what was loaded: each changes the hash, and so the token. `Oracle` computes the same tokens
from plain lists, with no pages and no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.ids import MAX_ADAPTERS, NO_ADAPTER, NO_PAGE
from kvarto.core.kv_format import LayerGroup
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import SamplingRows, Step, StepResult

VOCAB_SIZE = 211
MAX_POSITIONS = 4096
NON_FINITE_ONE_IN = 2000
"""Contexts whose logits are not finite."""
_MASK = (1 << 64) - 1
_UInt64 = NDArray[np.uint64]
_WEIGHTS = np.random.default_rng(7).integers(1, _MASK, MAX_POSITIONS, dtype=np.uint64) | np.uint64(1)
_CANARY = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


def mix(value: int) -> int:
    """splitmix64's finaliser."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def kv_of(tokens: NDArray[np.integer], positions: NDArray[np.integer], group: int) -> _UInt64:
    """What a token leaves in a page of a layer group."""
    value = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15 + 2 * group)
    return value ^ (positions.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F))


def adapter_key(images: Iterable[bytes]) -> int:
    """What an adapter's pages do to every token that it is active for; never 0."""
    return int.from_bytes(blake2b(b"".join(images), digest_size=8).digest(), "little") | 1


def context_hash(kv: Sequence[_UInt64], last: int, windows: Sequence[int | None]) -> int:
    """Hash of what the token at position `last` sees; `kv[g]` holds positions 0…last of group g."""
    total = 0
    for group, window in enumerate(windows):
        first = 0 if window is None else max(0, last + 1 - window)
        visible = kv[group][first : last + 1] * _WEIGHTS[first : last + 1]
        total = mix(total ^ int(visible.sum(dtype=np.uint64)) ^ group)
    return total


@dataclass(frozen=True)
class Row:
    """Sampling parameters of one row, as plain values."""

    temperature: float
    seed: int
    choice: int
    position: int
    others: tuple[float, ...]
    bias: dict[int, float]
    seen: dict[int, int]


def draw(context: int, row: Row) -> int:
    """The token of a row."""
    key = context
    if row.temperature > 0:
        key = mix(key ^ mix(row.seed ^ mix(row.choice * 1009 + row.position)))
    for place, value in enumerate(row.others):
        key ^= mix(place * 7919 + round(float(value) * 4096))
    banned = set()
    for token, value in row.bias.items():
        if value == -np.inf:
            banned.add(token)
        else:
            key ^= mix(token * 31 + round(float(value) * 1024) % 65521)
    for token, count in row.seen.items():
        key ^= mix(token * 131 + count + (1 << 32))
    token = mix(key) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprob(context: int, token: int) -> float:
    """Of any token, from the context alone."""
    return float(np.float32(-(mix(context ^ (token + 77)) >> 40) / (1 << 21)))


def is_finite(context: int) -> bool:
    """Whether the logits after this context are numbers."""
    return mix(context ^ 0xF1F1) % NON_FINITE_ONE_IN != 0


def top_id(context: int, rank: int) -> int:
    """The token of a rank."""
    return (context + rank) % VOCAB_SIZE


class HashBackend:
    """Pages, and the part of `Backend` that a loop uses. `before_run` may raise, and some rows are spoiled then."""

    def __init__(
        self, num_pages: int, page_size: int, groups: tuple[LayerGroup, ...], before_run: Callable[[Step], None]
    ) -> None:
        self._page_size = page_size
        self._windows = [group.window for group in groups]
        self._slots = np.full((num_pages, page_size), _CANARY, dtype=np.uint64)
        self._before_run = before_run
        self._adapters: dict[int, BoundAdapter] = {}
        self._images: dict[int, bytes] = {}
        """By page: what was written there since a token's KV was."""

    @property
    def fingerprint(self) -> str:
        return "hash"

    def copy_page(self, source: int, target: int) -> None:
        self._slots[target] = self._slots[source]
        self._images.pop(target, None)
        if source in self._images:
            self._images[target] = self._images[source]

    def write_pages(self, pages: NDArray[np.int32], images: NDArray[np.uint8], which: NDArray[np.int32]) -> None:
        for page, image in zip(pages.tolist(), which.tolist(), strict=True):
            assert 0 <= page < len(self._slots)
            self._slots[page] = _CANARY
            self._images[page] = images[image].tobytes()

    def bind_adapter(self, handle: int, adapter: BoundAdapter) -> None:
        assert 0 <= handle < MAX_ADAPTERS
        assert handle not in self._adapters, f"handle {handle} is bound"
        self._adapters[handle] = adapter
        self._key_of(handle)

    def unbind_adapter(self, handle: int) -> None:
        del self._adapters[handle]

    def run(self, step: Step) -> StepResult:
        self.check_step(step)
        self._check_windows(step)
        slots = self._slots.reshape(-1)
        try:
            self._before_run(step)
        except BaseException:
            slots[step.slot_mapping[:, ::2]] = 13  # a step that dies may have written anything into its own slots
            raise
        keys = self._adapter_keys(step)
        for group, mapping in enumerate(step.slot_mapping):
            slots[mapping] = kv_of(step.token_ids, step.positions, group) ^ keys
            for page in np.unique(mapping // self._page_size).tolist():
                self._images.pop(page, None)
        return self._sample(step)

    def _adapter_keys(self, step: Step) -> _UInt64:
        """Per token: that of its adapter where it is active, else 0."""
        keys = np.zeros(step.num_tokens, np.uint64)
        if step.adapters is None or step.adapter_starts is None:
            return keys
        for s, (handle, start) in enumerate(zip(step.adapters.tolist(), step.adapter_starts.tolist(), strict=True)):
            rows = slice(step.cu_seqlens[s], step.cu_seqlens[s + 1])
            if handle != NO_ADAPTER:
                keys[rows] = np.where(step.positions[rows] >= start, np.uint64(self._key_of(handle)), np.uint64(0))
        return keys

    def _key_of(self, handle: int) -> int:
        pages = self._adapters[handle].pages.tolist()
        assert all(page in self._images for page in pages), f"pages of adapter {handle} were taken from it"
        return adapter_key(self._images[page] for page in pages)

    def _sample(self, step: Step) -> StepResult:
        contexts: dict[int, int] = {}
        for row in np.unique(step.sample_rows).tolist():
            sequence = int(np.searchsorted(step.cu_seqlens, row, side="right")) - 1
            contexts[row] = self._context(step, sequence, int(step.positions[row]))
        hashes = [contexts[row] for row in step.sample_rows.tolist()]
        rows = [row_of(step.sampling, index) for index in range(step.num_samples)]
        token_ids = [draw(context, row) for context, row in zip(hashes, rows, strict=True)]
        asked = [t if t >= 0 else drawn for t, drawn in zip(step.sampling.target.tolist(), token_ids, strict=True)]
        num_top = int(step.sampling.num_logprobs.max(initial=0))
        top = [[top_id(context, rank) for rank in range(num_top)] for context in hashes]
        return StepResult(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array([logprob(c, t) for c, t in zip(hashes, asked, strict=True)], dtype=np.float32),
            top_ids=np.array(top, dtype=np.int32).reshape(len(hashes), num_top),
            top_logprobs=np.array(
                [[logprob(c, t) for t in row] for c, row in zip(hashes, top, strict=True)], dtype=np.float32
            ).reshape(len(hashes), num_top),
            is_finite=np.array(
                [t >= 0 or is_finite(c) for c, t in zip(hashes, step.sampling.target.tolist(), strict=True)], dtype=bool
            ),
        )

    def _context(self, step: Step, sequence: int, last: int) -> int:
        positions = np.arange(last + 1)
        kv = []
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, last + 1 - window)
            pages = step.page_tables[group, sequence, positions // self._page_size]
            assert (pages[first:] >= 0).all(), f"group {group} lacks pages that position {last} reads: {pages}"
            kv.append(self._slots[pages, positions % self._page_size])
        return context_hash(kv, last, self._windows)

    def _check_windows(self, step: Step) -> None:
        """No table names a page that the window of its sequence has left: it may be anybody's by now."""
        starts = step.positions[step.cu_seqlens[:-1]].tolist()
        for table, window in zip(step.page_tables, self._windows, strict=True):
            for row, start in zip(table, starts, strict=True):
                gone = 0 if window is None else max(0, start + 1 - window) // self._page_size
                assert (row[:gone] == NO_PAGE).all(), f"pages {row[:gone]} are behind the window of position {start}"

    @staticmethod
    def check_step(step: Step) -> None:
        """Shapes and laws of a Step, as its docstrings state them."""
        lengths = np.diff(step.cu_seqlens)
        assert (lengths > 0).all()
        assert step.cu_seqlens[0] == 0
        assert step.cu_seqlens[-1] == len(step.token_ids) == len(step.positions) == step.slot_mapping.shape[1]
        lasts = step.positions[step.cu_seqlens[1:] - 1]
        assert (lasts + 1 == step.context_lens).all()
        for start, stop in zip(step.cu_seqlens[:-1], step.cu_seqlens[1:], strict=True):
            assert (np.diff(step.positions[start:stop]) == 1).all()
        for mapping in step.slot_mapping:
            assert len(np.unique(mapping)) == len(mapping), "two tokens of a step write to one slot"
        assert (step.adapters is None) == (step.adapter_starts is None)
        if step.adapters is not None and step.adapter_starts is not None:
            assert len(step.adapters) == len(step.adapter_starts) == step.num_seqs
            assert (step.adapters >= NO_ADAPTER).all()
        rows = step.sampling
        assert len(rows.bias_indptr) == len(rows.seen_indptr) == step.num_samples + 1
        assert len(rows.bias_ids) == len(rows.bias_values) == rows.bias_indptr[-1]
        assert len(rows.seen_ids) == len(rows.seen_output_counts) == rows.seen_indptr[-1]


def row_of(rows: SamplingRows, index: int) -> Row:
    """One row of a step's sampling parameters."""
    bias = slice(rows.bias_indptr[index], rows.bias_indptr[index + 1])
    seen = slice(rows.seen_indptr[index], rows.seen_indptr[index + 1])
    columns = (rows.top_k, rows.top_p, rows.min_p, rows.repetition_penalty, rows.presence_penalty)
    others = tuple(float(column[index]) for column in (*columns, rows.frequency_penalty))
    return Row(
        temperature=float(rows.temperature[index]),
        seed=int(rows.seed[index]),
        choice=int(rows.choice[index]),
        position=int(rows.position[index]),
        others=others,
        bias=dict(zip(rows.bias_ids[bias].tolist(), rows.bias_values[bias].tolist(), strict=True)),
        seen=dict(zip(rows.seen_ids[seen].tolist(), rows.seen_output_counts[seen].tolist(), strict=True)),
    )


@dataclass(frozen=True)
class Expected:
    """What one choice must yield."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str


class Oracle:
    """The unperturbed run of one request alone."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._windows = windows

    def contexts(self, tokens: Sequence[int], start: int, stop: int) -> list[int]:
        """Hash of the context that ends at each position of `[start, stop)`."""
        ids = np.array(tokens, dtype=np.int64)
        kv = [kv_of(ids, np.arange(len(ids)), group) for group in range(len(self._windows))]
        return [context_hash(kv, last, self._windows) for last in range(start, stop)]

    def choice(
        self, prompt: Sequence[int], sampling: SamplingParams, eos: Sequence[int], max_tokens: int, index: int
    ) -> Expected:
        """Tokens, their log-probabilities and the end of one choice."""
        output: list[int] = []
        logprobs: list[float] = []
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
        bans = set(sampling.stop_token_ids) | set(eos)
        while True:
            tokens = [*prompt, *output]
            (context,) = self.contexts(tokens, len(tokens) - 1, len(tokens))
            if not is_finite(context):
                return Expected(tuple(output), tuple(logprobs), "error")
            bias = dict(sampling.logit_bias)
            if len(output) < sampling.min_tokens:
                bias |= dict.fromkeys(bans, -np.inf)
            token = draw(context, self._row(prompt, output, sampling, bias, index))
            output.append(token)
            logprobs.append(logprob(context, token))
            if token in ends and len(output) >= sampling.min_tokens:
                return Expected(tuple(output), tuple(logprobs), "stop")
            if len(output) == max_tokens:
                return Expected(tuple(output), tuple(logprobs), "length")

    @staticmethod
    def _row(
        prompt: Sequence[int], output: list[int], sampling: SamplingParams, bias: dict[int, float], index: int
    ) -> Row:
        seen: dict[int, int] = {}
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
            seen = dict(Counter(output))
            if sampling.repetition_penalty != 1:
                seen = dict.fromkeys(prompt, 0) | seen
        others = (
            sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty, sampling.presence_penalty,
            sampling.frequency_penalty,
        )  # fmt: skip
        return Row(
            temperature=sampling.temperature,
            seed=sampling.seed or 0,
            choice=index,
            position=len(prompt) + len(output),
            others=tuple(float(np.float32(value)) for value in others),
            bias={token: float(np.float32(value)) for token, value in bias.items()},
            seen=seen,
        )

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Of prompt tokens 1…"""
        contexts = self.contexts(prompt, 0, len(prompt) - 1)
        return [logprob(context, token) for context, token in zip(contexts, prompt[1:], strict=True)]
