"""Attention of every instruction set: equal to plain softmax attention, and bit for bit whatever the batch, the chunks,
the pages, the threads, and who shares them.

Pages and scratch hold NaN where nothing was put: one NaN read and not deselected would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvarto.core.dtype import DType
from kvarto.core.ids import NO_PAGE
from kvarto.core.kv_format import KVFormat
from kvarto.core.ops import HeadShape
from kvarto.core.step import Step
from kvarto.core.units import ceil_div
from kvarto.ops.native.numerics import BF16_ISAS
from tests.ops.native.paged_ops import ISAS, Array, Limits, PagedOps
from tests.ops.one_op import assert_same_bits
from tests.ops.steps import paged_step
from tests.ops.test_attention import LAYER_SLOTS, SETTINGS, Chunk, Sequence_, Setting, plain_attention

SETTINGS_HERE = SETTINGS | {
    "f16 wide": Setting(HeadShape(4, 1, 128), kv_dtype=DType.F16),
    "bf16": Setting(HeadShape(9, 3, 64), kv_dtype=DType.BF16),
    "bf16 96": Setting(HeadShape(7, 1, 96), kv_dtype=DType.BF16, softcap=5.0),
}
FAST = ("smollm", "bf16", "bf16 96", "f16 wide", "bf16 window", "one group", "many queries", "short window")
FAST_ISAS = [isa for isa in ISAS if isa in BF16_ISAS]
"""Sets that compute in pairs of bfloat16 where not all is to be exact."""
each_isa = pytest.mark.parametrize("isa", ISAS)
Outputs = dict[tuple[int, int], Array]
"""The output row by (sequence, position)."""


@dataclass(frozen=True)
class Way:
    """How a step is computed: none of it may show in a bit, but for the set where products are not exact."""

    isa: str
    page_size: int = 16
    num_threads: int = 1
    is_exact: bool = True
    is_int8_out: bool = False
    shared_tokens: int = 0
    """The chunks' sequences keep their first tokens, whole pages of them, in the same pages."""
    seed: int = 0


def attend(way: Way, setting: Setting, sequences: Sequence[Sequence_], chunks: Sequence[Chunk]) -> Outputs:
    """One step of `chunks` through WriteKV and Attention."""
    heads = setting.heads
    kv = KVFormat(setting.kv_dtype, way.page_size, LAYER_SLOTS, heads.num_kv_heads, heads.head_dim)
    tables = _tables(way, setting, chunks)
    longest = max(chunk.stop for chunk in chunks)
    limits = Limits(max(longest, sum(chunk.stop - chunk.start for chunk in chunks)), len(chunks), longest)
    num_pages = max(max(table, default=0) for table in tables) + 1
    ops = PagedOps(
        way.isa, setting.op, kv, num_pages, limits,
        num_threads=way.num_threads, is_exact=way.is_exact, is_int8_out=way.is_int8_out,
    )  # fmt: skip
    for chunk, table in zip(chunks, tables, strict=True):
        first_kept = next((i for i, page in enumerate(table) if page != NO_PAGE), len(table)) * way.page_size
        if first_kept < chunk.start:
            past = paged_step([chunk.start - first_kept], [chunk.start], [table], way.page_size)
            ops.write(sequences[chunk.sequence].qkv[first_kept : chunk.start], past)
    step = _step(chunks, tables, way.page_size)
    qkv = np.concatenate([sequences[c.sequence].qkv[c.start : c.stop] for c in chunks])
    ops.write(qkv, step)
    places = [(c.sequence, position) for c in chunks for position in range(c.start, c.stop)]
    return dict(zip(places, ops.attend(qkv, step), strict=True))


def _tables(way: Way, setting: Setting, chunks: Sequence[Chunk]) -> list[list[int]]:
    """Shuffled pages; none behind the window of a chunk's first token."""
    needed = [ceil_div(chunk.stop, way.page_size) for chunk in chunks]
    ids = np.random.default_rng(way.seed).permutation(sum(needed) + 2).tolist()
    shared, rest = ids[: way.shared_tokens // way.page_size], iter(ids[way.shared_tokens // way.page_size :])
    tables = []
    for chunk, count in zip(chunks, needed, strict=True):
        gone = 0 if setting.window is None else max(0, chunk.start - setting.window + 1) // way.page_size
        table = shared[:count] + [next(rest) for _ in range(count - len(shared))]
        tables.append([NO_PAGE] * gone + table[gone:])
    return tables


def _step(chunks: Sequence[Chunk], tables: Sequence[list[int]], page_size: int) -> Step:
    return paged_step([c.stop - c.start for c in chunks], [c.stop for c in chunks], tables, page_size)


def _random(rng: np.random.Generator, lengths: Sequence[int], setting: Setting) -> list[Sequence_]:
    return [Sequence_.random(rng, length, setting.heads) for length in lengths]


def _plain(setting: Setting, sequences: Sequence[Sequence_], chunks: Sequence[Chunk]) -> Array:
    rows = [plain_attention(setting, sequences[c.sequence], range(c.start, c.stop)) for c in chunks]
    return np.concatenate(rows)


def _stacked(outputs: Outputs) -> Array:
    return np.stack(list(outputs.values()))


@each_isa
@pytest.mark.parametrize("name", SETTINGS_HERE)
def test_exact_equals_plain_attention(isa: str, name: str) -> None:
    setting = SETTINGS_HERE[name]
    rng = np.random.default_rng(5)
    lengths = [1, 63, 64, 65, 200, 1100, 1500 if isa == "portable" else 2200]
    sequences = _random(rng, lengths, setting)
    chunks = [Chunk(s, max(0, length - int(rng.choice([1, 40]))), length) for s, length in enumerate(lengths)]
    for page_size, num_threads in ((8, 2), (64, 1)):
        got = attend(Way(isa, page_size, num_threads), setting, sequences, chunks)
        # Weighted means of values around 1: float32 sums of up to 2,200 terms.
        np.testing.assert_allclose(_stacked(got), _plain(setting, sequences, chunks), rtol=0, atol=5e-6)


@pytest.mark.parametrize("isa", FAST_ISAS)
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("page_size", [8, 16, 256])
def test_fast_is_near_plain_attention(isa: str, name: str, page_size: int) -> None:
    setting = SETTINGS_HERE[name]
    rng = np.random.default_rng(6)
    lengths = [1, 63, 64, 65, 300, 1100]
    sequences = _random(rng, lengths, setting)
    chunks = [Chunk(s, max(0, length - int(rng.choice([1, 2, 40]))), length) for s, length in enumerate(lengths)]
    got = _stacked(attend(Way(isa, page_size, 2, is_exact=False), setting, sequences, chunks))
    error = got - _plain(setting, sequences, chunks)
    # Each of queries, keys, weights and values is rounded to 2^-9 of itself, of up to 4; errors are independent.
    assert np.abs(error).max() < 4e-2
    assert np.sqrt((error**2).mean()) < 2e-3


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_fast_is_exact_where_there_are_no_pairs(name: str) -> None:
    setting = SETTINGS_HERE[name]
    sequences = _random(np.random.default_rng(7), [130], setting)
    for isa in set(ISAS) - set(FAST_ISAS):
        fast, exact = (attend(Way(isa, is_exact=e), setting, sequences, [Chunk(0, 100, 130)]) for e in (False, True))
        assert_same_bits(_stacked(fast), _stacked(exact))


@pytest.mark.parametrize("name", ["smollm", "wide", "short window", "f16", "bf16 96"])
def test_sets_with_fused_multiply_add_give_the_same_bits(name: str) -> None:
    setting = SETTINGS_HERE[name]
    sequences = _random(np.random.default_rng(8), [70, 1090], setting)
    chunks = [Chunk(0, 0, 70), Chunk(1, 1080, 1090)]
    sets = [isa for isa in ISAS if isa != "portable"] or ISAS
    first, *others = (_stacked(attend(Way(isa), setting, sequences, chunks)) for isa in sets)
    for other in others:
        assert_same_bits(other, first)


WAYS = [(isa, is_exact) for isa in ISAS for is_exact in (True, False) if is_exact or isa in FAST_ISAS]
each_way = pytest.mark.parametrize(("isa", "is_exact"), WAYS)


@each_way
@pytest.mark.parametrize("name", ["smollm", "bf16", "f16 wide", "short window", "bf16 window", "many queries"])
def test_a_token_has_the_same_bits_however_it_is_computed(isa: str, is_exact: bool, name: str) -> None:
    """Alone as a decode step; then in whole prompts, random chunks and mixed batches, at every page size."""
    setting = SETTINGS_HERE[name]
    rng = np.random.default_rng(1)
    lengths = [1, 30, 64, 130, 600 if isa == "portable" else 1400]
    sequences = _random(rng, lengths, setting)
    alone: Outputs = {}
    for page_size, num_threads in ((8, 3), (16, 1), (32, 2), (64, 1), (256, 5)):
        way = Way(isa, page_size, num_threads, is_exact, seed=page_size)
        outputs = attend(way, setting, sequences, _random_chunks(rng, lengths))
        places = list(outputs)
        for s, position in [places[0], places[-1], *(places[i] for i in rng.integers(0, len(places), 4))]:
            if (s, position) not in alone:
                single = [Chunk(s, position, position + 1)]
                alone |= attend(Way(isa, is_exact=is_exact), setting, sequences, single)
        for place in outputs.keys() & alone.keys():
            assert_same_bits(outputs[place], alone[place])
        for s, length in enumerate(lengths):
            alone.setdefault((s, length - 1), outputs[s, length - 1])  # compared between page sizes, too


def _random_chunks(rng: np.random.Generator, lengths: Sequence[int]) -> list[Chunk]:
    """One chunk of each sequence that ends at its last token, and some of inner tokens, in random order."""
    chunks = []
    for s, length in enumerate(lengths):
        for stop in {length, int(rng.integers(1, length + 1))}:
            size = int(rng.choice([1, 2, 17, 100]))
            chunks.append(Chunk(s, max(0, stop - size), stop))
    return [chunks[i] for i in rng.permutation(len(chunks))]


@each_way
@pytest.mark.parametrize("name", ["bf16", "plain"])
@pytest.mark.parametrize("shared_tokens", [64, 208, 512])
def test_shared_pages_change_no_bit(isa: str, is_exact: bool, name: str, shared_tokens: int) -> None:
    """Of many sequences that begin alike, in decode steps and short chunks, next to strangers."""
    setting = SETTINGS_HERE[name]
    rng = np.random.default_rng(shared_tokens)
    lengths = (shared_tokens + rng.integers(1, 400, 9)).tolist()
    sequences = _random(rng, lengths, setting)
    for sequence in sequences[1:]:
        sequence.qkv[:shared_tokens] = sequences[0].qkv[:shared_tokens]
    sizes = rng.choice([1, 1, 1, 5], len(lengths))
    chunks = [Chunk(s, max(shared_tokens, length - int(sizes[s])), length) for s, length in enumerate(lengths)]
    way = Way(isa, 16, 2, is_exact)
    want = attend(way, setting, sequences, chunks)
    got = attend(replace(way, shared_tokens=shared_tokens, num_threads=1), setting, sequences, chunks)
    for place in want:
        assert_same_bits(got[place], want[place])


@each_way
def test_threads_that_share_a_long_context_change_no_bit(isa: str, is_exact: bool) -> None:
    setting = SETTINGS_HERE["bf16"]
    length = 1300 if isa == "portable" else 9000
    sequences = _random(np.random.default_rng(9), [length, 40], setting)
    chunks = [Chunk(0, length - 1, length), Chunk(1, 39, 40)]
    want = _stacked(attend(Way(isa, is_exact=is_exact), setting, sequences, chunks))
    for num_threads in (2, 3, 8):
        assert_same_bits(_stacked(attend(Way(isa, 16, num_threads, is_exact), setting, sequences, chunks)), want)


@each_way
@pytest.mark.parametrize("shared_tokens", [0, 256])
def test_a_sequence_of_nan_stays_alone(isa: str, is_exact: bool, shared_tokens: int) -> None:
    setting = SETTINGS_HERE["bf16"]
    sequences = _random(np.random.default_rng(3), [700, 340, 290, 300], setting)
    for sequence in sequences[1:]:
        sequence.qkv[:shared_tokens] = sequences[0].qkv[:shared_tokens]
    chunks = [Chunk(s, len(sequence.qkv) - 1 - s, len(sequence.qkv)) for s, sequence in enumerate(sequences)]
    way = Way(isa, is_exact=is_exact, shared_tokens=shared_tokens)
    want = attend(way, setting, sequences, chunks)
    sequences[0].qkv[shared_tokens:] = np.nan
    got = attend(way, setting, sequences, chunks)
    assert all(np.isnan(out).all() == (s == 0) for (s, _), out in got.items())
    for place in want:
        if place[0] != 0:
            assert_same_bits(got[place], want[place])


@each_way
@pytest.mark.parametrize("page_size", [8, 64])
def test_int8_pages_cost_little(isa: str, is_exact: bool, page_size: int) -> None:
    setting = replace(SETTINGS_HERE["smollm"], kv_dtype=DType.I8)
    lengths = [1, 70, 600]
    sequences = _random(np.random.default_rng(10), lengths, setting)
    chunks = [Chunk(s, max(0, length - 3), length) for s, length in enumerate(lengths)]
    got = _stacked(attend(Way(isa, page_size, 2, is_exact), setting, sequences, chunks))
    error = got - _plain(replace(setting, kv_dtype=DType.F32), sequences, chunks)
    # Codes are off by a third of a step in the mean square, a step is 1/127 of about 2.5.
    assert np.sqrt((error**2).mean()) < 6e-3
    assert np.abs(error).max() < 0.05


@each_way
def test_quantised_rows_hold_the_same_numbers(isa: str, is_exact: bool) -> None:
    setting = SETTINGS_HERE["bf16"]
    sequences = _random(np.random.default_rng(11), [40, 90], setting)
    chunks = [Chunk(0, 20, 40), Chunk(1, 89, 90)]
    way = Way(isa, is_exact=is_exact)
    want = _stacked(attend(way, setting, sequences, chunks))
    got = _stacked(attend(replace(way, is_int8_out=True), setting, sequences, chunks))
    steps = np.abs(want.reshape(len(want), -1, 32)).max(-1, keepdims=True) / 127
    error = np.abs(got - want).reshape(len(want), -1, 32)
    assert (error <= 0.5001 * steps).all()
