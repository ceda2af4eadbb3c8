"""The executor: row ops run together, and a step that does not fit is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvarto.core.step import Step
from tests.ops.adapters import with_adapters
from tests.ops.opened import LLAMA, Opened, open_backend


@pytest.fixture(scope="module")
def llama() -> Iterator[Opened]:
    opened = open_backend(LLAMA, "native", threads=2)
    yield opened
    opened.backend.close()


@pytest.fixture
def step(llama: Opened) -> Step:
    tokens = llama.rng.integers(0, LLAMA["vocab_size"], 40)
    tables = llama.tables([40, 9])
    return llama.step([(tokens, tables[0], 20, 40), (tokens, tables[1], 0, 9)])


def test_row_ops_in_place_share_a_phase(llama: Opened) -> None:
    compiled = llama.backend._opened.compiled  # type: ignore[attr-defined]
    # Embed, norm; per layer qkv, (rope, write), attention, out, norm, gate_up, activation, down, and all but once a
    # norm; behind the last attention two gathers; then norm, logits, sample.
    num_layers = LLAMA["num_hidden_layers"]
    assert compiled.num_phases == 2 + 8 * num_layers + (num_layers - 1) + 5
    assert len(llama.program.ops) == 1 + 10 * num_layers + 5


def _set(name: str, index: int, value: int) -> Callable[[Step], Step]:
    def change(step: Step) -> Step:
        values = getattr(step, name).copy()
        values.reshape(-1)[index] = value
        return replace(step, **{name: values})

    return change


def _sampling(name: str, index: int, value: int) -> Callable[[Step], Step]:
    def change(step: Step) -> Step:
        values = getattr(step.sampling, name).copy()
        values[index] = value
        return replace(step, sampling=replace(step.sampling, **{name: values}))

    return change


FAULTS: dict[str, tuple[Callable[[Step], Step], str]] = {
    "token beyond the vocabulary": (_set("token_ids", 3, 211), "token_ids 211"),
    "negative token": (_set("token_ids", 3, -1), "token_ids -1"),
    "position": (_set("positions", 0, 2048), "positions 2048"),
    "page": (_set("page_tables", 1, 1 << 20), "page_tables"),
    "slot": (_set("slot_mapping", 5, -16), "slot_mapping -16"),
    "slot beyond the pages": (_set("slot_mapping", 5, 1 << 40), "slot_mapping"),
    "context beyond the table": (_set("context_lens", 0, 500), "page table"),
    "more tokens than context": (_set("context_lens", 1, 8), "tokens of a sequence 9"),
    "tokens left over": (_set("cu_seqlens", 2, 28), "cu_seqlens at its end 28"),
    "sampled row": (_set("sample_rows", 2, 29), "sample_rows 29"),
    "target": (_sampling("target", 1, 211), "target 211"),
    "indptr": (_sampling("bias_indptr", 3, 2), "indptr"),
    "handle": (lambda step: with_adapters(step, [0, 4096]), "adapters 4096"),
    "negative handle": (lambda step: with_adapters(step, [-2, None]), "adapters -2"),
    "handle that is not bound": (lambda step: with_adapters(step, [None, 7]), "adapters 7, which is not bound"),
    "start": (lambda step: with_adapters(step, [None, None], [0, -1]), "adapter_starts -1"),
    "adapters without starts": (lambda step: replace(step, adapters=np.zeros(2, np.int32)), "adapter_starts"),
    "adapters of other sequences": (lambda step: with_adapters(step, [None]), "`adapters` has 1 elements, not 2"),
    "type": (lambda step: replace(step, token_ids=step.token_ids.astype(np.int64)), "`token_ids` has elements of"),
    "shape": (lambda step: replace(step, positions=step.positions[:-1]), "`positions` has 28 elements, not 29"),
    "strides": (lambda step: replace(step, positions=np.repeat(step.positions, 2)[::2]), "`positions` is no contig"),
    "rank": (lambda step: replace(step, page_tables=step.page_tables[0]), "page_tables"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_step_that_does_not_fit_is_refused_before_anything_is_computed(llama: Opened, step: Step, name: str) -> None:
    assert llama.backend.arena is not None
    change, message = FAULTS[name]
    before = llama.backend.arena.array.copy()
    with pytest.raises(ValueError, match=message):
        llama.backend.run(change(step))
    np.testing.assert_array_equal(llama.backend.arena.array, before)
    llama.backend.run(step)


def test_tables_may_be_slices_of_larger_ones(llama: Opened, step: Step) -> None:
    llama.backend.run(step)
    expected = llama.backend.logits_of_last_step()
    wide = np.full((*step.page_tables.shape[:2], 2 * step.page_tables.shape[2]), -1, np.int32)
    wide[..., ::2] = step.page_tables
    llama.backend.run(replace(step, page_tables=wide[..., ::2]))
    np.testing.assert_array_equal(llama.backend.logits_of_last_step(), expected)
