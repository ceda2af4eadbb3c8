"""What is computed in 8 bits, which instruction set runs, and what matrices are kept in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvarto.core.buffers import WeightPart
from kvarto.core.dtype import DType
from kvarto.core.errors import UnsupportedModel, UsageError
from kvarto.core.ops import Attention, Experts, Linear, Logits, Route
from kvarto.core.program import Program
from kvarto.core.weight_format import WeightFormat
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.ops.native import NativeBackend
from kvarto.ops.native.isa import choose_isa
from kvarto.ops.native.numerics import decide_numerics
from kvarto.ops.native.weight_formats import kept_format
from tests.ops.native.native_op import ISAS
from tests.ops.opened import LLAMA, MIXTRAL, packed

NO_TILES = "avx512"


def program_of(config: dict[str, object], format: WeightFormat) -> Program:
    return packed(build_program(parse_config(config), DType.F32), format)


def test_every_product_of_quantised_matrices_is_int8() -> None:
    program = program_of(LLAMA, WeightFormat.Q4_1)
    numerics = decide_numerics(program, "auto", NO_TILES)
    assert numerics.products_of == {op.out: "int8" for op in program.ops if isinstance(op, Linear | Logits)}
    read = {op.x for op in program.ops if isinstance(op, Linear | Logits)}
    # A head of 16 dims holds no whole group of 32, so that attention writes float32.
    attended = {op.out for op in program.ops if isinstance(op, Attention)}
    assert numerics.forms == dict.fromkeys(read - attended, "int8")
    assert not numerics.is_exact


def test_tiles_multiply_in_bfloat16() -> None:
    program = program_of(LLAMA, WeightFormat.Q4_1)
    numerics = decide_numerics(program, "bf16", "amx")
    assert numerics.products_of == {op.out: "bf16" for op in program.ops if isinstance(op, Linear | Logits)}
    attended = {op.out for op in program.ops if isinstance(op, Attention)}
    assert numerics.forms == {
        op.x: numerics.products_of[op.out]
        for op in program.ops
        if isinstance(op, Linear | Logits) and op.x not in attended
    }
    with pytest.raises(UsageError, match="--activations bf16"):
        decide_numerics(program, "bf16", NO_TILES)
    assert decide_numerics(program, "auto", "amx") == numerics
    assert decide_numerics(program, "auto", NO_TILES) == decide_numerics(program, "int8", "amx")


def test_one_part_of_16_bits_keeps_a_product_and_what_it_reads_in_float32() -> None:
    program = program_of(LLAMA, WeightFormat.Q4_1)
    name = next(op.weight for op in program.ops if isinstance(op, Linear))
    weight = program.weights[name]
    half = weight.shape[0] // 2
    parts = (WeightPart(WeightFormat.Q4_1, 0, half), WeightPart(WeightFormat.BF16, 0, weight.shape[0] - half))
    program = replace(program, weights=program.weights | {name: replace(weight, parts=parts)})
    numerics = decide_numerics(program, "auto", NO_TILES)
    first = next(op for op in program.ops if isinstance(op, Linear))
    assert numerics.products(first.out) == 0
    assert numerics.form(first.x, 64) == "f32"
    assert len(numerics.products_of) > 3


def test_what_experts_and_routers_read_stays_float32() -> None:
    program = program_of(MIXTRAL, WeightFormat.Q8_0)
    numerics = decide_numerics(program, "auto", NO_TILES)
    for op in program.ops:
        if isinstance(op, Experts | Route):
            assert numerics.forms.keys().isdisjoint(op.reads)


@pytest.mark.parametrize("activations", ["auto", "f32"])
def test_float32_models_are_exact(activations: str) -> None:
    numerics = decide_numerics(program_of(LLAMA, WeightFormat.F32), activations, ISAS[-1])
    assert numerics.is_exact
    assert not numerics.forms


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16])
@pytest.mark.parametrize("activations", ["auto", "f32"])
def test_floats_are_multiplied_in_parts_where_there_are_tiles(activations: str, format: WeightFormat) -> None:
    program = program_of(LLAMA, format)
    numerics = decide_numerics(program, activations, "amx")
    linears = [op for op in program.ops if isinstance(op, Linear | Logits)]
    whole = [op for op in linears if program.weights[op.weight].shape[-1] % 32 == 0]
    assert whole, "no matrix of whole groups is asked about"
    assert numerics.products_of == {op.out: "bf16x3" for op in whole}
    assert numerics.is_exact
    assert not numerics.is_plain
    assert decide_numerics(program, activations, NO_TILES).is_plain


def test_codes_with_float32_activations_keep_the_chain_of_every_set() -> None:
    assert decide_numerics(program_of(LLAMA, WeightFormat.Q4_1), "f32", "amx").is_plain


def test_int8_where_there_is_nothing_to_gain_is_refused() -> None:
    with pytest.raises(UsageError, match="--activations int8"):
        decide_numerics(program_of(LLAMA, WeightFormat.BF16), "int8", NO_TILES)


def test_kv_is_float32_where_all_is() -> None:
    backend = NativeBackend(activations="auto")
    assert backend.default_kv_dtype(program_of(LLAMA, WeightFormat.F16)) is DType.F32
    assert "/f32/" in backend.fingerprint
    assert backend.default_kv_dtype(program_of(LLAMA, WeightFormat.Q4_1)).itemsize == 2
    assert "/f32/" not in backend.fingerprint
    assert backend.fingerprint.endswith(f"/{ISAS[-1]}")


def test_the_environment_names_a_set_or_is_refused() -> None:
    assert choose_isa({}) == ISAS[-1]
    for isa in ISAS:
        assert choose_isa({"KVARTO_ISA": isa}) == isa
    with pytest.raises(UsageError, match=r"KVARTO_ISA=sse9.*portable"):
        choose_isa({"KVARTO_ISA": "sse9"})


def test_formats_are_kept_widened_or_converted() -> None:
    assert kept_format("Q4_K", "auto") is WeightFormat.Q4_K
    assert kept_format("BF16", "auto") is WeightFormat.BF16
    assert kept_format("IQ4_XS", "auto") is WeightFormat.Q8_0
    assert kept_format("Q4_K", "bf16") is WeightFormat.BF16
    with pytest.raises(UnsupportedModel, match="F64"):
        kept_format("F64", "auto")
