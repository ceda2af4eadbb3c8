"""Backends with real Programs and random weights in a planned arena, for tests of whole passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.targets import targets_of
from kvarto.core.buffers import StepLimits, Weight, WeightPart
from kvarto.core.dtype import DType
from kvarto.core.ids import NO_PAGE
from kvarto.core.layout import Budget, Layout
from kvarto.core.program import Program
from kvarto.core.step import Step
from kvarto.core.units import ceil_div
from kvarto.core.weight_format import WeightFormat
from kvarto.memory.arena import Arena
from kvarto.models.config import parse_config
from kvarto.models.convert import to_bytes, to_rows
from kvarto.models.decoder import build_program
from kvarto.models.packing import matrix_names
from kvarto.ops.base import Backend
from kvarto.ops.native import NativeBackend
from kvarto.ops.reference import ReferenceBackend
from kvarto.planning.plan import plan
from tests.ops.adapters import Shelf
from tests.ops.one_op import Array
from tests.ops.steps import sampling_rows

KINDS = ("reference", "native", "native int8")
"""Also `native bf16`, with matrix tiles, and `native q4 f32`, which has the weights of both."""


class TestedBackend(Backend, Protocol):
    """A backend that shows its logits and its arena."""

    @property
    def arena(self) -> Arena | None: ...

    def logits_of_last_step(self) -> NDArray[np.float32]: ...


LIMITS = StepLimits(max_tokens=160, max_seqs=12, max_samples=160, max_context=1500)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
GEMMA = TINY | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 70,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
    "num_hidden_layers": 4,
}
MIXTRAL = TINY | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


@dataclass
class Opened:
    """A backend with random weights, and the pages that tests give to sequences."""

    backend: TestedBackend
    program: Program
    layout: Layout
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))
    num_kv_pages: int = 0
    """Pages that sequences may have; 0: all."""

    def tables(self, num_tokens: Sequence[int]) -> list[Array]:
        """Per sequence `[num_groups, pages]`, all distinct, shuffled."""
        page_size = self.layout.kv_format.page_size
        free = iter(self.rng.permutation(self.num_kv_pages or self.layout.num_pages))
        num_groups = len(self.program.layer_groups)
        counts = [ceil_div(n, page_size) for n in num_tokens]
        return [np.array([[next(free) for _ in range(c)] for _ in range(num_groups)], np.int32) for c in counts]

    def step(self, parts: Sequence[tuple[Array, Array, int, int]], **sampling: Any) -> Step:
        """Parts are (tokens of the whole sequence, its table, first, end); every row is sampled."""
        page_size = self.layout.kv_format.page_size
        num_groups = len(self.program.layer_groups)
        table = np.full((num_groups, len(parts), max(t.shape[1] for _, t, _, _ in parts)), NO_PAGE, np.int32)
        slots = []
        for s, (_, pages, first, end) in enumerate(parts):
            table[:, s, : pages.shape[1]] = pages
            positions = np.arange(first, end)
            slots.append(pages[:, positions // page_size].astype(np.int64) * page_size + positions % page_size)
        num_tokens = sum(end - first for _, _, first, end in parts)
        return Step(
            token_ids=np.concatenate([tokens[first:end] for tokens, _, first, end in parts]).astype(np.int32),
            positions=np.concatenate([np.arange(first, end) for _, _, first, end in parts]).astype(np.int32),
            cu_seqlens=np.cumsum([0, *(end - first for _, _, first, end in parts)]).astype(np.int32),
            context_lens=np.array([end for _, _, _, end in parts], np.int32),
            page_tables=table,
            slot_mapping=np.concatenate(slots, axis=1),
            sample_rows=np.arange(num_tokens, dtype=np.int32),
            sampling=sampling_rows(num_tokens, **sampling),
        )

    def shelf(self) -> Shelf:
        """Where adapters are bound: pages from the last on, scattered, that `tables` does not give away."""
        kept = int(self.layout.num_pages * 0.4)
        free = self.rng.permutation(np.arange(self.layout.num_pages - kept, self.layout.num_pages)).tolist()
        self.num_kv_pages = self.layout.num_pages - kept
        return Shelf(self.backend, targets_of(self.program), self.layout.kv_format.page_bytes, free)

    def poison(self) -> None:
        """NaN in activations and pages: what is read must have been written in the run at hand. Adapters stay."""
        assert self.backend.arena is not None
        layout = self.layout
        num_pages = self.num_kv_pages or layout.num_pages
        end = layout.pages.offset + num_pages * layout.kv_format.page_bytes
        self.backend.arena.array[layout.activations.offset : end] = 0xFF


def open_backend(
    config: dict[str, Any],
    kind: str = "reference",
    *,
    limits: StepLimits = LIMITS,
    dtype: DType = DType.F32,
    kv_dtype: DType = DType.F32,
    page_size: int = 16,
    device: str = "cpu",
    threads: int = 1,
    num_slots: int = 4000,
    change: Callable[[Weight, Array], Array] = lambda _, values: values,
) -> Opened:
    """`dtype` is that of matrices, but for int8, where they are Q4_1. `num_slots`: of tokens, in
    pages. `change` is made to each weight's values."""
    if kind == "reference":
        backend: TestedBackend = ReferenceBackend(device, threads=threads if device == "cpu" else None)
        program = build_program(parse_config(config), dtype)
    else:
        _, _, activations = kind.partition(" ")
        backend = NativeBackend(threads, activations=activations.removeprefix("q4 ") or "f32")
        format = WeightFormat.Q4_1 if activations else WeightFormat(dtype)
        program = packed(build_program(parse_config(config), DType.F32), format)
    kv_format = program.kv_format(kv_dtype, page_size)
    scratch = {i: backend.scratch_bytes(op, program, limits, kv_format) for i, op in enumerate(program.ops)}
    num_pages = num_slots // page_size * len(program.layer_groups)
    layout = plan(program, Budget(1 << 30, "test"), limits, kv_dtype, page_size, scratch, num_pages)
    backend.open(program, layout)
    rng = np.random.default_rng(1)
    for weight in program.weights.values():
        spread = 0.3 if len(weight.shape) > 1 else 1.0
        values = (rng.standard_normal(weight.shape) * spread).astype(np.float32)
        store(backend, weight, change(weight, values).astype(np.float32))
    return Opened(backend, program, layout)


def packed(program: Program, format: WeightFormat) -> Program:
    """The program with its matrices in one format, each in a part, or one per expert."""
    weights = dict(program.weights)
    for name in matrix_names(program):
        *experts, num_rows, _ = weights[name].shape
        parts = (WeightPart(format, 0, num_rows),) * (experts[0] if experts else 1)
        weights[name] = replace(weights[name], parts=parts)
    return replace(program, weights=weights)


def store(backend: Backend, weight: Weight, values: Array) -> None:
    """Write a weight in two pieces; quantised where its parts are."""
    if not weight.parts:
        data = to_bytes(values, weight.dtype, weight.name)
        half = len(data) // 2
        backend.store_weight(weight.name, 0, data[:half])
        backend.store_weight(weight.name, half, data[half:])
        return
    for index, rows in enumerate(values.reshape(len(weight.parts), -1, weight.shape[-1])):
        format = weight.parts[index].format
        is_float = format.is_float or format is WeightFormat.Q8_0
        raw = to_rows(rows, format, "") if is_float else gguf.quantize(rows, gguf.GGMLQuantizationType[format.name])
        backend.store_rows(weight.name, index, 0, raw[:16])
        backend.store_rows(weight.name, index, 16, raw[16:])
