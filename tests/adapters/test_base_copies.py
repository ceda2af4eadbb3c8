"""An embedding that was written along is a copy only if every value is the base's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from kvarto.adapters.arrays import LazyArray
from kvarto.adapters.base_copies import copies_in
from kvarto.adapters.targets import targets_of
from kvarto.core.dtype import DType
from kvarto.models.files import open_weights
from tests.adapters.bases import program_of
from tests.engine.tiny_model import write_tiny_model


def array_of(values: np.ndarray) -> LazyArray:
    raw = values.tobytes()
    return LazyArray("embed", values.shape, DType.F32, lambda: raw, lambda start, size: raw[start : start + size])


def test_only_equal_values_are_a_copy(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "base")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    files = open_weights(folder)
    is_copy = copies_in(files, targets_of(program_of()))
    assert is_copy("model.embed_tokens", array_of(table))
    assert not is_copy("lm_head", array_of(table))
    assert not is_copy("model.embed_tokens", array_of(table[:-1]))
    assert not is_copy("model.other", array_of(table))
    table[96, 31] = np.nextafter(table[96, 31], 2)
    assert not is_copy("model.embed_tokens", array_of(table))
    files.close()
