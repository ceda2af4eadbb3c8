"""Whole embeddings that PEFT writes along: harmless where they are the base's, wrong where they were trained."""

from __future__ import annotations

import numpy as np

from kvarto.adapters.arrays import LazyArray
from kvarto.adapters.assemble import IsCopy
from kvarto.adapters.targets import LM_HEAD, BaseTargets
from kvarto.models.base import WeightFiles, row_blocks


def copies_in(files: WeightFiles, base: BaseTargets) -> IsCopy:
    """Compares with the base's own files, a few rows at a time; a base in a coarser type has no copies."""

    def is_copy(module: str, array: LazyArray) -> bool:
        if module == LM_HEAD and base.is_tied:
            module = base.embed_module
        info = files.tensors.get(f"{module}.weight")
        if info is None or info.shape != array.shape or len(info.shape) != 2:
            return False
        return all(
            np.array_equal(files.read_rows(info.name, first, last), array.row_values(first, last))
            for first, last in row_blocks(0, info.num_rows, info.num_columns)
        )

    return is_copy
