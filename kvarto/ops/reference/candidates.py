"""Candidates: the likeliest ids of a row, and those that top-k, top-p and min-p leave."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

FIRST_LOOK = 128
"""Ids that top-p looks at first; eight times as many each time they do not reach it."""


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest of `logits: [vocab_size]`, largest first, lower id first among equals."""
    count = min(count, len(logits))
    least = torch.topk(logits, count, sorted=True).values[-1]
    above = torch.nonzero(logits > least).view(-1)
    equal = torch.nonzero(logits == least).view(-1)[: count - len(above)]
    ids = torch.cat((above, equal))
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices]


def filtered(logits: torch.Tensor, total: float, top_k: int, top_p: float) -> torch.Tensor | None:
    """Ids that top-k, then top-p of what it leaves, keep, likeliest first; None where neither is asked.

    `logits: [vocab_size]` have maximum 0 and `total` is the sum of their exponentials.
    """
    limit = top_k if 0 < top_k < len(logits) else len(logits)
    if top_p >= 1.0:
        return likeliest(logits, limit) if limit < len(logits) else None
    return _nucleus(logits, total, limit, top_p)


def _nucleus(logits: torch.Tensor, total: float, limit: int, top_p: float) -> torch.Tensor:
    count = limit if limit < len(logits) else min(FIRST_LOOK, limit)
    while True:
        ids = likeliest(logits, count)
        mass = _cumulative_mass(logits[ids])
        goal = top_p * (mass[-1] if limit < len(logits) else total)
        num_kept = int(np.searchsorted(mass, goal)) + 1
        if num_kept <= count or count == limit:
            return ids[:num_kept]
        count = min(8 * count, limit)


def _cumulative_mass(logits: torch.Tensor) -> NDArray[np.float64]:
    """Running sum of exponentials, one after the other: a prefix's sums do not depend on what follows."""
    return np.cumsum(np.exp(logits.cpu().numpy().astype(np.float64)))
