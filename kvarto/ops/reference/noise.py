"""Gumbel noise as a function of (seed, choice, position, vocabulary id): no state, so nothing to save or to resume.

The three request-wide numbers are mixed into a 64-bit key; id i draws the i-th number of the SplitMix64 stream that
starts at the key. Its top 40 bits give u in (0, 1), and the noise is -log(-log(1 - u)): small u, where float32 is
dense, make the large noise that decides a draw.
Source: Fast Splittable Pseudorandom Number Generators (doi:10.1145/2660193.2660195); the Gumbel-max trick.
"""

from __future__ import annotations

import torch

from kvarto.core.units import align_up
from kvarto.ops.reference.activation import VECTOR
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
WORD = 1 << 64
UNIFORM_BITS = 40
BLOCK = 1 << 13
"""Ids per call: their hashes stay in a cache."""


def noise_key(seed: int, choice: int, position: int) -> int:
    """The stream's start, 0 ≤ key < 2^64."""
    key = 0
    for field in (seed, choice, position):
        key = _mix((key ^ field) + GOLDEN)
    return key


def _mix(value: int) -> int:
    value %= WORD
    value = (value ^ value >> 30) * FIRST_FACTOR % WORD
    value = (value ^ value >> 27) * SECOND_FACTOR % WORD
    return value ^ value >> 31


class GumbelNoise:
    """Adds noise to logits, block by block."""

    @staticmethod
    def scratch() -> Pieces:
        """Hashes of a block, what the mixing needs, and the noise."""
        hashes = Piece((BLOCK,), torch.int64)
        return {"hashes": hashes, "hash_temp": hashes, "noise": Piece((BLOCK,))}

    def __init__(self, scratch: Tensors) -> None:
        self._hashes = scratch["hashes"]
        self._temp = scratch["hash_temp"]
        self._noise = scratch["noise"]

    def add_(self, logits: torch.Tensor, key: int) -> None:
        """Add the noise of ids 0, 1, 2, … to `logits: [vocab_size]`."""
        for start in range(0, len(logits), BLOCK):
            part = logits[start : start + BLOCK]
            torch.arange(start, start + len(part), out=self._hashes[: len(part)])
            part.add_(self._draw(len(part), key))

    def add_chosen_(self, logits: torch.Tensor, ids: torch.Tensor, key: int) -> None:
        """Add the noise of `ids: [n]` to `logits: [n]`."""
        for start in range(0, len(ids), BLOCK):
            part = logits[start : start + BLOCK]
            self._hashes[: len(part)].copy_(ids[start : start + BLOCK])
            part.add_(self._draw(len(part), key))

    def _draw(self, count: int, key: int) -> torch.Tensor:
        """Noise of the ids that lie in the first `count` hashes, which are destroyed."""
        padded = align_up(count, VECTOR)
        hashes, noise = self._hashes[:padded], self._noise[:padded]
        self._hash_(hashes, self._temp[:padded], key)
        noise.copy_(hashes).add_(0.5).mul_(2.0**-UNIFORM_BITS)
        noise.clamp_(max=1 - 2.0**-24)  # the largest hashes round to 1
        return noise.neg_().log1p_().neg_().log_().neg_()[:count]

    @staticmethod
    def _hash_(ids: torch.Tensor, temp: torch.Tensor, key: int) -> None:
        """Ids become the top 40 bits of their hashes.."""
        ids.add_(1).mul_(_signed(GOLDEN)).add_(_signed(key))
        for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
            _logical_shift(ids, shift, temp)
            ids.bitwise_xor_(temp).mul_(_signed(factor))
        _logical_shift(ids, 31, temp)
        ids.bitwise_xor_(temp)
        _logical_shift(ids, 64 - UNIFORM_BITS, ids)


def _logical_shift(values: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Shift right, zeros coming in: int64 shifts copies of the sign bit in."""
    torch.bitwise_right_shift(values, bits, out=out)
    out.bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word
