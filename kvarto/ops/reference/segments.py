"""Which rows of a step each adapter is active for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.buffers import Rows
from kvarto.core.ids import NO_ADAPTER
from kvarto.core.step import Step


@dataclass(frozen=True, slots=True)
class Segment:
    """An adapter, and its rows in ascending order."""

    adapter: BoundAdapter
    rows: NDArray[np.int64]
    """Of buffers with one row per token, or per sample."""


def segments(step: Step, adapters: Mapping[int, BoundAdapter], rows: Rows) -> Iterator[Segment]:
    """One per adapter that is active for a row."""
    handles = active_handles(step)
    if rows is Rows.SAMPLES:
        handles = handles[step.sample_rows]
    for handle in np.unique(handles).tolist():
        if handle != NO_ADAPTER:
            assert handle in adapters, f"the step names adapter {handle}, which is not bound"
            yield Segment(adapters[handle], np.flatnonzero(handles == handle))


def active_handles(step: Step) -> NDArray[np.int32]:
    """`[num_tokens]`: the handle of the adapter that is active for each token, or NO_ADAPTER."""
    if step.adapters is None or step.adapter_starts is None:
        return np.full(step.num_tokens, NO_ADAPTER, np.int32)
    lengths = np.diff(step.cu_seqlens)
    is_active = step.positions >= np.repeat(step.adapter_starts, lengths)
    return np.where(is_active, np.repeat(step.adapters, lengths), NO_ADAPTER).astype(np.int32)
