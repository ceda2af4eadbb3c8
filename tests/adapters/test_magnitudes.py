"""What magnitudes multiply with: norms over the base's own rows, whichever backend and format keeps them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvarto.adapters import magnitudes
from kvarto.adapters.magnitudes import scale_of
from kvarto.adapters.targets import Role, Target
from kvarto.core.errors import BadAdapter
from tests.adapters.held import update_values
from tests.ops.adapters import Draw, drawn, lazy
from tests.ops.opened import KINDS, LLAMA, open_backend

MATRIX = np.random.default_rng(1).normal(size=(70, 24)).astype(np.float32)


def read_rows(_: str, first_row: int, num_rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return MATRIX[first_row : first_row + num_rows].copy()


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
@pytest.mark.parametrize("role", [Role.LINEAR, Role.EMBED])
def test_norms_are_of_outputs(monkeypatch: pytest.MonkeyPatch, role: Role, block: int) -> None:
    monkeypatch.setattr(magnitudes, "BLOCK_ELEMENTS", block)
    target = Target("w", role, 0, 24, 70) if role is Role.EMBED else Target("w", role, 13, 40, 24)
    (update,) = drawn([target], Draw(3, scaling=-1.5, has_magnitude=True)).updates
    base = MATRIX.T if role is Role.EMBED else MATRIX[13:53]
    assert update.magnitude is not None
    whole = base + update.scaling * (update.lora_b.values().astype(np.float64) @ update.lora_a.values())
    want = update.magnitude.values() / np.linalg.norm(whole, axis=1)
    got = scale_of(update, update_values(update), read_rows)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_rows_of_zeros_stay_zeros_and_rows_that_vanish_are_refused() -> None:
    (update,) = drawn([Target("w", Role.LINEAR, 0, 4, 24)], Draw(2, spread=0.0, has_magnitude=True)).updates
    assert scale_of(update, update_values(update), lambda *_: np.zeros((4, 24), np.float32)).tolist() == [1.0] * 4
    tiny = replace(update, magnitude=lazy(np.full(4, 1e30)))
    with pytest.raises(BadAdapter, match="without bound"):
        scale_of(tiny, update_values(tiny), lambda *_: np.full((4, 24), 1e-20, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_backends_give_back_the_rows_that_they_were_given(kind: str) -> None:
    given = {}

    def remember(weight: object, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> object:
        given[getattr(weight, "name", "")] = values
        return values

    opened = open_backend(LLAMA, kind, change=remember)  # type: ignore[arg-type]
    for name in ("embed", "layer0.qkv", "layer2.down", "logits"):
        values = given[name]
        for first, count in ((0, len(values)), (5, 40), (len(values) - 1, 1), (3, 0)):
            got = opened.backend.read_rows(name, first, count)
            tolerance = 0.1 if "int8" in kind else 0  # Q4_1: a sixteenth of a block's range
            np.testing.assert_allclose(got, values[first : first + count], rtol=0, atol=tolerance)
    opened.backend.close()
