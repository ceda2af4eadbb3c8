"""An adapter costs its bytes once per step, and its multiply-adds per row."""

from __future__ import annotations

import numpy as np

from kvarto.adapters.binding import bind, bound_shape
from kvarto.adapters.packing import num_pages, stream_bytes
from kvarto.adapters.targets import targets_of
from kvarto.core.adapter_cost import adapter_cost
from kvarto.core.dtype import DType
from tests.adapters.bases import program_of
from tests.ops.adapters import Draw, drawn

LINEARS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def test_bytes_are_read_once_and_rows_multiplied_each() -> None:
    program = program_of()
    base = targets_of(program)
    targets = [base.find(f"model.layers.{layer}.{name}") for layer in range(2) for name in LINEARS]
    adapter = drawn(targets, Draw(3, (DType.BF16, DType.F16)))
    page_bytes = program.kv_format(DType.F32, 16).page_bytes
    pages = np.arange(num_pages(stream_bytes(adapter), page_bytes), dtype=np.int32)
    bound = bind(bound_shape(adapter, base), pages, page_bytes)
    assert stream_bytes(adapter) == adapter.size_bytes
    for num_rows in (1, 7):
        cost = adapter_cost(bound, program, num_rows, 1)
        written = 4 * num_rows * sum(target.out_width for target in targets)
        assert cost.bytes_written == written
        assert cost.bytes_read == adapter.size_bytes + written
        assert cost.flops == num_rows * adapter.size_bytes  # two FLOPs per element of two bytes
    assert adapter_cost(bound, program, 0, 0).bytes_read == 0


def test_the_output_matrix_counts_samples() -> None:
    program = program_of()
    base = targets_of(program)
    adapter = drawn([base.find("lm_head")], Draw(2))
    page_bytes = program.kv_format(DType.F32, 16).page_bytes
    bound = bind(bound_shape(adapter, base), np.arange(1, dtype=np.int32), page_bytes)
    assert adapter_cost(bound, program, 100, 0).flops == 0
    assert adapter_cost(bound, program, 100, 3).flops == 3 * 2 * 2 * (32 + 97)
