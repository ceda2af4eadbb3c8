"""What a bound adapter adds to a step, in FLOPs and bytes: the one place that says so.

An adapter's bytes are read once per step, however many of its rows there are, so many adapters with a row each cost
their bytes, and one with many rows its multiply-adds.
"""

from __future__ import annotations

from kvarto.core.bound_adapter import BoundAdapter, BoundRows, BoundUpdate
from kvarto.core.buffers import Cost
from kvarto.core.dtype import DType
from kvarto.core.ops import Embed, Linear, Logits
from kvarto.core.program import Program


def adapter_cost(adapter: BoundAdapter, program: Program, num_tokens: int, num_samples: int) -> Cost:
    """Of a step in which the adapter is active for so many rows. What ops read and write without it is not counted."""
    total = Cost(0, 0, 0)
    for update in adapter.updates:
        total += _update_cost(update, program, num_tokens, num_samples)
    for rows in adapter.token_rows:
        total += _rows_cost(rows, program, num_tokens, num_samples)
    return total


def _update_cost(update: BoundUpdate, program: Program, num_tokens: int, num_samples: int) -> Cost:
    op = program.ops[update.op_index]
    assert isinstance(op, Linear | Logits | Embed)
    num_rows = num_samples if isinstance(op, Logits) else num_tokens
    if num_rows == 0:
        return Cost(0, 0, 0)
    written = num_rows * update.out_width * DType.F32.itemsize  # rows of the band, which are read before
    vectors = (update.lora_b, update.bias, update.magnitude)
    num_bytes = sum(strips.end - strips.start for strips in vectors if strips is not None)
    flops = 2 * num_rows * update.rank * update.out_width
    if isinstance(op, Embed):
        num_bytes += num_rows * update.rank * update.lora_a.type.block_bytes  # that with the column of a token
    else:
        num_bytes += update.lora_a.end - update.lora_a.start
        flops += 2 * num_rows * update.rank * update.lora_a.num_columns
    return Cost(flops, num_bytes + written, written)


def _rows_cost(rows: BoundRows, program: Program, num_tokens: int, num_samples: int) -> Cost:
    strips = rows.rows
    if isinstance(program.ops[rows.op_index], Embed):  # at most one replaced row per token
        num_rows = min(num_tokens, strips.num_strips)
        return Cost(0, num_rows * strips.strip_bytes, num_rows * strips.num_columns * DType.F32.itemsize)
    if num_samples == 0:
        return Cost(0, 0, 0)
    products = num_samples * strips.num_strips
    return Cost(2 * products * strips.num_columns, strips.end - strips.start, products * DType.F32.itemsize)
