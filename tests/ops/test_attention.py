"""WriteKV and Attention over pages: equal to plain softmax attention, and bit for bit whatever the batch and the pages.

Every page holds NaN where no token of the sequence lies, before its context's end or behind: one NaN read and not
deselected would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvarto.core.dtype import DType
from kvarto.core.ids import NO_PAGE
from kvarto.core.kv_format import KVFormat
from kvarto.core.ops import Attention, HeadShape, WriteKV
from kvarto.core.step import Step
from kvarto.core.units import ceil_div
from tests.ops.one_op import Array, OneOp, assert_same_bits
from tests.ops.steps import paged_step

LAYER_SLOTS, LAYER_SLOT = 3, 1
SLACK_PAGES = 2


@dataclass(frozen=True)
class Setting:
    """One kind of attention."""

    heads: HeadShape
    window: int | None = None
    softcap: float | None = None
    kv_dtype: DType = DType.F32

    @property
    def op(self) -> Attention:
        scale = 2.0 * self.heads.head_dim**-0.5
        return Attention("qkv", "out", self.heads, 0, LAYER_SLOT, scale, self.window, self.softcap)


SETTINGS = {
    "plain": Setting(HeadShape(6, 2, 16)),
    "smollm": Setting(HeadShape(9, 3, 64)),
    "one group": Setting(HeadShape(4, 4, 80)),
    "many queries": Setting(HeadShape(40, 1, 24)),
    "wide": Setting(HeadShape(4, 2, 256)),
    "window": Setting(HeadShape(4, 2, 16), window=100),
    "short window": Setting(HeadShape(6, 3, 32), window=7, softcap=3.0),
    "softcap": Setting(HeadShape(8, 1, 32), softcap=2.0),
    "f16": Setting(HeadShape(6, 2, 16), kv_dtype=DType.F16),
    "bf16 window": Setting(HeadShape(3, 1, 64), kv_dtype=DType.BF16, window=1030),
}
each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


@dataclass(frozen=True)
class Sequence_:
    """q, k and v of all tokens of a sequence, as rows of `qkv`."""

    qkv: Array

    @classmethod
    def random(cls, rng: np.random.Generator, num_tokens: int, heads: HeadShape) -> Sequence_:
        return cls(rng.standard_normal((num_tokens, heads.width)).astype(np.float32))


@dataclass(frozen=True)
class Chunk:
    """Tokens `[start, stop)` of a sequence in one step; those before are in its pages."""

    sequence: int
    start: int
    stop: int


def attend(
    setting: Setting, sequences: Sequence[Sequence_], chunks: Sequence[Chunk], page_size: int, seed: int = 0
) -> dict[tuple[int, int], Array]:
    """One step of `chunks` through WriteKV and Attention: the output by (sequence, position)."""
    kv = KVFormat(setting.kv_dtype, page_size, LAYER_SLOTS, setting.heads.num_kv_heads, setting.heads.head_dim)
    tables = _tables(chunks, page_size, setting.window, seed)
    num_pages = sum(len(table) for table in tables) + SLACK_PAGES
    write = OneOp(WriteKV("qkv", setting.heads, 0, LAYER_SLOT), kv_format=kv, num_pages=num_pages)
    attention = OneOp(setting.op, widths=_out_width(setting), kv_format=kv, num_pages=num_pages)
    for chunk, table in zip(chunks, tables, strict=True):
        first_kept = next((i for i, page in enumerate(table) if page != NO_PAGE), len(table)) * page_size
        if first_kept < chunk.start:
            past = paged_step([chunk.start - first_kept], [chunk.start], [table], page_size)
            write.run({"qkv": sequences[chunk.sequence].qkv[first_kept : chunk.start]}, past)
    step = _step(chunks, tables, page_size)
    qkv = np.concatenate([sequences[c.sequence].qkv[c.start : c.stop] for c in chunks])
    write.run({"qkv": qkv}, step)
    attention.pages().copy_(write.pages())
    out = attention.run({"qkv": qkv}, step)["out"]
    places = [(c.sequence, position) for c in chunks for position in range(c.start, c.stop)]
    return dict(zip(places, out, strict=True))


def _out_width(setting: Setting) -> dict[str, int]:
    return {"out": setting.heads.num_qo_heads * setting.heads.head_dim}


def _tables(chunks: Sequence[Chunk], page_size: int, window: int | None, seed: int) -> list[list[int]]:
    """Shuffled pages; none behind the window of a chunk's first token."""
    needed = [ceil_div(chunk.stop, page_size) for chunk in chunks]
    ids = iter(np.random.default_rng(seed).permutation(sum(needed) + SLACK_PAGES).tolist())
    tables = []
    for chunk, count in zip(chunks, needed, strict=True):
        first_key = 0 if window is None else max(0, chunk.start - window + 1)
        gone = first_key // page_size
        tables.append([NO_PAGE] * gone + [next(ids) for _ in range(count - gone)])
    return tables


def _step(chunks: Sequence[Chunk], tables: Sequence[list[int]], page_size: int) -> Step:
    return paged_step([c.stop - c.start for c in chunks], [c.stop for c in chunks], tables, page_size)


def plain_attention(setting: Setting, sequence: Sequence_, positions: Sequence[int]) -> Array:
    """Softmax attention in float64, `[positions, q heads * head_dim]`; k and v as the pages round them."""
    heads = setting.heads
    rows = torch.from_numpy(sequence.qkv.reshape(len(sequence.qkv), -1, heads.head_dim))
    torch_dtype = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}[setting.kv_dtype]
    stored = rows[:, heads.num_qo_heads :].to(torch_dtype).double()
    key, value = stored.split(heads.num_kv_heads, dim=1)
    query = rows[list(positions), : heads.num_qo_heads].double()
    key, value = (plane.repeat_interleave(heads.group_size, dim=1) for plane in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * setting.op.scale
    if setting.softcap is not None:
        scores = setting.softcap * torch.tanh(scores / setting.softcap)
    keys, queries = torch.arange(len(rows))[None, :], torch.tensor(positions)[:, None]
    hidden = keys > queries
    if setting.window is not None:
        hidden |= keys <= queries - setting.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out: Array = torch.einsum("hqk,khd->qhd", weights, value).reshape(len(positions), -1).numpy()
    return out


@each_setting
@pytest.mark.parametrize("page_size", [8, 64, 128])
def test_equals_plain_attention(setting: Setting, page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    lengths = [1, 63, 64, 65, 200, 1100, 2200]
    sequences = [Sequence_.random(rng, length, setting.heads) for length in lengths]
    chunks = [Chunk(s, max(0, length - int(rng.choice([1, 40]))), length) for s, length in enumerate(lengths)]
    out = attend(setting, sequences, chunks, page_size)
    for chunk in chunks:
        positions = range(chunk.start, chunk.stop)
        want = plain_attention(setting, sequences[chunk.sequence], positions)
        got = np.stack([out[chunk.sequence, position] for position in positions])
        # Weighted means of values around 1: float32 sums of up to 2,200 terms.
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


@each_setting
def test_a_token_has_the_same_bits_however_it_is_computed(setting: Setting) -> None:
    """Alone as a decode step; then in whole prompts, random chunks and mixed batches, at every page size."""
    rng = np.random.default_rng(1)
    lengths = [1, 30, 64, 130, 1090, 2100]
    sequences = [Sequence_.random(rng, length, setting.heads) for length in lengths]
    alone: dict[tuple[int, int], Array] = {}
    for page_size in (8, 16, 32, 64, 128, 256):
        chunks = _random_chunks(rng, lengths)
        out = attend(setting, sequences, chunks, page_size, seed=page_size)
        places = list(out)
        for place in [places[0], places[-1], *(places[i] for i in rng.integers(0, len(places), 3))]:
            if place not in alone:
                s, position = place
                alone |= attend(setting, sequences, [Chunk(s, position, position + 1)], 16)
        for place in out.keys() & alone.keys():
            assert_same_bits(out[place], alone[place])
        for place in out.keys() & _last_places(lengths):
            alone.setdefault(place, out[place])  # compared between page sizes, too


def _last_places(lengths: Sequence[int]) -> set[tuple[int, int]]:
    return {(s, length - 1) for s, length in enumerate(lengths)}


def _random_chunks(rng: np.random.Generator, lengths: Sequence[int]) -> list[Chunk]:
    """One chunk of each sequence that ends at its last token, and some of inner tokens, in random order."""
    chunks = []
    for s, length in enumerate(lengths):
        for stop in {length, int(rng.integers(1, length + 1))}:
            size = int(rng.choice([1, 2, 17, 100]))
            chunks.append(Chunk(s, max(0, stop - size), stop))
    return [chunks[i] for i in rng.permutation(len(chunks))]


@pytest.mark.parametrize("name", ["plain", "window"])
def test_whole_prompt_equals_token_by_token(name: str) -> None:
    setting = SETTINGS[name]
    sequence = Sequence_.random(np.random.default_rng(2), 210, setting.heads)
    whole = attend(setting, [sequence], [Chunk(0, 0, 210)], 16)
    for position in range(210):
        single = attend(setting, [sequence], [Chunk(0, position, position + 1)], 8, seed=position)
        assert_same_bits(single[0, position], whole[0, position])


def test_a_sequence_of_nan_stays_alone() -> None:
    setting = SETTINGS["plain"]
    rng = np.random.default_rng(3)
    sequences = [Sequence_.random(rng, 150, setting.heads) for _ in range(4)]
    chunks = [Chunk(s, 150 - 20 * s - 1, 150) for s in range(4)]
    want = attend(setting, sequences, chunks, 16)
    sequences[2].qkv[:] = np.nan
    got = attend(setting, sequences, chunks, 16)
    assert all(np.isnan(out).all() for (s, _), out in got.items() if s == 2)
    for place in want:
        if place[0] != 2:
            assert_same_bits(got[place], want[place])


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("page_size", [8, 256])
def test_write_kv_touches_its_slots_alone(dtype: DType, page_size: int) -> None:
    heads = HeadShape(2, 3, 20)
    kv = KVFormat(dtype, page_size, LAYER_SLOTS, 3, 20)
    bench = OneOp(WriteKV("qkv", heads, 0, LAYER_SLOT), kv_format=kv, num_pages=5)
    bench.pages().fill_(7.0)
    rng = np.random.default_rng(4)
    num_tokens = 2 * page_size + 3
    step = paged_step([num_tokens], [num_tokens], [[4, 1, 3]], page_size)
    rows = rng.standard_normal((num_tokens, heads.width)).astype(np.float32)
    bench.run({"qkv": rows}, step)
    want = torch.full_like(bench.planes(), 7.0)
    by_head = torch.from_numpy(rows).view(num_tokens, 8, 20)
    for token, slot in enumerate(step.slot_mapping[0]):
        page, offset = divmod(int(slot), page_size)
        want[page, LAYER_SLOT, 0, :, offset] = by_head[token, 2:5]
        want[page, LAYER_SLOT, 1, :, offset] = by_head[token, 5:8]
    assert torch.equal(bench.planes(), want)
    assert (bench.pages() == 7.0).sum() == bench.pages().numel() - 2 * num_tokens * 3 * 20
