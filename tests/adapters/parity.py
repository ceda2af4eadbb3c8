"""What an Adapter's description computes, in numpy and float64, over the stacked weights of a Program."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.targets import Role

Array = np.ndarray[Any, Any]


def product(adapter: Adapter, weight: str, matrix: Array, x: Array, role: Role = Role.LINEAR) -> Array:
    """`x [rows, in]` through the weight `[out, in]` and what the adapter adds to it."""
    y = x @ matrix.T
    for update in adapter.updates:
        target = update.target
        if (target.weight, target.role) != (weight, role):
            continue
        band = slice(target.first_row, target.first_row + target.out_width)
        a, b = (array.values().astype(np.float64) for array in (update.lora_a, update.lora_b))
        delta = x @ a.T @ b.T
        if update.bias is not None:
            delta = delta + update.bias.values()
        y[:, band] += update.scaling * delta
        if update.magnitude is not None:
            norm = np.linalg.norm(matrix[band] + update.scaling * (b @ a), axis=1)
            y[:, band] *= update.magnitude.values() / norm
    return y


def lookup(adapter: Adapter, weight: str, table: Array, tokens: list[int]) -> Array:
    """Rows of the embedding table, replaced and updated."""
    table = table.copy()
    for rows in adapter.token_rows:
        if rows.weight == weight and Role.EMBED in rows.roles:
            table[list(rows.token_ids)] = rows.rows.values()
    for update in adapter.updates:
        if (update.target.weight, update.target.role) == (weight, Role.EMBED):
            a, b = (array.values().astype(np.float64) for array in (update.lora_a, update.lora_b))
            table += update.scaling * (b @ a).T
    return table[tokens]
