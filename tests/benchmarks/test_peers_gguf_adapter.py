"""What the converter writes is, read again, the adapter that it was given: bands, values and scaling, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.gguf_adapter import convert_adapter
from kvarto.adapters.gguf_files import open_gguf_adapter
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import targets_of
from kvarto.core.errors import UnsupportedAdapter
from tests.adapters.bases import TINY, program_of
from tests.adapters.writer import ALL_LINEAR, Options, write_adapter

BASE = targets_of(program_of())


@pytest.mark.parametrize("dtypes", [("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("BF16", "F32")])
@pytest.mark.parametrize("alpha", [8, 3.5, -1])
def test_a_round_trip_changes_nothing(tmp_path: Path, dtypes: tuple[str, str], alpha: float) -> None:
    write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR, rank=3, alpha=alpha, dtypes=dtypes))
    convert_adapter(tmp_path / "a", tmp_path / "a.gguf", BASE)
    opened = open_peft_adapter(tmp_path / "a", BASE, [tmp_path])
    converted = open_gguf_adapter(tmp_path / "a.gguf", BASE, [tmp_path])
    given, read = opened.adapter, converted.adapter
    assert [update.target for update in read.updates] == [update.target for update in given.updates]
    with converted.tensors_file.opened() as file, opened.tensors_file.opened() as other_file:
        for update, original in zip(read.updates, given.updates, strict=True):
            assert update.scaling == pytest.approx(original.scaling)  # alpha is a float32 there
            for array, other in zip(update.arrays(), original.arrays(), strict=True):
                assert array.dtype is other.dtype
                assert np.array_equal(array.read(file), other.read(other_file))


BEYOND: dict[str, dict[str, Any]] = {
    "alphas": {"alpha_pattern": {"k_proj": 2.0}, "modules": ALL_LINEAR},
    "alpha": {"alpha": 0},
    "bias": {"lora_bias": True},
    "magnitude": {"use_dora": True},
    "lm_head": {"modules": ("lm_head",)},
}


@pytest.mark.parametrize("options", BEYOND.values(), ids=BEYOND)
def test_what_the_format_cannot_say_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    write_adapter(tmp_path / "a", BASE, Options(**options))
    with pytest.raises(UnsupportedAdapter, match="convert"):
        convert_adapter(tmp_path / "a", tmp_path / "a.gguf", BASE)


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    base = targets_of(program_of(TINY | {"model_type": "qwen2"}))
    write_adapter(tmp_path / "a", base, Options())
    with pytest.raises(UnsupportedAdapter, match="`qwen2`"):
        convert_adapter(tmp_path / "a", tmp_path / "a.gguf", base)
