"""Runs one op of the reference backend on plain arrays, in memory that holds NaN wherever nothing was put."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvarto.core.buffers import Buffer, Rows, StepLimits, Weight
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.core.ops import Op
from kvarto.core.program import Program
from kvarto.core.step import Step, StepResult
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import TORCH_DTYPES, Sizes, Views
from kvarto.ops.reference.kernels import KERNELS
from kvarto.ops.reference.scratch import carve, total_bytes
from tests.ops.adapters import Stored
from tests.ops.steps import decode_step

Array = NDArray[np.generic]
NO_KV = KVFormat(DType.F32, 16, 1, 1, 16)


@dataclass
class OneOp:
    """An op with its weights; `run` gives it rows."""

    op: Op
    weights: Mapping[str, Array] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    """Of buffers that are only written."""
    weight_dtype: DType = DType.F32
    """Of weights with two or more dims."""
    kv_format: KVFormat = NO_KV
    num_pages: int = 1
    vocab_size: int = 1
    sample_buffers: tuple[str, ...] = ()
    i32_buffers: tuple[str, ...] = ()
    adapters: Mapping[int, Stored] = field(default_factory=dict)
    """By handle."""
    max_lora_rank: int = 0
    result: StepResult | None = None

    def run(self, rows: Mapping[str, Array], step: Step | None = None) -> dict[str, Array]:
        """Every buffer that the op writes, at the step's rows. Without a step: one decode token per row."""
        num_rows = max((len(values) for values in rows.values()), default=0)
        step = step or decode_step([1] * num_rows)
        num_rows, num_samples = max(step.num_tokens, 1) + 3, max(step.num_samples, 1) + 3
        limits = StepLimits(num_rows, max(step.num_seqs, 1), num_samples, 1 << 20, self.max_lora_rank)
        program = self._program({name: values.shape[1] for name, values in rows.items()} | dict(self.widths))
        sizes = Sizes(program, limits, self.kv_format)
        views = self._views(sizes)
        for name, values in rows.items():
            views.buffers[name][: len(values)] = torch.from_numpy(np.ascontiguousarray(values))
        kernel_type = KERNELS[type(self.op)]
        pieces = kernel_type.scratch(self.op, sizes)
        scratch = carve(nan_bytes(total_bytes(pieces)), 0, pieces)
        bound = {handle: stored.bound for handle, stored in self.adapters.items()}
        for stored in self.adapters.values():
            stored.write(self.pages().view(torch.uint8).numpy())
        batch = Batch(step, self.kv_format.page_size, torch.device("cpu"), bound)
        with torch.inference_mode():
            kernel_type(self.op, views, scratch).run(batch)
        self.result = batch.result
        return {
            name: views.buffers[name][: batch.num_rows(program.buffers[name].rows)].numpy().copy()
            for name in self.op.writes
        }

    def _program(self, widths: Mapping[str, int]) -> Program:
        buffers = {name: self._buffer(name, width) for name, width in widths.items()}
        weights = {
            name: Weight(name, w.shape, self.weight_dtype if w.ndim > 1 else DType.F32, ())
            for name, w in self.weights.items()
        }
        kv = self.kv_format
        group = LayerGroup((0,), kv.num_layer_slots, kv.num_kv_heads, kv.head_dim, None)
        return Program("test", buffers, weights, (self.op,), (group,), 1, self.vocab_size, 1 << 20)

    def _buffer(self, name: str, width: int) -> Buffer:
        rows = Rows.SAMPLES if name in self.sample_buffers else Rows.TOKENS
        return Buffer(name, width, rows, DType.I32 if name in self.i32_buffers else DType.F32)

    def _views(self, sizes: Sizes) -> Views:
        program = sizes.program
        buffers = {
            name: _nan_tensor((sizes.max_rows(name), buffer.width), TORCH_DTYPES[buffer.dtype])
            for name, buffer in program.buffers.items()
        }
        weights = {
            name: torch.from_numpy(np.array(values)).to(sizes.weight_dtype(name))
            for name, values in self.weights.items()
        }
        return Views(sizes, buffers, weights, self.pages(), self.num_pages)

    def pages(self) -> torch.Tensor:
        """The pages in the KV's type; made once, NaN at first."""
        if not hasattr(self, "_pages"):
            num_elements = self.num_pages * self.kv_format.page_bytes // self.kv_format.dtype.itemsize
            self._pages = _nan_tensor((num_elements,), TORCH_DTYPES[self.kv_format.dtype])
        return self._pages

    def planes(self) -> torch.Tensor:
        """The pages as `[page, layer slot, plane, kv head, token, dim]`, shared."""
        kv = self.kv_format
        payload = kv.payload_bytes // kv.dtype.itemsize
        by_page = self.pages().view(self.num_pages, -1)[:, :payload]
        return by_page.view(self.num_pages, kv.num_layer_slots, 2, kv.num_kv_heads, kv.page_size, kv.head_dim)


def nan_bytes(size_bytes: int) -> torch.Tensor:
    """All bits one: NaN in every float type."""
    padded = torch.full((size_bytes + 64,), 0xFF, dtype=torch.uint8)
    start = -padded.data_ptr() % 64
    return padded[start : start + size_bytes]


def _nan_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size_bytes = int(np.prod(shape)) * dtype.itemsize
    return nan_bytes(size_bytes).view(dtype).view(shape)


def bits(values: Array) -> Array:
    """For comparisons that tell 0.0 from -0.0 and one NaN from another."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def assert_same_bits(got: Array, want: Array) -> None:
    """Both arrays hold the same bits."""
    np.testing.assert_array_equal(bits(got), bits(want))
