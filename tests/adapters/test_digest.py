"""Equal content has an equal digest whatever the folder, the order and the spelling; any other content another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarto.adapters.digest import Digests
from kvarto.adapters.page_hasher import PageHasher
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.source import AdapterFiles, FoundAdapter
from kvarto.adapters.targets import targets_of
from kvarto.core import _native
from kvarto.core.errors import BadAdapter
from tests.adapters.bases import program_of
from tests.adapters.held import HASHER, adapter_digest, held, update_values
from tests.adapters.pages import in_order
from tests.adapters.writer import ALL_LINEAR, QV, Options, Written, as_type, write_adapter

BASE = targets_of(program_of())
STABLE = {
    "POLYVAL": "39e1744b6fc78e707c87d96d28b8e32cdea8fa525fec3f91c08b7f462c39ab90",
    "BLAKE3": "a8b1958f6179866bb1fad7f1fd764d6ed92cf18a5a931a4ed8fe3d2c409ad220",
}
"""By what pages were hashed with."""


def files_of(written: Written, page_bytes: int = 4096, factor: float = 1, hasher: PageHasher = HASHER) -> AdapterFiles:
    """`factor`: what the base makes of magnitudes."""
    scale_of = lambda update, values: values.magnitude * np.float32(factor)  # noqa: E731
    return AdapterFiles(BASE, [written.folder.parent], page_bytes, scale_of=scale_of, hasher=hasher)


def read(files: AdapterFiles, found: FoundAdapter) -> Digests:
    return files.read(found, np.empty((found.num_pages, 4096), np.uint8), in_order(found))


def digest_of(written: Written) -> bytes:
    files = files_of(written)
    return read(files, files.find(written.save())).content


def digest(folder: Path, options: Options | None = None, **config: Any) -> bytes:
    written = write_adapter(folder, BASE, options)
    written.config |= config
    return digest_of(written)


def test_names_and_orders_do_not_count(tmp_path: Path) -> None:
    first = digest(tmp_path / "a", Options(ALL_LINEAR))
    assert len(first) == 32
    written = write_adapter(tmp_path / "b", BASE, Options(ALL_LINEAR, prefix="", adapter=".other"))
    written.tensors = dict(reversed(written.tensors.items()))
    written.config = dict(reversed(written.config.items())) | {"lora_dropout": 0.5, "base_model_name_or_path": "x"}
    assert digest_of(written) == first


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
    seen = {digest_of(written)}
    for _, array in written.tensors.values():
        array.reshape(-1)[-1] = np.nextafter(array.reshape(-1)[-1], 9)
        seen.add(digest_of(written))
    delta = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    written.tensors[delta] = as_type(np.ones((2, 32)), "F32")[0]
    for ids in ([1, 2], [2, 1], [1, 3]):
        written.config["trainable_token_indices"] = ids
        seen.add(digest_of(written))
    assert len(seen) == 1 + len(written.tensors) - 1 + 3


@pytest.mark.parametrize("isa", _native.ops.isas())
def test_under_one_secret_a_digest_is_stable_across_releases(isa: str, tmp_path: Path) -> None:
    """An engine that is replaced by a newer one goes on by it: changing what a digest covers needs a new VERSION."""
    written = write_adapter(tmp_path / "a", BASE, Options(("lm_head",), rank=1))
    written.tensors = {n: (d, np.full_like(a, 0.5)) for n, (d, a) in written.tensors.items()}
    hasher = PageHasher(bytes(range(48)), isa=isa)
    files = files_of(written, hasher=hasher)
    assert read(files, files.find(written.save())).content.hex() == STABLE[hasher.algorithm]


def test_another_secret_gives_other_digests(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR))
    seen, hashers = set(), (HASHER, PageHasher(), PageHasher())
    for files in (files_of(written, hasher=hasher) for hasher in hashers):
        digests = read(files, files.find(written.folder))
        seen |= {digests.content, *digests.pages}
    assert len(seen) == 3 * (1 + len(digests.pages))


def test_it_is_the_digest_of_what_the_files_hold(tmp_path: Path) -> None:
    for number, options in enumerate((Options(ALL_LINEAR), Options(use_dora=True, dtypes=("F16", "BF16")))):
        written = write_adapter(tmp_path / str(number), BASE, options)
        opened = open_peft_adapter(written.folder, BASE, [tmp_path])
        files = files_of(written)
        adapter = held(opened)
        expected = adapter_digest(adapter, 4096, lambda update: update_values(update).magnitude)
        assert read(files, files.find(written.folder)).content == expected


def test_pages_of_another_size_make_another_key(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR, use_dora=True))
    seen = set()
    for page_bytes in (2048, 4096, 1 << 20, 1 << 21):  # the last two: one page each, the larger with more zeros
        files = files_of(written, page_bytes)
        found = files.find(written.folder)
        seen.add(files.read(found, np.empty((found.num_pages, page_bytes), np.uint8), in_order(found)).content)
    assert len(seen) == 4


def test_what_a_base_makes_of_magnitudes_is_part_of_what_an_adapter_does(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(use_dora=True))
    one, two = files_of(written), files_of(written, factor=2)
    first, second = (read(files, files.find(written.folder)) for files in (one, two))
    assert first.content != second.content
    assert first.pages != second.pages


def test_pages_have_digests_of_their_own(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR))
    files = files_of(written)
    found = files.find(written.folder)
    before = read(files, found).pages
    assert len(before) == found.num_pages == -(-found.adapter.size_bytes // 4096)
    written.tensors[found.adapter.updates[0].lora_a.name][1][0, 0] += 1
    after = read(files, files.find(written.save())).pages
    assert [one == two for one, two in zip(before, after, strict=True)].count(False) == 1


def test_a_digest_is_remembered_by_the_identity_of_its_files(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE)
    files = files_of(written)
    first = files.find(written.folder)
    assert first.digest is None
    digest = read(files, first).content
    assert files.find(written.folder).digest == digest
    path = written.folder / "adapter_model.safetensors"
    os.utime(path, ns=(5, 5))
    again = files.find(written.folder)
    assert again.digest is None
    assert read(files, again).content == digest
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(5, 5))  # somebody sets the clock back: the time of change remains
    other = files.find(written.folder)
    assert other.digest is None
    assert read(files, other).content != digest
    with pytest.raises(BadAdapter, match="changed"):
        read(files, first)
