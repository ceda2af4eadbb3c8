"""Equal content has an equal digest whatever the folder, the order and the spelling; any other content another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarto.adapters import digest as digest_module
from kvarto.adapters.digest import DigestCache, adapter_digest, page_digests
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import targets_of
from kvarto.core.errors import BadAdapter
from tests.adapters.bases import program_of
from tests.adapters.writer import ALL_LINEAR, QV, Options, Written, as_type, write_adapter

BASE = targets_of(program_of())


def opened(written: Written) -> OpenedAdapter:
    return open_peft_adapter(written.save(), BASE, [written.folder.parent])


def digest(folder: Path, options: Options | None = None, **config: Any) -> bytes:
    written = write_adapter(folder, BASE, options)
    written.config |= config
    return adapter_digest(opened(written).adapter)


def test_names_and_orders_do_not_count(tmp_path: Path) -> None:
    first = digest(tmp_path / "a", Options(ALL_LINEAR))
    assert len(first) == 32
    written = write_adapter(tmp_path / "b", BASE, Options(ALL_LINEAR, prefix="", adapter=".other"))
    written.tensors = dict(reversed(written.tensors.items()))
    written.config = dict(reversed(written.config.items())) | {"lora_dropout": 0.5, "base_model_name_or_path": "x"}
    assert adapter_digest(opened(written).adapter) == first


def test_what_means_the_same_counts_the_same(tmp_path: Path) -> None:
    first = digest(tmp_path / "a", Options(alpha=8))
    assert digest(tmp_path / "b", Options(alpha=8.0)) == first
    assert digest(tmp_path / "c", Options(alpha=1), alpha_pattern={"[qv]_proj": 8}) == first
    assert digest(tmp_path / "d", Options(alpha=4), use_rslora=True) == first


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (Options(alpha=9), {}),
        (Options(seed=1), {}),
        (Options(QV[:-1]), {}),
        (Options(("model.layers.0.self_attn.o_proj", *QV[1:])), {}),
        (Options(dtypes=("F32", "BF16")), {}),
        (Options(lora_bias=True), {}),
        (Options(use_dora=True), {}),
        (Options(), {"alora_invocation_tokens": [5]}),
        (Options(), {"alpha_pattern": {"q_proj": 3}}),
        (Options(), {"use_rslora": True}),
    ],
)
def test_what_differs_counts(options: Options, config: dict[str, Any], tmp_path: Path) -> None:
    assert digest(tmp_path / "a", options, **config) != digest(tmp_path / "b")


def test_every_value_and_token_counts(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE)
    seen = {adapter_digest(opened(written).adapter)}
    for _, array in written.tensors.values():
        array.reshape(-1)[-1] = np.nextafter(array.reshape(-1)[-1], 9)
        seen.add(adapter_digest(opened(written).adapter))
    delta = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    written.tensors[delta] = as_type(np.ones((2, 32)), "F32")[0]
    for ids in ([1, 2], [2, 1], [1, 3]):
        written.config["trainable_token_indices"] = ids
        seen.add(adapter_digest(opened(written).adapter))
    assert len(seen) == 1 + len(written.tensors) - 1 + 3


def test_a_digest_is_stable_across_releases(tmp_path: Path) -> None:
    """Pages on disk outlive the process: changing what a digest covers needs a new VERSION."""
    written = write_adapter(tmp_path / "a", BASE, Options(("lm_head",), rank=1))
    written.tensors = {n: (d, np.full_like(a, 0.5)) for n, (d, a) in written.tensors.items()}
    assert adapter_digest(opened(written).adapter).hex() == (
        "f78c066d74bb62d5f1c1500c7ab7e8d6a96928c47465b476d389475b3a49235a"
    )


def test_pages_have_digests_of_their_own(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR))
    before = page_digests(opened(written).adapter, 4096)
    assert len(before) == -(-opened(written).adapter.size_bytes // 4096)
    name = opened(written).adapter.updates[0].lora_a.name
    written.tensors[name][1][0, 0] += 1
    after = page_digests(opened(written).adapter, 4096)
    assert [one == two for one, two in zip(before, after, strict=True)].count(False) == 1


def test_the_cache_reads_a_file_once_and_sees_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads = 0

    def counted(adapter: Any) -> bytes:
        nonlocal num_reads
        num_reads += 1
        return adapter_digest(adapter)

    monkeypatch.setattr(digest_module, "adapter_digest", counted)
    cache = DigestCache(max_entries=2)
    written = write_adapter(tmp_path / "a", BASE)
    first = opened(written)
    assert cache.digest_of(first) == cache.digest_of(first) == adapter_digest(first.adapter)
    assert num_reads == 1
    path = written.folder / "adapter_model.safetensors"
    os.utime(path, ns=(5, 5))
    again = open_peft_adapter(written.folder, BASE, [tmp_path])
    assert cache.digest_of(again) == cache.digest_of(first)
    assert num_reads == 2
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(5, 5))  # somebody sets the clock back: the time of change remains
    other = open_peft_adapter(written.folder, BASE, [tmp_path])
    assert cache.digest_of(other) != cache.digest_of(first)
    with pytest.raises(BadAdapter, match="changed"):
        adapter_digest(first.adapter)
