"""Sums whose order is fixed by the length alone."""

from __future__ import annotations

import torch


def tree_sum_(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim, `[..., n]` to `[..., 1]` (a view of `terms`, which is destroyed).

    The upper half is added to the lower one until one column is left: elementwise IEEE additions only, so that no
    vectorisation, thread count or number of rows can change a bit.
    """
    width = terms.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        terms[..., : width - half].add_(terms[..., half:width])
        width = half
    return terms[..., :1]
