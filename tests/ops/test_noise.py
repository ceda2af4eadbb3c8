"""Noise: a pure function of its four numbers, Gumbel-distributed, the same by blocks and by chosen ids."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray

from kvarto.ops.reference.noise import BLOCK, GOLDEN, UNIFORM_BITS, GumbelNoise, noise_key
from kvarto.ops.reference.scratch import carve, total_bytes
from tests.ops.one_op import assert_same_bits, nan_bytes

EULER = 0.5772156649


def _noise() -> GumbelNoise:
    pieces = GumbelNoise.scratch()
    return GumbelNoise(carve(nan_bytes(total_bytes(pieces)), 0, pieces))


def _draw(vocab_size: int, *key: int) -> NDArray[np.float32]:
    logits = torch.zeros(vocab_size)
    _noise().add_(logits, noise_key(*key))
    return logits.numpy()


def _splitmix(key: int, index: int) -> int:
    """The published generator's `index`-th output, in exact integers."""
    z = (key + (index + 1) * GOLDEN) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_the_generator_is_splitmix64() -> None:
    """First outputs for seed 1234567, as published with the algorithm."""
    assert [_splitmix(1234567, i) for i in range(3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def test_noise_is_the_formula_of_the_hash() -> None:
    key = (2**63 - 1, 3, 17)
    got = _draw(1000, *key)
    for index in range(1000):
        u = ((_splitmix(noise_key(*key), index) >> (64 - UNIFORM_BITS)) + 0.5) * 2.0**-UNIFORM_BITS
        assert math.isclose(got[index], -math.log(-math.log1p(-u)), rel_tol=1e-4, abs_tol=1e-5)


def test_a_prefix_and_chosen_ids_draw_the_same_bits() -> None:
    whole = _draw(2 * BLOCK + 77, 5, 0, 9)
    for size in (1, 63, 64, BLOCK, BLOCK + 1):
        assert_same_bits(_draw(size, 5, 0, 9), whole[:size])
    ids = torch.from_numpy(np.random.default_rng(0).permutation(len(whole))[: BLOCK + 5])
    chosen = torch.zeros(len(ids))
    _noise().add_chosen_(chosen, ids, noise_key(5, 0, 9))
    assert_same_bits(chosen.numpy(), whole[ids.numpy()])


def test_every_number_matters() -> None:
    keys = [noise_key(*key) for key in itertools.product((0, 1, 2**40, 2**63 - 1), range(4), range(50))]
    assert len(set(keys)) == len(keys)
    draws = np.stack([_draw(500, *key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0))])
    correlations = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlations).max() < 5 / math.sqrt(500)


def test_noise_is_gumbel_and_always_finite() -> None:
    noise = np.concatenate([_draw(50_000, seed, 0, 3) for seed in range(40)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - EULER) < 5 * math.pi / math.sqrt(6 * len(noise))
    for level in (1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999, 1 - 1e-5):
        below = (noise < -math.log(-math.log(level))).mean()
        assert abs(below - level) <= 5 * math.sqrt(level * (1 - level) / len(noise)) + 1e-9
