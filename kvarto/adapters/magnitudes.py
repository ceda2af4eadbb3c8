"""What a DoRA magnitude m multiplies rows with, once the base is known: g = m / |W + scaling B A| (arXiv:2402.09353).

Norms are of rows of W; of an embedding's table, of its columns, since its outputs are those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import LowRankUpdate
from kvarto.adapters.targets import Role
from kvarto.core.errors import BadAdapter

ReadRows = Callable[[str, int, int], NDArray[np.float32]]
"""Weight, first row, number of rows: those of the base as float32, `[rows, columns]`."""
BLOCK_ELEMENTS = 1 << 20
"""Of W at a time."""
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateValues:
    """The values of an update with a magnitude, in float32."""

    lora_a: Float32
    """`[rank, in]`."""
    lora_b: Float32
    """`[out, rank]`."""
    magnitude: Float32
    """`[out]`."""


ScaleOf = Callable[[LowRankUpdate, UpdateValues], Float32]
"""From an update with a magnitude to its g, `[out]`."""


def scale_of(update: LowRankUpdate, values: UpdateValues, read_rows: ReadRows) -> Float32:
    """`[out]`. Reads the band's rows of the base once. Raises BadAdapter where g is no finite number."""
    assert update.magnitude is not None, "g is of an update with a magnitude"
    a, b = values.lora_a, values.lora_b * np.float32(update.scaling)
    squares_of = _columns if update.target.role is Role.EMBED else _rows
    squares = squares_of(update, a, b, read_rows)
    norms = np.sqrt(squares)
    # A row of zeros stays one, whatever it is multiplied with.
    scale = np.divide(values.magnitude, norms, out=np.ones_like(norms), where=norms > 0)
    if not (np.abs(scale) <= np.finfo(np.float32).max).all():
        raise BadAdapter(
            f"tensor `{update.magnitude.name}` scales rows without bound: rows of the base almost vanish under the "
            "update; use an earlier checkpoint"
        )
    return scale.astype(np.float32)


def _rows(update: LowRankUpdate, a: Float32, b: Float32, read_rows: ReadRows) -> NDArray[np.float64]:
    """Sums of squares of each row of the band."""
    target = update.target
    squares = np.empty(target.out_width, np.float64)
    for part in _parts(target.out_width, target.in_width):
        rows = read_rows(target.weight, target.first_row + part.start, part.stop - part.start)
        rows += b[part] @ a
        squares[part] = np.einsum("rc,rc->r", rows, rows, dtype=np.float64)
    return squares


def _columns(update: LowRankUpdate, a: Float32, b: Float32, read_rows: ReadRows) -> NDArray[np.float64]:
    """Sums of squares of each column of a table."""
    target = update.target
    squares = np.zeros(target.out_width, np.float64)
    for part in _parts(target.in_width, target.out_width):
        rows = read_rows(target.weight, part.start, part.stop - part.start)
        rows += (b @ a[:, part]).T
        squares += np.einsum("rc,rc->c", rows, rows, dtype=np.float64)
    return squares


def _parts(num_rows: int, num_columns: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // num_columns)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
