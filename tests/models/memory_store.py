"""A store of weights in memory: row-major bytes as they come, rows of parts as files keep them, unpacked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvarto.core.program import Program
from kvarto.core.weight_format import LANES


class MemoryStore:
    """Implements `loader.WeightStore`, and holds its callers to its contract."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.row_major = {name: bytearray() for name, weight in program.weights.items() if not weight.parts}
        self._rows: dict[tuple[str, int], list[NDArray[np.uint8]]] = {}

    def store_weight(self, name: str, offset_bytes: int, data: NDArray[np.uint8]) -> None:
        assert data.dtype == np.uint8
        assert offset_bytes == len(self.row_major[name]), "blocks come in order and without gaps"
        self.row_major[name] += data.tobytes()

    def store_rows(self, name: str, part_index: int, first_row: int, raw: NDArray[np.uint8]) -> None:
        assert raw.dtype == np.uint8
        assert raw.ndim == 2
        blocks = self._rows.setdefault((name, part_index), [])
        stored = sum(map(len, blocks))
        assert first_row == stored, "rows come in order and without gaps"
        assert first_row % LANES == 0
        last = first_row + len(raw)
        num_rows = self.program.weights[name].parts[part_index].num_rows
        assert last % LANES == 0 or last == num_rows, "a block ends inside a panel"
        assert last <= num_rows
        blocks.append(raw.copy())

    def rows(self, name: str, part_index: int) -> NDArray[np.uint8]:
        """All rows of a part. They are complete, or this fails."""
        rows = np.concatenate(self._rows[name, part_index])
        assert len(rows) == self.program.weights[name].parts[part_index].num_rows
        return rows
