"""Whole embeddings that PEFT writes along: harmless where they are the base's, wrong where they were trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvarto.adapters.adapter import BaseCopy
from kvarto.adapters.arrays import Bytes, StoredArray
from kvarto.adapters.targets import LM_HEAD, BaseTargets
from kvarto.core.errors import UnsupportedAdapter
from kvarto.models.base import WeightFiles, row_blocks

IsCopy = Callable[[str, StoredArray, Bytes], bool]
"""Whether a tensor of a file equals the weight of that module in the base."""


def refuse_other_weights(copies: Sequence[BaseCopy], file: Bytes, is_copy: IsCopy | None) -> None:
    """Raises UnsupportedAdapter where one differs from the base's, or where there is no base to compare with."""
    for copy in copies:
        if is_copy is None or not is_copy(copy.module, copy.array, file):
            raise UnsupportedAdapter(
                f"tensor `{copy.array.name}` is a whole weight"
                + (" that differs from the base's" if is_copy else ", and the base's is not at hand to compare with")
                + "; save with `save_embedding_layers=False`, and train new tokens with `trainable_token_indices`"
            )


def copies_in(files: WeightFiles, base: BaseTargets) -> IsCopy:
    """Compares with the base's own files, a few rows at a time; a base in a coarser type has no copies."""

    def is_copy(module: str, array: StoredArray, file: Bytes) -> bool:
        if module == LM_HEAD and base.is_tied:
            module = base.embed_module
        info = files.tensors.get(f"{module}.weight")
        if info is None or info.shape != array.shape or len(info.shape) != 2:
            return False
        return all(
            np.array_equal(files.read_rows(info.name, first, last), array.row_values(file, first, last))
            for first, last in row_blocks(0, info.num_rows, info.num_columns)
        )

    return is_copy
