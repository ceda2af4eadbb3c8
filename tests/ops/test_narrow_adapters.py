"""Adapters in bfloat16 that are multiplied as such, in matrix tiles beside products in bfloat16 and in pairs beside
those in int8: one row, few rows, many rows and ranks of all sizes are multiplied in ways of their own, which must give
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.quantised import quantised
from kvarto.adapters.targets import targets_of
from kvarto.core import _native
from kvarto.core.dtype import DType
from kvarto.core.strip_type import StripType
from tests.ops.adapted import Request, alone, mixed
from tests.ops.adapters import Draw, bfloat16_twin, drawn
from tests.ops.one_op import assert_same_bits
from tests.ops.opened import LIMITS, LLAMA, Opened, open_backend

NEEDS_TILES = pytest.mark.skipif("amx" not in _native.ops.isas(), reason="needs matrix tiles")
KINDS = (pytest.param("native bf16", marks=NEEDS_TILES), "native int8")
"""The latter takes pairs where the machine multiplies them, and float32 elsewhere: the laws are the same."""
BF16 = (DType.BF16, DType.BF16)
Q8, Q4 = StripType.Q8, StripType.Q4
WIDE = LLAMA | {"hidden_size": 544, "intermediate_size": 1088, "num_hidden_layers": 2}
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
DRAWS = (
    Draw(1, BF16, 0.5, 0.5, seed=1),
    Draw(8, BF16, 0.3, 0.1, seed=2),
    Draw(17, BF16, 0.2, 0.1, has_bias=True, seed=3),
    Draw(32, BF16, 0.2, 0.07, has_magnitude=True, seed=4),
    Draw(40, BF16, -0.4, 0.1, seed=5),
    Draw(133, BF16, 0.1, 0.04, has_bias=True, has_magnitude=True, seed=6),
    Draw(257, BF16, 0.3, 0.06, seed=7),  # more than tiles are for
)
LENGTHS = (150, 1, 2, 5, 70, 33, 131, 3, 4, 17, 90, 1)


def opened(
    kind: str, threads: int = 1, page_size: int = 16, change: Callable[[Adapter], Adapter] = lambda adapter: adapter
) -> Opened:
    limits = replace(
        LIMITS, max_tokens=sum(LENGTHS), max_samples=sum(LENGTHS), max_lora_rank=max(draw.rank for draw in DRAWS)
    )
    program = open_backend(WIDE, kind, limits=limits, threads=threads, page_size=page_size, num_slots=80_000)
    shelf = program.shelf()
    for draw in DRAWS:
        shelf.bind(change(adapter_of(program, draw)))
    return program


def adapter_of(program: Opened, draw: Draw) -> Adapter:
    base = targets_of(program.program)
    return drawn([base.find(f"model.layers.{layer}.{name}") for layer in range(2) for name in MODULES], draw)


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    return [Request(rng.integers(0, 211, length), index % len(DRAWS)) for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_chunk", "page_size"), [(3, 32), (160, 16), (12, 48)])
def test_bits_do_not_depend_on_the_batch(max_chunk: int, page_size: int, kind: str) -> None:
    asked, whole = requests(), opened(kind)
    want = [alone(whole, request) for request in asked]
    whole.backend.close()
    parts = opened(kind, threads=2, page_size=page_size)
    for got, logits in zip(mixed(parts, asked, max_chunk), want, strict=True):
        assert_same_bits(got, logits)
    parts.backend.close()


def coded(adapter: Adapter) -> Adapter:
    """Codes of both kinds, and strips that stay bfloat16: another mix in each adapter."""
    first, second = (Q8, Q4) if adapter.max_rank % 2 else (Q4, Q8)
    one, two = quantised(adapter, first).updates, quantised(adapter, second).updates
    updates = [each if index % 2 else other for index, (each, other) in enumerate(zip(one, two, strict=True))]
    updates[0] = replace(updates[0], lora_a=adapter.updates[0].lora_a)
    updates[1] = replace(updates[1], lora_b=adapter.updates[1].lora_b)
    return replace(adapter, updates=tuple(updates))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_chunk", "page_size"), [(3, 32), (160, 16)])
def test_codes_have_the_bits_of_what_they_stand_for(max_chunk: int, page_size: int, kind: str) -> None:
    asked, twins = requests(), opened(kind, change=lambda adapter: bfloat16_twin(coded(adapter)))
    want = [alone(twins, request) for request in asked]
    twins.backend.close()
    codes = opened(kind, threads=2, page_size=page_size, change=coded)
    for got, request, logits in zip(mixed(codes, asked, max_chunk), asked, want, strict=True):
        assert_same_bits(got, logits)
        assert_same_bits(alone(codes, request), logits)
    codes.backend.close()


def louder(adapter: Adapter) -> Adapter:
    """It changes far more than the rounding of rows to int8 does."""
    return replace(adapter, updates=tuple(replace(each, scaling=LOUD * each.scaling) for each in adapter.updates))


LOUD = 8.0
LOUDER: dict[str, Callable[[Adapter], Adapter]] = {"native bf16": lambda adapter: adapter, "native int8": louder}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("handle", range(len(DRAWS)))
def test_is_near_what_float32_gives(handle: int, kind: str) -> None:
    rounded, exact = opened(kind, change=LOUDER[kind]), opened("native q4 f32", change=LOUDER[kind])
    prompt = np.random.default_rng(handle).integers(0, 211, 40)
    for part in (prompt, prompt[:2]):
        (base, want), (near_base, near) = (
            [alone(each, Request(part, adapter)) for adapter in (None, handle)] for each in (exact, rounded)
        )
        rounding = np.abs(near_base - base).mean()
        change = np.abs(want - base).mean()
        assert change > 5 * rounding, "a strip in the wrong place would not show"
        assert np.abs(near - want).mean() < 2 * rounding + 0.05 * change
    rounded.backend.close()
    exact.backend.close()
