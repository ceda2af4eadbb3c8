"""Kernel: an op bound to its tensors at open, run once per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvarto.core.buffers import Rows, StepLimits
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat
from kvarto.core.ops import HeadShape
from kvarto.core.program import Program
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.scratch import Pieces, Tensors

OpT = TypeVar("OpT")

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.U8: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """All that scratch may depend on."""

    program: Program
    limits: StepLimits
    kv_format: KVFormat

    def max_rows(self, buffer: str) -> int:
        """Rows of a buffer at the largest step."""
        is_per_token = self.program.buffers[buffer].rows is Rows.TOKENS
        return self.limits.max_tokens if is_per_token else self.limits.max_samples

    def width(self, buffer: str) -> int:
        """Elements of one row of a buffer."""
        return self.program.buffers[buffer].width

    def weight_dtype(self, weight: str) -> torch.dtype:
        """Element type of a weight in the arena."""
        return TORCH_DTYPES[self.program.weights[weight].dtype]

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of the pages."""
        return TORCH_DTYPES[self.kv_format.dtype]


@dataclass(frozen=True, slots=True)
class Views:
    """Tensors over the arena, made once at open."""

    sizes: Sizes
    buffers: Tensors
    """`[max_rows, width]` each."""
    weights: Tensors
    pages: torch.Tensor
    """All pages in the KV's element type, 1-D."""
    num_pages: int

    @property
    def page_elements(self) -> int:
        """Elements from one page to the next."""
        return self.sizes.kv_format.page_bytes // self.sizes.kv_format.dtype.itemsize


def heads_view(views: Views, qkv: str, heads: HeadShape) -> torch.Tensor:
    """A `qkv` buffer as `[max_tokens, q heads | k heads | v heads, head_dim]`."""
    buffer = views.buffers[qkv]
    return buffer.view(len(buffer), -1, heads.head_dim)


class Kernel(Generic[OpT]):
    """Base of all kernels. `scratch` says what one needs before there is any memory."""

    @classmethod
    def scratch(cls, op: OpT, sizes: Sizes) -> Pieces:
        """Pieces beside the op's buffers, at the largest step."""
        return {}

    def __init__(self, op: OpT, views: Views, scratch: Tensors) -> None:
        raise NotImplementedError

    def run(self, batch: Batch) -> None:
        """Compute the op for the batch: reads and writes rows of the buffers that the op names."""
        raise NotImplementedError
