"""Scratch: what an op needs beside its buffers, as named pieces of one planned range of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvarto.core.units import align_up

PIECE_ALIGNMENT = 64
"""Bytes. A cache line, and the widest vector: matrix libraries round by alignment."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor inside a scratch range."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def size_bytes(self) -> int:
        """Bytes, aligned."""
        return align_up(math.prod(self.shape) * self.dtype.itemsize, PIECE_ALIGNMENT)


Pieces = dict[str, Piece]
Tensors = dict[str, torch.Tensor]


def total_bytes(pieces: Pieces) -> int:
    """Bytes of all pieces back to back."""
    return sum(piece.size_bytes for piece in pieces.values())


def carve(memory: torch.Tensor, offset: int, pieces: Pieces) -> Tensors:
    """Views of `memory` (bytes) for the pieces, back to back from `offset` on."""
    tensors: Tensors = {}
    for name, piece in pieces.items():
        end = offset + math.prod(piece.shape) * piece.dtype.itemsize
        tensors[name] = memory[offset:end].view(piece.dtype).view(piece.shape)
        offset += piece.size_bytes
    return tensors
