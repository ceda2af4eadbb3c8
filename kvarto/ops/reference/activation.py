"""Activate and GatedActivation: pointwise, on tiles that stay in a cache.

PyTorch's `sigmoid`, `silu` and `gelu` compute a vector's tail by another formula than its body, so that an element's
bits depend on where it lies. Here are only single IEEE operations, and `exp`, `tanh` and `erf` on whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kvarto.core import ops
from kvarto.core.units import align_up
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors

VECTOR = 64
"""Elements. Lengths given to transcendental functions are multiples of it: no element ever is in a tail."""
TILE_ELEMENTS = 1 << 14
"""Elements per call."""


class Pointwise:
    """Applies an activation to any number of elements, tile by tile."""

    @staticmethod
    def scratch() -> Pieces:
        """The tile, and a second one for what the function needs."""
        return {"act_tile": Piece((TILE_ELEMENTS,)), "act_temp": Piece((TILE_ELEMENTS,))}

    def __init__(self, activation: ops.Activation, scratch: Tensors) -> None:
        self._function = {
            ops.Activation.SILU: _silu_,
            ops.Activation.GELU_TANH: _gelu_tanh_,
            ops.Activation.GELU: _gelu_,
        }[activation]
        self._tile = scratch["act_tile"]
        self._temp = scratch["act_temp"]

    def apply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`out = act(x)`, `[n, width]` each."""
        for part in _parts(x.shape):
            out[part].copy_(self._activated(x[part]))

    def apply_gated(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`out = act(x[:, :width]) * x[:, width:]`, `x: [n, 2 * width]`."""
        gate, up = x.chunk(2, dim=1)
        for part in _parts(out.shape):
            torch.mul(self._activated(gate[part]), up[part], out=out[part])

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        count = x.numel()
        result = self._tile[:count].view(x.shape).copy_(x)
        padded = align_up(count, VECTOR)
        self._tile[count:padded].zero_()
        self._function(self._tile[:padded], self._temp[:padded])
        return result


def _parts(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    num_rows, width = shape
    columns = min(width, TILE_ELEMENTS)
    rows = TILE_ELEMENTS // columns
    for row in range(0, num_rows, rows):
        for column in range(0, width, columns):
            yield slice(row, min(row + rows, num_rows)), slice(column, min(column + columns, width))


def _silu_(x: torch.Tensor, temp: torch.Tensor) -> None:
    """`x / (1 + exp(-x))`"""
    torch.neg(x, out=temp)
    x.div_(temp.exp_().add_(1.0))


def _gelu_tanh_(x: torch.Tensor, temp: torch.Tensor) -> None:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³)))`, the cubic factored as `x * (1 + 0.044715 x²)`."""
    torch.mul(x, x, out=temp)
    temp.mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2 / math.pi))
    x.mul_(0.5).mul_(temp.tanh_().add_(1.0))


def _gelu_(x: torch.Tensor, temp: torch.Tensor) -> None:
    """`x / 2 * (1 + erf(x / sqrt(2)))`"""
    torch.mul(x, math.sqrt(0.5), out=temp)
    x.mul_(0.5).mul_(temp.erf_().add_(1.0))


class ActivateKernel(Kernel[ops.Activate]):
    """See `core.ops.Activate`."""

    @classmethod
    def scratch(cls, op: ops.Activate, sizes: Sizes) -> Pieces:
        """Tiles."""
        return Pointwise.scratch()

    def __init__(self, op: ops.Activate, views: Views, scratch: Tensors) -> None:
        self._rows = views.sizes.program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]
        self._pointwise = Pointwise(op.activation, scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.Activate`."""
        num_rows = batch.num_rows(self._rows)
        self._pointwise.apply(self._x[:num_rows], self._out[:num_rows])


class GatedActivationKernel(Kernel[ops.GatedActivation]):
    """See `core.ops.GatedActivation`."""

    @classmethod
    def scratch(cls, op: ops.GatedActivation, sizes: Sizes) -> Pieces:
        """Tiles."""
        return Pointwise.scratch()

    def __init__(self, op: ops.GatedActivation, views: Views, scratch: Tensors) -> None:
        self._rows = views.sizes.program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]
        self._pointwise = Pointwise(op.activation, scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.GatedActivation`."""
        num_rows = batch.num_rows(self._rows)
        self._pointwise.apply_gated(self._x[:num_rows], self._out[:num_rows])
