"""Instruction sets, kernels and compiled programs. Offsets are bytes from the start of the arena."""

import numpy as np
from numpy.typing import NDArray

from kvarto.core.step import Step, StepResult

def isas() -> list[str]: ...
def summary_row_bytes(vocab_size: int) -> int: ...
def sample_scratch_bytes(vocab_size: int, num_threads: int) -> int: ...

class Rows:
    def __init__(
        self, offset: int, row_bytes: int, width: int, num_rows: int, form: int = 0, per_sample: bool = False
    ) -> None: ...

class Part:
    def __init__(self, format: int, group_size: int, num_rows: int, offset: int) -> None: ...

class Weight:
    def __init__(self, num_rows: int, num_columns: int, parts: list[Part]) -> None: ...

class Bytes:
    def __init__(self, offset: int, size_bytes: int) -> None: ...

class Pages:
    def __init__(self, offset: int, page_bytes: int, layer_bytes: int, page_size: int, type: int) -> None: ...

class Heads:
    def __init__(self, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None: ...

class StepBounds:
    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_samples: int,
        max_positions: int,
        vocab_size: int,
        num_groups: int,
        num_pages: int,
        page_size: int,
    ) -> None: ...

class Strips:
    def __init__(self, start: int, num_strips: int, num_columns: int, type: int) -> None: ...

class Update:
    def __init__(
        self,
        op: int,
        first_row: int,
        scaling: float,
        a: Strips,
        b: Strips,
        bias: Strips | None,
        magnitude: Strips | None,
    ) -> None: ...

class Tokens:
    def __init__(self, op: int, rows: Strips, token_ids: list[int]) -> None: ...

class AdapterShape: ...

class Program:
    def __init__(self, isa: str, num_threads: int, arena: int, arena_bytes: int, bounds: StepBounds) -> None: ...
    def add_embed(
        self, out: Rows, table: Weight, scale: float, position_table: int | None, sums: Rows | None = None
    ) -> None: ...
    def add_norm(
        self, x: Rows, out: Rows, residual: Rows | None, weight: int, bias: int | None, kind: int, eps: float
    ) -> None: ...
    def add_head_norm(self, qkv: Rows, q_weight: int, k_weight: int, heads: Heads, eps: float) -> None: ...
    def add_rope(self, qkv: Rows, heads: Heads, inv_freq: list[float], attention_factor: float) -> None: ...
    def add_write_kv(self, qkv: Rows, heads: Heads, group: int, layer_slot: int, pages: Pages) -> None: ...
    def add_attention(
        self,
        qkv: Rows,
        out: Rows,
        heads: Heads,
        group: int,
        layer_slot: int,
        scale: float,
        window: int,
        softcap: float,
        is_exact: bool,
        pages: Pages,
        scratch: Bytes,
    ) -> None: ...
    def add_gated_activation(self, x: Rows, out: Rows, activation: int, may_fuse: bool = False) -> None: ...
    def add_activate(self, x: Rows, out: Rows, activation: int) -> None: ...
    def add_gather(self, x: Rows, out: Rows) -> None: ...
    def add_linear(
        self,
        x: Rows,
        out: Rows,
        weight: Weight,
        bias: int | None,
        products: int,
        scratch: Bytes,
        sums: Rows | None = None,
    ) -> None: ...
    def add_route(
        self, x: Rows, ids: Rows, shares: Rows, weight: Weight, top_k: int, normalise: bool, scratch: Bytes
    ) -> None: ...
    def add_experts(
        self,
        x: Rows,
        ids: Rows,
        shares: Rows,
        out: Rows,
        gate_up: list[Weight],
        down: list[Weight],
        activation: int,
        top_k: int,
        scratch: Bytes,
    ) -> None: ...
    def add_logits(
        self,
        x: Rows,
        out: Rows,
        weight: Weight,
        bias: int | None,
        scale: float,
        softcap: float,
        products: int,
        scratch: Bytes,
        summaries: Rows,
        sums: Rows | None = None,
    ) -> None: ...
    def add_sample(self, logits: Rows, summaries: Rows | None, scratch: Bytes) -> None: ...
    def adapter_shape(self, updates: list[Update], tokens: list[Tokens]) -> AdapterShape: ...
    def bind_adapter(self, handle: int, pool: Pages, pages: list[int], shape: AdapterShape) -> None: ...
    def unbind_adapter(self, handle: int) -> None: ...
    def run(
        self, step: Step, page_tables: NDArray[np.int32], slot_mapping: NDArray[np.int64], result: StepResult
    ) -> None: ...
    def run_timed(
        self, step: Step, page_tables: NDArray[np.int32], slot_mapping: NDArray[np.int64], result: StepResult
    ) -> list[tuple[int, float]]: ...
    @property
    def num_phases(self) -> int: ...

def attention_scratch_bytes(
    heads: Heads, max_tokens: int, max_seqs: int, max_context: int, num_threads: int
) -> int: ...
def route_scratch_bytes(num_rows: int, num_experts: int) -> int: ...
def experts_scratch_bytes(num_rows: int, top_k: int, num_experts: int, hidden: int, ffn: int) -> int: ...
def quantised_row_bytes(width: int) -> int: ...
def bf16_bytes(num_rows: int, width: int) -> int: ...
def bf16x3_bytes(num_rows: int, width: int) -> int: ...
def linear_int8_scratch_bytes(num_rows: int, width: int, quantises: bool) -> int: ...
def try_team(num_threads: int, num_runs: int, num_phases: int, num_items: int, pause_us: int) -> int: ...
def barrier_seconds(num_threads: int, num_barriers: int) -> float: ...
