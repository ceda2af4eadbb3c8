"""Adapters to measure with are ones that the openers take, of exactly the size that they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.random_adapter import ALL_LINEAR, QV, RandomAdapter
from kvarto.adapters.targets import targets_of
from tests.adapters.bases import program_of
from tests.adapters.held import held


@pytest.mark.parametrize(("ends", "num_updates"), [(ALL_LINEAR, 14), (QV, 4)])
@pytest.mark.parametrize("is_hole", [False, True])
def test_it_is_an_adapter(tmp_path: Path, ends: tuple[str, ...], num_updates: int, is_hole: bool) -> None:
    base = targets_of(program_of())
    written = RandomAdapter(ends, rank=5, seed=1, is_hole=is_hole)
    written.write(tmp_path / "a", base)
    adapter = held(open_peft_adapter(tmp_path / "a", base, [tmp_path]))
    assert len(adapter.updates) == num_updates
    assert {(update.rank, update.scaling) for update in adapter.updates} == {(5, 1.0)}
    assert adapter.size_bytes == sum(2 * a * b for _, (a, b) in written.tensors(base))
    is_zero = all(not update.lora_b.values().any() for update in adapter.updates)
    assert is_zero == is_hole


def test_seeds_are_different_adapters_and_equal_ones_are_equal(tmp_path: Path) -> None:
    base = targets_of(program_of())
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        RandomAdapter(QV, 2, seed).write(tmp_path / name, base)
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1]
    assert files[0] != files[2]
