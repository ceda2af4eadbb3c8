"""Steps for tests: ragged batches over shuffled pages, and sampling parameters with quiet defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvarto.core.ids import NO_PAGE
from kvarto.core.step import SamplingRows, Step

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("top_k", "choice", "position", "num_logprobs", "target")
_DEFAULTS = {"top_p": 1.0, "repetition_penalty": 1.0, "target": -1}


def sampling_rows(
    num_rows: int,
    *,
    seed: Any = 0,
    bias: Sequence[dict[int, float]] | None = None,
    seen: Sequence[dict[int, int]] | None = None,
    **columns: Any,
) -> SamplingRows:
    """Greedy rows with nothing asked, but for `columns`: one number, or one per row. `seen`: output count by id."""
    filled = {name: np.full(num_rows, columns.pop(name, _DEFAULTS.get(name, 0)), np.float32) for name in _FLOATS}
    whole = {name: np.full(num_rows, columns.pop(name, _DEFAULTS.get(name, 0)), np.int32) for name in _INTS}
    assert not columns, f"no such columns: {sorted(columns)}"
    bias_indptr, bias_ids, bias_values = _ragged(bias or [{}] * num_rows)
    seen_indptr, seen_ids, seen_counts = _ragged(seen or [{}] * num_rows)
    return SamplingRows(
        **filled,
        **whole,
        seed=np.full(num_rows, seed, np.int64),
        bias_indptr=bias_indptr,
        bias_ids=bias_ids,
        bias_values=bias_values.astype(np.float32),
        seen_indptr=seen_indptr,
        seen_ids=seen_ids,
        seen_output_counts=seen_counts.astype(np.int32),
    )


def _ragged(rows: Sequence[dict[int, Any]]) -> tuple[Any, Any, Any]:
    indptr = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    ids = np.array([i for row in rows for i in row], np.int32)
    return indptr, ids, np.array([value for row in rows for value in row.values()])


def paged_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[list[int]],
    page_size: int,
    *,
    token_ids: np.ndarray[Any, Any] | None = None,
    sample_rows: Sequence[int] = (),
    sampling: SamplingRows | None = None,
) -> Step:
    """The last `query_lens[s]` of `context_lens[s]` tokens of each sequence; its pages in `tables[s]`."""
    positions = [np.arange(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)]
    table = np.full((len(tables), max((len(t) for t in tables), default=0)), NO_PAGE, np.int32)
    for s, pages in enumerate(tables):
        table[s, : len(pages)] = pages
    slots = [
        table[s, p // page_size].astype(np.int64) * page_size + p % page_size if tables[s] else 0 * p
        for s, p in enumerate(positions)
    ]
    num_tokens = sum(query_lens)
    return Step(
        token_ids=np.zeros(num_tokens, np.int32) if token_ids is None else token_ids.astype(np.int32),
        positions=np.concatenate([*positions, []]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *query_lens]).astype(np.int32),
        context_lens=np.array(context_lens, np.int32),
        page_tables=table[None],
        slot_mapping=np.concatenate([*slots, []]).astype(np.int64)[None],
        sample_rows=np.array(sample_rows, np.int32),
        sampling=sampling or sampling_rows(len(sample_rows)),
    )


def decode_step(context_lens: Sequence[int], **options: Any) -> Step:
    """One token of each sequence; no pages."""
    return paged_step([1] * len(context_lens), context_lens, [[]] * len(context_lens), 16, **options)
