"""The loader: bits as PyTorch rounds them, transforms kept exactly, mismatches refused before anything is stored."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvarto.core.buffers import Source, Transform, Weight
from kvarto.core.dtype import DType
from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.core.program import Program
from kvarto.models import base
from kvarto.models.base import Float32, TensorInfo, WeightFiles
from kvarto.models.convert import to_bfloat16
from kvarto.models.loader import load_weights
from tests.models.memory_store import MemoryStore

TORCH = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


class FakeFiles(WeightFiles):
    """Tensors in memory; remembers the largest read."""

    def __init__(self, tensors: dict[str, Float32]) -> None:
        self.path = Path("fake")
        self.config = {}
        self.arrays = tensors
        self.tensors = {name: TensorInfo(name, array.shape, "F32", array.nbytes) for name, array in tensors.items()}
        self.largest_read_bytes = 0

    def read_rows(self, name: str, start: int, stop: int) -> Float32:
        rows = self.arrays[name].reshape(-1, self.arrays[name].shape[-1])[start:stop].copy()
        self.largest_read_bytes = max(self.largest_read_bytes, rows.nbytes)
        return rows

    def close(self) -> None:
        pass


def program_of(*weights: Weight) -> Program:
    return Program("test", {}, {weight.name: weight for weight in weights}, (), (), 1, 1, 1)


def load(files: WeightFiles, *weights: Weight) -> dict[str, bytes]:
    program, stored = program_of(*weights), list[int]()
    store = MemoryStore(program)
    load_weights(program, files, store, stored.append)
    assert sum(stored) == sum(weight.size_bytes for weight in weights)
    return {name: bytes(raw) for name, raw in store.row_major.items()}


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("dtype", TORCH)
def test_bits_are_pytorchs(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 1000)
    q, k, embed, bias = normal(24, 16), normal(8, 16, seed=1), normal(50, 16, seed=2), normal(24, seed=3)
    files = FakeFiles({"q": q, "k": k, "embed": embed, "bias": bias})
    weights = (
        Weight("qk", (32, 16), dtype, (Source("q"), Source("k"))),
        Weight("embed", (50, 16), dtype, (Source("embed"),)),
        Weight("bias", (24,), DType.F32, (Source("bias"),)),
    )
    found = load(files, *weights)
    expected = torch.from_numpy(np.concatenate([q, k])).to(TORCH[dtype])
    assert found["qk"] == bits_of(expected)
    assert found["embed"] == bits_of(torch.from_numpy(embed).to(TORCH[dtype]))
    assert found["bias"] == bias.tobytes()
    assert files.largest_read_bytes <= 1000


def test_every_bfloat16_neighbourhood() -> None:
    """All upper halves, with the lower halves around the tie: equal to PyTorch's bits, NaN aside."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        ours = to_bfloat16(values)
        theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
        is_nan = np.isnan(values)
        assert np.array_equal(ours[~is_nan], theirs[~is_nan])
        back = (ours[is_nan].astype(np.uint32) << 16).view(np.float32)
        assert np.isnan(back).all()


def test_transforms_and_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 120)
    matrix, norm = normal(10, 18), normal(12, seed=1)
    files = FakeFiles({"m": matrix, "n": norm})
    weights = (
        Weight("t", (18, 10), DType.F32, (Source("m", Transform.TRANSPOSE),)),
        Weight("band", (9, 10), DType.F32, (Source("m", Transform.TRANSPOSE, rows=(3, 12)),)),
        Weight("rows", (5, 18), DType.F32, (Source("m", rows=(8, 10)), Source("m", rows=(0, 3)))),
        Weight("n", (12,), DType.F32, (Source("n", Transform.ADD_ONE),)),
        Weight("part", (4,), DType.F32, (Source("n", rows=(2, 6)),)),
        Weight("experts", (2, 5, 18), DType.F32, (Source("m"),)),
    )
    found = load(files, *weights)
    assert found["t"] == np.ascontiguousarray(matrix.T).tobytes()
    assert found["band"] == np.ascontiguousarray(matrix.T[3:12]).tobytes()
    assert found["rows"] == np.concatenate([matrix[8:10], matrix[0:3]]).tobytes()
    assert found["n"] == (norm + np.float32(1)).tobytes()
    assert found["part"] == norm[2:6].tobytes()
    assert found["experts"] == matrix.tobytes()


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (Weight("w", (4, 3), DType.F32, (Source("gone"),)), "lacks 1 tensors that `test` needs: `gone`"),
        (Weight("w", (5, 3), DType.F32, (Source("m"),)), r"`w` \[5, 3\] cannot be made of `m` \[4, 3\]"),
        (Weight("w", (3, 4), DType.F32, (Source("m"),)), "cannot be made of"),
        (Weight("w", (4, 3), DType.F32, (Source("m", Transform.TRANSPOSE),)), "cannot be made of"),
        (Weight("w", (12,), DType.F32, (Source("m"),)), "cannot be made of"),
        (Weight("w", (8, 3), DType.F32, (Source("m"), Source("m"), Source("m"))), "cannot be made of"),
        (Weight("w", (2, 3), DType.F32, (Source("m", rows=(3, 5)),)), "rows 3 to 5"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_stored(weight: Weight, says: str) -> None:
    files = FakeFiles({"m": normal(4, 3), "ok": normal(2)})
    good = Weight("good", (2,), DType.F32, (Source("ok"),))
    store = MemoryStore(program_of(good, weight))
    with pytest.raises(BadFile, match=says):
        load_weights(store.program, files, store)
    assert not any(store.row_major.values())


def test_tensors_without_use_are_refused() -> None:
    weight = Weight("w", (4, 3), DType.F32, (Source("m"),))
    known = {"layers.0.rotary_emb.inv_freq": normal(2), "h.0.attn.bias": normal(2, 2), "lm_head.weight": normal(4, 3)}
    load(FakeFiles({"m": normal(4, 3)} | known), weight)
    with pytest.raises(UnsupportedModel, match=r"1 tensors that `test` has no use for: `model\.extra\.bias`"):
        load(FakeFiles({"m": normal(4, 3), "model.extra.bias": normal(3)}), weight)


def test_values_beyond_f16_are_refused() -> None:
    values = normal(4, 3)
    values[2, 1] = 65536.0
    weight = Weight("w", (4, 3), DType.F16, (Source("m"),))
    with pytest.raises(UnsupportedModel, match=r"`w` has values beyond the range of f16.*bf16"):
        load(FakeFiles({"m": values}), weight)
    values[2, 1] = -65504.0
    load(FakeFiles({"m": values}), weight)


class Slow(MemoryStore):
    """Remembers how many weights were being stored at once."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self.most_at_once = 0

    def store_weight(self, name: str, offset_bytes: int, data: NDArray[np.uint8]) -> None:
        with self._lock:
            assert name not in self._busy, "two threads store one weight"
            self._busy.add(name)
            self.most_at_once = max(self.most_at_once, len(self._busy))
        time.sleep(0.002)
        super().store_weight(name, offset_bytes, data)
        with self._lock:
            self._busy.remove(name)


def test_threads_share_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 256)
    tensors = {f"t{i}": normal(20, 16, seed=i) for i in range(12)}
    program = program_of(*(Weight(name, (20, 16), DType.F32, (Source(name),)) for name in tensors))
    store = Slow(program)
    load_weights(program, FakeFiles(tensors), store, num_threads=4)
    assert 1 < store.most_at_once <= 4
    assert all(store.row_major[name] == array.tobytes() for name, array in tensors.items())


def test_the_first_error_ends_all_threads() -> None:
    tensors = {f"t{i}": normal(4, 4, seed=i) for i in range(50)}
    tensors["t3"][0, 0] = 1e6
    program = program_of(*(Weight(name, (4, 4), DType.F16, (Source(name),)) for name in tensors))
    store = Slow(program)
    with pytest.raises(UnsupportedModel, match="`t3` has values beyond"):
        load_weights(program, FakeFiles(tensors), store, num_threads=2)
    assert sum(map(bool, store.row_major.values())) < len(tensors), "what had not begun is not loaded any more"
