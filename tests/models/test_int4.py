"""Models of 4 bits in safetensors: values and packed rows against each layout's own statement, code by code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvarto.core.dtype import DType
from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.core.weight_format import WeightFormat
from kvarto.models import base
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.files import open_weights
from kvarto.models.loader import check_tensors, load_weights
from kvarto.models.packing import format_names, pack_matrices
from kvarto.ops.native import NativeBackend
from tests.models import int4_files
from tests.models.int4_files import FFN, HIDDEN, SHAPES, all_weights, awq, gptq, gptq_v2, half, pack_quantized
from tests.models.memory_store import MemoryStore
from tests.models.paged_model import PagedModel
from tests.models.test_packing import keep_files
from tests.ops.native.file_rows import meaning

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
GROUP = {
    "targets": ["Linear"], "input_activations": None, "output_activations": None,
    "weights": {
        "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128, "dynamic": False,
    },
}  # fmt: skip
PACK_QUANTIZED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {},
}  # fmt: skip


def with_group(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    weights = GROUP["weights"] | changes  # type: ignore[operator]
    return config | {"config_groups": {"group_0": GROUP | {"weights": weights}}}


LAYOUTS = {
    "awq": (awq, lambda size: AWQ | {"group_size": size}),
    "gptq": (gptq, lambda size: GPTQ | {"group_size": size}),
    "gptq v2": (gptq_v2, lambda size: GPTQ | {"group_size": size, "checkpoint_format": "gptq_v2"}),
    "pack-quantized": (pack_quantized, lambda size: with_group(PACK_QUANTIZED, group_size=size)),
}


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_scale_times_code_less_zero(layout: str, group_size: int, tmp_path: Path) -> None:
    write, config = LAYOUTS[layout]
    weights = all_weights(group_size)
    files = open_weights(int4_files.write_model(tmp_path, config(group_size), write, weights))
    assert "quantization_config" not in files.config
    for name, weight in weights.items():
        info = files.tensors[f"model.layers.0.{name}.weight"]
        num_rows, num_columns = SHAPES[name]
        size = num_columns if group_size < 0 else group_size
        assert (info.shape, info.file_dtype, info.group_size) == (SHAPES[name], "INT4", size)
        expected = weight.values()
        for start, stop in ((0, num_rows), (0, 1), (5, 12), (16, 48), (num_rows - 3, num_rows)):
            assert np.array_equal(files.read_rows(info.name, start, stop), expected[start:stop])
            raw = files.read_raw_rows(info.name, start, stop)
            assert np.array_equal(meaning(WeightFormat.INT4, raw, size), expected[start:stop])
        assert np.array_equal(files.read_columns(info.name, 3, 40), expected[:, 3:40])
    assert files.read_rows("model.norm.weight", 0, 1).all()
    files.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_packed_without_loss(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 3200)
    write, config = LAYOUTS[layout]
    weights = all_weights(64)
    files = open_weights(int4_files.write_model(tmp_path, config(64), write, weights))
    program = build_program(parse_config(files.config), DType.F32)
    check_tensors(program, files)
    program = pack_matrices(program, files, keep_files)
    assert format_names(program) == "f16+int4-64"
    store = MemoryStore(program)
    load_weights(program, files, store)
    for name, sources in (("qkv", ("q_proj", "k_proj", "v_proj")), ("gate_up", ("gate_proj", "up_proj"))):
        for index, source in enumerate(sources):
            weight = weights[f"{'self_attn' if name == 'qkv' else 'mlp'}.{source}"]
            rows = store.rows(f"layer0.{name}", index)
            assert np.array_equal(meaning(WeightFormat.INT4, rows, 64), weight.values())
    files.close()


def test_symmetric_weights_have_their_zero_in_the_middle(tmp_path: Path) -> None:
    weights = all_weights(128, zero=8)
    config = with_group(PACK_QUANTIZED, symmetric=True)
    files = open_weights(int4_files.write_model(tmp_path, config, pack_quantized, weights))
    down = weights["mlp.down_proj"]
    assert np.array_equal(files.read_rows("model.layers.0.mlp.down_proj.weight", 0, HIDDEN), down.values())
    files.close()


def test_zero_points_as_signed_bytes(tmp_path: Path) -> None:
    def write(weight: int4_files.Quantised) -> dict[str, torch.Tensor]:
        signed = torch.from_numpy((weight.zeros - 8).astype(np.int8))
        return pack_quantized(weight) | {"weight_zero_point": signed}

    weights = all_weights(128)
    files = open_weights(int4_files.write_model(tmp_path, PACK_QUANTIZED, write, weights))
    down = weights["mlp.down_proj"]
    assert np.array_equal(files.read_rows("model.layers.0.mlp.down_proj.weight", 0, HIDDEN), down.values())
    files.close()


def shuffled(weights: dict[str, int4_files.Quantised]) -> dict[str, int4_files.Quantised]:
    rng = np.random.default_rng(5)
    return {name: replace(weight, groups=rng.permutation(weight.groups)) for name, weight in weights.items()}


def test_columns_out_of_order_are_widened_or_refused(tmp_path: Path) -> None:
    weights = shuffled(all_weights(64))
    config = GPTQ | {"group_size": 64, "desc_act": True}
    files = open_weights(int4_files.write_model(tmp_path, config, gptq, weights))
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(files.read_rows(name, 0, FFN), weights["mlp.up_proj"].values())
    program = build_program(parse_config(files.config), DType.F32)
    with pytest.raises(UnsupportedModel, match=r"q_proj\.weight` were quantised out of order .*`--dtype bf16`"):
        pack_matrices(program, files, lambda file_format: WeightFormat.Q8_0)
    widened = pack_matrices(program, files, lambda file_format: WeightFormat.F32)
    store = MemoryStore(widened)
    load_weights(widened, files, store)
    assert store.rows("layer0.gate_up", 1).tobytes() == weights["mlp.up_proj"].values().tobytes()
    files.close()


def test_an_order_that_was_never_set_is_ascending(tmp_path: Path) -> None:
    weights = all_weights(64)
    unset = {name: replace(weight, groups=np.full_like(weight.groups, -1)) for name, weight in weights.items()}
    files = open_weights(int4_files.write_model(tmp_path, GPTQ | {"group_size": 64}, gptq, unset))
    expected = weights["mlp.down_proj"].values()
    assert np.array_equal(files.read_rows("model.layers.0.mlp.down_proj.weight", 0, HIDDEN), expected)
    files.close()


@pytest.mark.parametrize(("scale", "fits"), [(0.0078125, True), (1e-6, False), (1e6, False)])
def test_scales_that_float16_cannot_hold_are_refused(scale: float, fits: bool, tmp_path: Path) -> None:
    """bfloat16 has a wider range; within float16's, every one of its scales is exact."""

    def write(weight: int4_files.Quantised) -> dict[str, torch.Tensor]:
        scales = half(np.full(weight.scales.shape, scale), torch.bfloat16)
        return pack_quantized(weight) | {"weight_scale": scales}

    files = open_weights(int4_files.write_model(tmp_path, PACK_QUANTIZED, write, all_weights(128)))
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.isfinite(files.read_rows(name, 0, 16)).all()
    if fits:
        files.read_raw_rows(name, 0, 16)
    else:
        with pytest.raises(UnsupportedModel, match=r"down_proj\.weight_scale` has scales that float16 cannot hold"):
            files.read_raw_rows(name, 0, 16)
    files.close()


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_zeros_may_be_left(value: float, tmp_path: Path) -> None:
    """Writers of GPTQ add them to every module, also where the model has none; any other bias is a mistake."""
    extra = {f"model.layers.0.{name}.bias": torch.full((shape[0],), value).half() for name, shape in SHAPES.items()}
    files = open_weights(int4_files.write_model(tmp_path, GPTQ, gptq, all_weights(128), extra))
    program = build_program(parse_config(files.config), DType.F32)
    if value == 0.0:
        check_tensors(program, files)
    else:
        with pytest.raises(UnsupportedModel, match=r"7 tensors that `llama` has no use for"):
            check_tensors(program, files)
    files.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "fp8"}, "`quant_method` = 'fp8'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"load_in_8bit": True}, "`quant_method` = None"),
        ([1], r"`quantization_config` = \[1\]"),
        (AWQ | {"bits": 8}, "`bits` = 8"),
        (AWQ | {"bits": True}, "`bits` = True"),
        (AWQ | {"version": "gemv"}, "`version` = 'gemv'"),
        (AWQ | {"version": "marlin"}, "'marlin'"),
        (AWQ | {"group_size": "128"}, "`group_size` = '128'"),
        (GPTQ | {"bits": 3}, "`bits` = 3"),
        (GPTQ | {"is_marlin_format": True}, "`is_marlin_format` = True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "`checkpoint_format` = 'marlin'"),
        (GPTQ | {"dynamic": {r"+:.*\.down": {"bits": 8}}}, "8 bits for `dynamic` modules"),
        (PACK_QUANTIZED | {"format": "float-quantized"}, "`format` = 'float-quantized'"),
        (PACK_QUANTIZED | {"format": "int-quantized"}, "'int-quantized'"),
        (PACK_QUANTIZED | {"kv_cache_scheme": {"num_bits": 8}}, "`kv_cache_scheme`"),
        (PACK_QUANTIZED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "`sparsity_config.format`"),
        (PACK_QUANTIZED | {"config_groups": {}}, "`config_groups`"),
        (PACK_QUANTIZED | {"config_groups": {"W8A8": ["Linear"]}}, "`config_groups.W8A8`"),
        (PACK_QUANTIZED | {"config_groups": {"g": GROUP | {"input_activations": {"num_bits": 8}}}}, "activations"),
        (with_group(PACK_QUANTIZED, num_bits=8), "`num_bits` = 8"),
        (with_group(PACK_QUANTIZED, type="float"), "`type` = 'float'"),
        (with_group(PACK_QUANTIZED, strategy="tensor"), "`strategy` = 'tensor'"),
    ],
)  # fmt: skip
def test_other_schemes_are_refused_by_name(config: Any, says: str, tmp_path: Path) -> None:
    folder = int4_files.write_model(tmp_path, config, awq, all_weights(128))
    with pytest.raises(UnsupportedModel, match=says) as caught:
        open_weights(folder)
    assert "as GGUF" in str(caught.value), "a refusal says what would work"


@pytest.mark.parametrize("layout", ["awq", "gptq", "pack-quantized"])
@pytest.mark.parametrize("harm", ["drop", "shorten", "flatten", "retype"])
def test_tensors_that_do_not_fit_together_are_named(layout: str, harm: str, tmp_path: Path) -> None:
    """Whichever tensor of a module is missing, too short, of another rank or another type."""
    write, config = LAYOUTS[layout]
    parts = set(write(all_weights(128)["mlp.up_proj"])) - {"weight_shape"}
    for part in sorted(parts):
        if (part, harm) == ("g_idx", "drop") or (part, harm) == ("weight_zero_point", "drop"):
            continue  # what a file may leave out

        def harmed(weight: int4_files.Quantised, part: str = part) -> dict[str, torch.Tensor]:
            tensors = write(weight)
            tensor = tensors.pop(part)
            if harm != "drop":
                changed = {"shorten": tensor[: len(tensor) // 2], "flatten": tensor.reshape(1, -1, 1)}
                tensors[part] = changed.get(harm, tensor.to(torch.int64)).contiguous()
            return tensors

        weights = {"mlp.down_proj": all_weights(64)["mlp.down_proj"]}
        folder = int4_files.write_model(tmp_path / part, config(64), harmed, weights)
        with pytest.raises(BadFile, match="down_proj|no tensor is named"):
            open_weights(folder)


def test_groups_that_names_no_group_are_refused(tmp_path: Path) -> None:
    weights = all_weights(64)
    weights["mlp.up_proj"].groups[7] = 2
    with pytest.raises(BadFile, match=r"up_proj\.g_idx` names other groups than the 2"):
        open_weights(int4_files.write_model(tmp_path, GPTQ | {"group_size": 64}, gptq, weights))


def test_group_sizes_that_are_not_as_announced(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="groups of 32 were announced"):
        open_weights(int4_files.write_model(tmp_path / "a", AWQ | {"group_size": 32}, awq, all_weights(64)))
    with pytest.raises(UnsupportedModel, match="groups of 16 columns; multiples of 32 are built in"):
        open_weights(int4_files.write_model(tmp_path / "b", AWQ | {"group_size": 16}, awq, all_weights(16)))


def test_files_are_closed_after_a_refusal(tmp_path: Path) -> None:
    folder = int4_files.write_model(tmp_path, {"quant_method": "fp8"}, awq, all_weights(128))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(UnsupportedModel):
            open_weights(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_every_layout_of_the_same_weights_gives_the_same_logits(tmp_path: Path) -> None:
    """Natively, bit for bit; and what the reference backend computes from their values, but for the order of sums."""
    weights, prompt = all_weights(64), [list(np.random.default_rng(9).integers(0, int4_files.VOCAB, 23))]
    found, expected = [], None
    torch.manual_seed(3)
    embed = {"model.embed_tokens.weight": torch.randn(int4_files.VOCAB, HIDDEN).half()}
    for layout, (write, config) in LAYOUTS.items():
        files = open_weights(int4_files.write_model(tmp_path / layout, config(64), write, weights, embed))
        for backend in (NativeBackend(2, activations="f32"), None)[: 1 if expected is not None else 2]:
            model = PagedModel(files, files.config, page_size=8, max_tokens=16, backend=backend)
            logits = model.logits(prompt, seed=4)[0]
            model.close()
            if backend is None:
                expected = logits
            else:
                found.append(logits)
        files.close()
    assert expected is not None
    for logits in found:
        assert np.array_equal(logits, found[0])
        # Some hundred float32 sums of 256 products deep.
        assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
