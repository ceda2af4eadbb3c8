"""A folder of PEFT's means what its matrices say: the description computes y = Wx + s B A x for each module."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.files import AdapterLimits
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import BaseTargets, Role, targets_of
from kvarto.core.errors import AdapterError, AdapterMismatch, BadAdapter, UnsupportedAdapter
from tests.adapters.bases import GPT2, TINY, program_of
from tests.adapters.held import held
from tests.adapters.parity import lookup, product
from tests.adapters.writer import ALL_LINEAR, QV, Options, Written, as_type, write_adapter

SPLIT = targets_of(program_of())
FUSED = targets_of(program_of(model_type="phi3", pad_token_id=0))
TIED = targets_of(program_of(TINY | {"model_type": "llama", "tie_word_embeddings": True}))
ATTENTION = "model.layers.0.self_attn"


def adapter_of(written: Written, base: BaseTargets = SPLIT) -> Adapter:
    return held(opened(written, base))


def opened(written: Written, base: BaseTargets = SPLIT, **options: Any) -> OpenedAdapter:
    return open_peft_adapter(written.folder, base, [written.folder.parent], **options)


def is_parity(written: Written, base: BaseTargets) -> None:
    """Each module of the adapter, in its rows of a random base, against the formula of its own matrices."""
    adapter = adapter_of(written, base)
    rng = np.random.default_rng(1)
    weights = {t.weight: t for t in base.by_module.values() if t.role is not Role.EMBED}
    heights = {
        name: max(t.first_row + t.out_width for t in base.by_module.values() if t.weight == name) for name in weights
    }
    for module, update in written.updates.items():
        target = base.find(module)
        matrix = rng.normal(size=(heights[target.weight], target.in_width))
        x = rng.normal(size=(3, target.in_width))
        w = matrix[target.first_row : target.first_row + target.out_width]
        y = x @ w.T + update.scaling * (
            x @ update.lora_a.T @ update.lora_b.T + (0 if update.bias is None else update.bias)
        )
        if update.magnitude is not None:
            y *= update.magnitude / np.linalg.norm(w + update.scaling * update.lora_b @ update.lora_a, axis=1)
        found = product(adapter, target.weight, matrix, x, target.role)
        band = slice(target.first_row, target.first_row + target.out_width)
        np.testing.assert_allclose(found[:, band], y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("base", [SPLIT, FUSED], ids=["split", "fused"])
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(ALL_LINEAR, rank=1, alpha=-0.5),
        Options(ALL_LINEAR, rank=7, use_rslora=True, dtypes=("BF16", "F32")),
        Options(ALL_LINEAR, rank_pattern={"k_proj": 3, "1.mlp.down_proj": 16}, alpha_pattern={"k_proj": 2}),
        Options(ALL_LINEAR, use_dora=True, dtypes=("F16", "F16")),
        Options(ALL_LINEAR, lora_bias=True, dtypes=("F16", "BF16"), adapter=".default"),
        Options((f"{ATTENTION}.qkv_proj", "model.layers.1.mlp.gate_up_proj"), rank=5),
        Options(("lm_head", *QV), rank=9, prefix="base_model.model.base_model.model."),
        Options(tuple(m.removeprefix("model.") for m in ALL_LINEAR), prefix=""),
        Options(tuple(m.replace("model.", "model.language_model.") for m in QV)),
    ],
)  # fmt: skip
def test_the_description_computes_what_the_file_means(base: BaseTargets, options: Options, tmp_path: Path) -> None:
    if "language_model" in options.modules[0]:
        names = [name.replace("model.language_model.", "model.") for name in options.modules]
        written = write_adapter(tmp_path / "a", base, Options(names))
        written.tensors = {n.replace(".layers", ".language_model.layers"): t for n, t in written.tensors.items()}
        written.save()
    else:
        written = write_adapter(tmp_path / "a", base, options)
    is_parity(written, base)


@pytest.mark.parametrize("name", ["qkv_proj", "c_attn", "W_pack", "query_key_value"])
def test_fused_tensors_are_the_parts_one_below_the_other(name: str, tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", SPLIT, Options((f"{ATTENTION}.{name}",)))
    is_parity(written, SPLIT)
    warnings = opened(written).adapter.warnings
    assert bool(warnings) == (name == "query_key_value")


def test_gpt2_keeps_the_direction_of_a_and_b(tmp_path: Path) -> None:
    base = targets_of(program_of(GPT2))
    modules = [f"transformer.h.1.{m}" for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    is_parity(write_adapter(tmp_path / "a", base, Options(modules, config={"fan_in_fan_out": True})), base)


def test_embeddings_are_updated_by_columns_of_a(tmp_path: Path) -> None:
    for base in (SPLIT, TIED):
        written = write_adapter(tmp_path / "a", base, Options(("model.embed_tokens", "lm_head", *QV), rank=3))
        is_parity_of = written.updates["model.embed_tokens"]
        adapter = adapter_of(written, base)
        table = np.random.default_rng(2).normal(size=(97, 32))
        expected = table + is_parity_of.scaling * (is_parity_of.lora_b @ is_parity_of.lora_a).T
        np.testing.assert_allclose(lookup(adapter, "embed", table, [5, 96, 0]), expected[[5, 96, 0]], rtol=1e-12)
        roles = [update.target.role for update in adapter.updates if update.target.role is not Role.LINEAR]
        assert sorted(roles) == [Role.EMBED, Role.LOGITS]


def test_values_keep_their_type_and_updates_their_order(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", SPLIT, Options(ALL_LINEAR, dtypes=("BF16", "F16")))
    adapter = opened(written).adapter
    assert {str(u.lora_a.dtype) for u in adapter.updates} == {"bf16"}
    assert {str(u.lora_b.dtype) for u in adapter.updates} == {"f16"}
    assert adapter.size_bytes == sum(array.nbytes for _, array in written.tensors.values())
    written.tensors = dict(reversed(written.tensors.items()))
    written.save()
    again = opened(written).adapter
    assert [u.target for u in again.updates] == [u.target for u in adapter.updates]
    assert (adapter.max_rank, adapter.warnings) == (4, ())


# Trainable tokens, invocation, tying.


def with_tokens(folder: Path, base: BaseTargets, ids: Any, rows: dict[str, int], **config: Any) -> Written:
    written = write_adapter(folder, base, Options(config={"trainable_token_indices": ids} | config))
    for module, count in rows.items():
        stored, _ = as_type(np.random.default_rng(4).normal(size=(count, 32)), "F32")
        written.tensors[f"base_model.model.{module}.token_adapter.trainable_tokens_delta"] = stored
    written.save()
    return written


def test_token_rows_replace_the_bases(tmp_path: Path) -> None:
    written = with_tokens(tmp_path / "a", SPLIT, [96, 3], {"model.embed_tokens": 2})
    (rows,) = adapter_of(written).token_rows
    assert (rows.token_ids, rows.roles) == ((96, 3), (Role.EMBED,))
    table = np.zeros((97, 32))
    found = lookup(adapter_of(written), "embed", table, [3, 96, 4])
    np.testing.assert_array_equal(found, [rows.rows.values()[1], rows.rows.values()[0], table[4]])


def test_tied_output_rows_follow_unless_they_have_their_own(tmp_path: Path) -> None:
    (rows,) = opened(with_tokens(tmp_path / "a", TIED, [1, 2], {"model.embed_tokens": 2}), TIED).adapter.token_rows
    assert rows.roles == (Role.EMBED, Role.LOGITS)
    ids = {"embed_tokens": [1, 2], "lm_head": [1, 2]}
    (rows,) = opened(with_tokens(tmp_path / "a", TIED, ids, {"model.embed_tokens": 2}), TIED).adapter.token_rows
    assert rows.roles == (Role.EMBED, Role.LOGITS)
    ids = {"embed_tokens": [1, 2], "lm_head": [5]}
    both = with_tokens(tmp_path / "a", TIED, ids, {"model.embed_tokens": 2, "lm_head": 1})
    assert [(r.roles, r.token_ids) for r in opened(both, TIED).adapter.token_rows] == [
        ((Role.EMBED,), (1, 2)),
        ((Role.LOGITS,), (5,)),
    ]


@pytest.mark.parametrize(
    ("ids", "rows", "error"),
    [
        ([97], {"model.embed_tokens": 1}, AdapterMismatch),
        ([1, 2], {"model.embed_tokens": 3}, AdapterMismatch),
        ([1], {}, BadAdapter),
        (None, {"model.embed_tokens": 1}, BadAdapter),
        ({"lm_head": [1]}, {"model.embed_tokens": 1}, BadAdapter),
        ({"q_proj": [1]}, {f"{ATTENTION}.q_proj": 1}, BadAdapter),
    ],
)
def test_tokens_that_contradict_are_refused(ids: Any, rows: Any, error: type[AdapterError], tmp_path: Path) -> None:
    with pytest.raises(error, match="token"):
        opened(with_tokens(tmp_path / "a", SPLIT, ids, rows))


def test_invocation_tokens_lie_in_the_vocabulary(tmp_path: Path) -> None:
    config = {"alora_invocation_tokens": [3, 96]}
    assert opened(write_adapter(tmp_path / "a", SPLIT, Options(config=config))).adapter.invocation_tokens == (3, 96)
    with pytest.raises(AdapterMismatch, match="97"):
        opened(write_adapter(tmp_path / "b", SPLIT, Options(config={"alora_invocation_tokens": [97]})))


def test_tied_updates_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    options = Options(("model.embed_tokens",), config={"ensure_weight_tying": True})
    opened(write_adapter(tmp_path / "a", SPLIT, options))
    with pytest.raises(UnsupportedAdapter, match="ensure_weight_tying"):
        opened(write_adapter(tmp_path / "a", TIED, options), TIED)


def test_saved_embeddings_pass_only_if_they_are_the_bases(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", SPLIT)
    written.tensors["base_model.model.model.embed_tokens.weight"] = as_type(np.ones((97, 32)), "F32")[0]
    written.save()
    assert opened(written, is_copy=lambda module, array, file: module == "model.embed_tokens").adapter.updates
    for is_copy in (None, lambda module, array, file: False):
        with pytest.raises(UnsupportedAdapter, match="embed_tokens"):
            opened(written, is_copy=is_copy)


# Contradictions.


def refused(written: Written, error: type[AdapterError], match: str, base: BaseTargets = SPLIT, **options: Any) -> None:
    written.save()
    with pytest.raises(error, match=match):
        opened(written, base, **options)


def test_tensors_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    first = f"base_model.model.{QV[0]}"

    def changed(name: str, shape: tuple[int, ...] | None) -> Written:
        written = write_adapter(tmp_path / "a", SPLIT)
        if shape is None:
            del written.tensors[name]
        else:
            written.tensors[name] = ("F32", np.zeros(shape, np.float32))
        return written

    refused(changed(f"{first}.lora_A.weight", None), BadAdapter, "no A")
    refused(changed(f"{first}.lora_B.weight", None), BadAdapter, "no B")
    refused(changed(f"{first}.lora_A.weight", (4, 64)), AdapterMismatch, "from 64 to 32.*from 32 to 32")
    refused(changed(f"{first}.lora_B.weight", (16, 4)), AdapterMismatch, r"\[32, rank\]")
    refused(changed(f"{first}.lora_B.weight", (4, 32)), BadAdapter, "transposed")
    refused(changed(f"{first}.lora_A.weight", (4, 32, 1, 1)), UnsupportedAdapter, "two axes")
    refused(changed(f"{first}.lora_A.weight", (4,)), UnsupportedAdapter, "two axes")
    refused(changed(f"{first}.lora_B.bias", (32,)), BadAdapter, "lora_bias")
    refused(changed(f"{first}.lora_magnitude_vector", (32,)), BadAdapter, "use_dora")
    refused(changed(f"{first}.lora_A.other.weight", (4, 32)), BadAdapter, "are both lora_A")
    refused(changed(f"{first}.lora_embedding_A", (4, 32)), BadAdapter, "is a matrix")
    refused(changed("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", (4, 32)), AdapterMismatch, "no module")
    refused(changed(f"{first}.weight", (4, 4)), UnsupportedAdapter, "whole weight")


def test_ranks_are_bounded_and_those_of_the_config(tmp_path: Path) -> None:
    zero = write_adapter(tmp_path / "a", SPLIT)
    zero.tensors = {n: (d, a[:0] if "lora_A" in n else a[:, :0]) for n, (d, a) in zero.tensors.items()}
    refused(zero, BadAdapter, "rank 0")
    refused(
        write_adapter(tmp_path / "a", SPLIT, Options(rank=5)), BadAdapter, "1 to 4", limits=AdapterLimits(max_rank=4)
    )
    refused(write_adapter(tmp_path / "a", SPLIT, Options(rank=513)), BadAdapter, "1 to 512")
    for config in ({"r": 8}, {"rank_pattern": {"q_proj": 8}}):
        refused(write_adapter(tmp_path / "a", SPLIT, Options(config=config)), BadAdapter, "say 8")
    written = write_adapter(tmp_path / "a", SPLIT)
    del written.config["r"]
    written.save()
    assert opened(written).adapter.max_rank == 4


def test_modules_named_twice_or_not_at_all_are_refused(tmp_path: Path) -> None:
    both = Options((f"{ATTENTION}.qkv_proj", f"{ATTENTION}.k_proj"))
    refused(write_adapter(tmp_path / "a", SPLIT, both), BadAdapter, "same rows")
    refused(write_adapter(tmp_path / "a", SPLIT, Options(())), BadAdapter, "would change nothing")
    written = write_adapter(
        tmp_path / "a", SPLIT, Options(config={"target_modules": ["q_proj", "v_proj", "gate_proj"]})
    )
    assert "`gate_proj`" in opened(written).adapter.warnings[0]


def test_infinite_values_are_found_when_they_are_read(tmp_path: Path) -> None:
    for dtype, bad in itertools.product(("F32", "F16", "BF16"), (np.nan, np.inf, -np.inf)):
        written = write_adapter(tmp_path / "a", SPLIT)
        name = f"base_model.model.{QV[0]}.lora_A.weight"
        values = np.ones((4, 32))
        values[2, 7] = bad
        written.tensors[name] = as_type(values, dtype)[0]
        written.save()
        (update,) = [u for u in adapter_of(written).updates if u.lora_a.name == name]
        with pytest.raises(BadAdapter, match="NaN or infinity"):
            update.lora_a.read()


# Paths and sizes.


def test_links_may_not_leave_the_roots(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    written = write_adapter(outside / "a", SPLIT)
    (root / "link").symlink_to(outside / "a")
    with pytest.raises(BadAdapter, match="outside of"):
        open_peft_adapter(root / "link", SPLIT, [root])
    assert open_peft_adapter(root / "link", SPLIT, [root, outside]).adapter.updates
    (root / "b").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "b" / name).symlink_to(written.folder / name)
    with pytest.raises(BadAdapter, match="outside of"):
        open_peft_adapter(root / "b", SPLIT, [root])
    with pytest.raises(BadAdapter, match="outside of"):
        open_peft_adapter(root / ".." / "outside" / "a", SPLIT, [root])
    (root / "round").symlink_to(root / "round")
    for path in (root / "round", root / "nothing", root / "a\0b"):
        with pytest.raises(BadAdapter, match="cannot be opened"):
            open_peft_adapter(path, SPLIT, [root])


def test_links_inside_the_roots_are_followed_as_in_a_hubs_cache(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "blobs", SPLIT)
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / name)
    found = open_peft_adapter(snapshot, SPLIT, [tmp_path])
    assert {file.path.parent for file in found.files} == {written.folder}


def test_a_file_that_changes_after_the_check_is_refused(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", SPLIT)
    adapter = adapter_of(written)
    path = written.folder / "adapter_model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(BadAdapter, match="has changed"):
        adapter.updates[0].lora_a.read()
    path.unlink()
    with pytest.raises(BadAdapter, match="cannot be opened"):
        adapter.updates[0].lora_a.read()


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", SPLIT)
    for limits, why in (
        (AdapterLimits(max_file_bytes=100), "at most 100"),
        (AdapterLimits(max_tensors=2), "at most 2"),
        (AdapterLimits(max_header_bytes=50), "at most 50"),
        (AdapterLimits(max_config_bytes=30), "at most 30"),
    ):
        refused(written, BadAdapter, why, limits=limits)


def test_absent_and_foreign_files_are_named(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", SPLIT)
    tensors = written.folder / "adapter_model.safetensors"
    for name, error, why in (
        ("adapter_model.bin", UnsupportedAdapter, "pickled"),
        ("adapters.safetensors", UnsupportedAdapter, "MLX"),
        ("other", BadAdapter, "has no `adapter_model.safetensors`"),
    ):
        tensors = tensors.rename(written.folder / name)
        with pytest.raises(error, match=why):
            opened(written)
    (written.folder / "adapter_model.safetensors").write_bytes(b"\x80\x02" + bytes(100))
    with pytest.raises(BadAdapter, match="pickled"):
        opened(written)
    (written.folder / "adapter_config.json").unlink()
    with pytest.raises(BadAdapter, match=r"adapter_config\.json"):
        opened(written)
    with pytest.raises(BadAdapter, match="not a folder"):
        open_peft_adapter(written.folder / "other", SPLIT, [tmp_path])
