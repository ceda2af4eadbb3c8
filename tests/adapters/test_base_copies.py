"""An embedding that was written along is a copy only if every value is the base's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from kvarto.adapters.base_copies import copies_in
from kvarto.adapters.targets import targets_of
from kvarto.models.files import open_weights
from tests.adapters.bases import program_of
from tests.adapters.held import array_of
from tests.engine.tiny_model import write_tiny_model


def test_only_equal_values_are_a_copy(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "base")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    files = open_weights(folder)
    compare = copies_in(files, targets_of(program_of()))

    def is_copy(module: str, values: np.ndarray) -> bool:
        array = array_of(values)
        return compare(module, array, array.file)

    assert is_copy("model.embed_tokens", table)
    assert not is_copy("lm_head", table)
    assert not is_copy("model.embed_tokens", table[:-1])
    assert not is_copy("model.other", table)
    table[96, 31] = np.nextafter(table[96, 31], 2)
    assert not is_copy("model.embed_tokens", table)
    files.close()
