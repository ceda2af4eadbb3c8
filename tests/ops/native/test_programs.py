"""Whole programs: the native backend against the reference, and bit for bit against itself.

In float32 both have the same weights and differ in the order of their sums. In int8 and bfloat16 (on a machine with
tiles) the activations are rounded, so that the reference is only near; but whatever the batch, chunks, page size,
threads and, in float32, the instruction set, the bits of a logit are one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvarto.core.errors import UsageError
from kvarto.models.base import WeightFiles
from kvarto.ops.native import NativeBackend
from tests.models.family_cases import CASES
from tests.models.paged_model import Logits, PagedModel
from tests.ops.native.models import QuantisedFiles, family_files, prompts
from tests.ops.native.native_op import ISAS
from tests.ops.one_op import assert_same_bits

TOLERANCE = 1e-5
"""Of the largest logit; measured up to 3e-6 between float32 sums in different orders."""
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
TYPES = ("Q4_1", "Q8_0", "Q4_0", "Q5_1")
ROUNDED = ["int8", "bf16"] if "amx" in ISAS else ["int8"]


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightFiles]:
    files = family_files(request.param, tmp_path_factory.mktemp(request.param))
    yield files
    files.close()


@pytest.fixture(scope="module", params=["f32", *ROUNDED])
def activations(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(activations: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightFiles]:
    """Gemma 2 for float32: windows, softcaps and norms all over; Llama with several formats in one matrix for int8."""
    folder = tmp_path_factory.mktemp("wide")
    if activations == "f32":
        files = family_files("gemma2", folder)
    else:
        files = QuantisedFiles(family_files("llama3", folder, **WIDE), TYPES)
    yield files
    files.close()


def native_logits(
    files: WeightFiles, asked: list[list[int]], activations: str, *, seed: int = 1, page_size: int = 16,
    max_tokens: int = 96, threads: int = 2, isa: str | None = None,
) -> list[Logits]:  # fmt: skip
    backend = NativeBackend(threads, activations=activations, isa=isa)
    model = PagedModel(files, files.config, page_size=page_size, max_tokens=max_tokens, backend=backend)
    logits = model.logits(asked, seed)
    model.close()
    return logits


def reference_logits(files: WeightFiles, asked: list[list[int]]) -> list[Logits]:
    model = PagedModel(files, files.config, page_size=16, max_tokens=96)
    logits = model.logits(asked, 3)
    model.close()
    return logits


def test_float32_equals_the_reference(family: WeightFiles) -> None:
    asked = prompts()
    for ours, expected in zip(native_logits(family, asked, "f32"), reference_logits(family, asked), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
        np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))


def test_quantised_weights_in_float32_equal_the_reference(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = QuantisedFiles(family_files("llama3", tmp_path_factory.mktemp("q"), **WIDE), TYPES)
    asked = prompts()
    for ours, expected in zip(native_logits(files, asked, "f32"), reference_logits(files, asked), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    files.close()


@pytest.mark.parametrize("rounded", ROUNDED)
def test_rounded_activations_are_near_the_reference(tmp_path_factory: pytest.TempPathFactory, rounded: str) -> None:
    files = QuantisedFiles(family_files("llama3", tmp_path_factory.mktemp("q"), **WIDE), TYPES)
    asked = prompts()
    ours = np.concatenate(native_logits(files, asked, rounded))
    expected = np.concatenate(reference_logits(files, asked))
    files.close()
    # Rounding to 127 steps per group is an error of 0.3 % of a row's spread per product, and there are a dozen.
    assert np.abs(ours - expected).mean() < 0.03 * expected.std()
    assert np.abs(ours - expected).max() > 1e-3, "nothing was rounded: these were float32 products"


def test_bits_do_not_depend_on_batch_chunks_pages_or_threads(files: WeightFiles, activations: str) -> None:
    asked = prompts()
    whole = [native_logits(files, [prompt], activations, max_tokens=96)[0] for prompt in asked]
    ways = [
        {"seed": 2, "page_size": 8, "max_tokens": 13, "threads": 1},
        {"seed": 3, "page_size": 32, "max_tokens": 40, "threads": 3},
        {"seed": 4, "page_size": 64, "max_tokens": 128, "threads": 2},
    ]
    for way in ways:
        for ours, expected in zip(native_logits(files, asked, activations, **way), whole, strict=True):  # type: ignore[arg-type]
            assert_same_bits(ours, expected)


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_bits_do_not_depend_on_which_rows_are_sampled(family: WeightFiles, kind: str) -> None:
    """Behind the last attention only those are computed: every seventh position, so that many steps have none."""
    asked = prompts()
    backends = [NativeBackend(2), NativeBackend(2)] if kind == "native" else [None, None]
    whole, some = (PagedModel(family, family.config, page_size=16, max_tokens=13, backend=each) for each in backends)
    some.is_sampled = lambda position: position % 7 == 3
    for ours, expected in zip(some.logits(asked, 2), whole.logits(asked, 3), strict=True):
        assert_same_bits(ours[3::7], expected[3::7])
        assert np.isnan(np.delete(ours, np.s_[3::7], axis=0)).all()
        assert not np.isnan(expected).any()
    whole.close()
    some.close()


@pytest.mark.parametrize("isa", ISAS)
def test_every_set_computes_the_same(files: WeightFiles, activations: str, isa: str) -> None:
    if activations == "bf16" and isa != "amx":
        with pytest.raises(UsageError, match="AMX"):
            native_logits(files, prompts((3,)), activations, isa=isa)
        return
    asked = prompts((40, 3))
    # Matrix tiles add in another order, in float32 too.
    best_isa = [each for each in ISAS if activations != "f32" or each != "amx"][-1]
    best = native_logits(files, asked, activations, isa=best_isa)
    ours = native_logits(files, asked, activations, isa=isa)
    for a, b in zip(ours, best, strict=True):
        if activations == "f32" and isa not in ("portable", "amx"):
            assert_same_bits(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=(1e-5 if activations == "f32" else 0.05) * np.abs(b).max())
