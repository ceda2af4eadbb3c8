"""From an adapter and the pages that hold its bytes to what backends need: where each strip begins in the stream.

Pure. Packing (packing.py) says where matrices lie; here each gets the op whose rows it changes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import SCALE_TYPE, Adapter, LowRankUpdate, TokenRows
from kvarto.adapters.arrays import StoredArray
from kvarto.adapters.packing import num_pages, stream_starts, strips_of
from kvarto.adapters.targets import BaseTargets
from kvarto.core.bound_adapter import BoundAdapter, BoundRows, BoundShape, BoundUpdate, Strips
from kvarto.core.strip_type import StripType


def bound_shape(adapter: Adapter, base: BaseTargets) -> BoundShape:
    """All that backends need but the pages. The adapter was opened for this base."""
    starts = iter(stream_starts(strips_of(adapter)).tolist())
    updates = tuple(_bound_update(update, base, starts) for update in adapter.updates)
    rows = tuple(bound for rows in adapter.token_rows for bound in _bound_rows(rows, base, next(starts)))
    return BoundShape(updates, tuple(sorted(rows, key=lambda bound: bound.op_index)))


def bind(shape: BoundShape, pages: NDArray[np.int32], page_bytes: int) -> BoundAdapter:
    """`pages: [num_pages]`, in the order in which a `Packer` fills them."""
    wanted = num_pages(shape.end, page_bytes)
    assert len(pages) == wanted, f"{len(pages)} pages for an adapter of {wanted}"
    return BoundAdapter(page_bytes, pages, shape)


def unsupported(adapter: Adapter) -> str | None:
    """Why no backend can run the adapter, as a sentence for people; None where both can, which is everything so far."""
    return None


def _bound_update(update: LowRankUpdate, base: BaseTargets, starts: Iterator[int]) -> BoundUpdate:
    """Takes its starts in the order of `strips_of`."""
    a, b = update.lora_a, update.lora_b
    return BoundUpdate(
        op_index=base.op_indices[update.target.weight, update.target.role],
        first_row=update.target.first_row,
        scaling=update.scaling,
        lora_a=Strips(next(starts), update.rank, a.shape[1], a.strip_type),
        lora_b=Strips(next(starts), update.rank, b.shape[0], b.strip_type),
        bias=_vector(update.bias, starts),
        magnitude=_vector(update.magnitude, starts, SCALE_TYPE),
    )


def _vector(array: StoredArray | None, starts: Iterator[int], type: StripType | None = None) -> Strips | None:
    return None if array is None else Strips(next(starts), 1, array.shape[0], type or array.strip_type)


def _bound_rows(rows: TokenRows, base: BaseTargets, start: int) -> Iterator[BoundRows]:
    """One per op: the rows of a tied pair are in pages once."""
    num_rows, width = rows.rows.shape
    strips = Strips(start, num_rows, width, rows.rows.strip_type)
    for role in rows.roles:
        yield BoundRows(base.op_indices[rows.weight, role], rows.token_ids, strips)
