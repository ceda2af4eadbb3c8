"""The op set: what each op reads, writes and costs. How it runs is a backend's business.

Buffers are `[rows, width]`; `qkv` rows are `[q heads | k heads | v heads] * head_dim`. A cost counts a
multiply-add as two FLOPs, and weights once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvarto.core.buffers import Cost, StepShape

if TYPE_CHECKING:
    from kvarto.core.program import Program


class Activation(StrEnum):
    """Pointwise non-linearities."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"


class NormKind(StrEnum):
    """`rms`: x / sqrt(mean(x²) + eps) * w. `layer`: (x - mean) / sqrt(var + eps) * w + b."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a `qkv` row is divided."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of a `qkv` row."""
        return (self.num_qo_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Op:
    """Base of all ops; see the subclasses for meaning."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Buffers that the op reads."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Buffers that the op writes, in place or anew."""
        return ()

    @property
    def weights(self) -> tuple[str, ...]:
        """Weights that the op reads."""
        return ()

    def cost(self, program: Program, shape: StepShape) -> Cost:
        """FLOPs, and bytes of weights and buffers moved, at one step shape."""
        raise NotImplementedError


def _names(*names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name is not None)


def _moved(program: Program, shape: StepShape, op: Op, flops: int, *, weight_bytes: int | None = None) -> Cost:
    def size(names: tuple[str, ...]) -> int:
        return sum(b.row_bytes * shape.num_rows(b) for b in (program.buffers[name] for name in names))

    if weight_bytes is None:
        weight_bytes = sum(program.weights[name].size_bytes for name in op.weights)
    return Cost(flops, weight_bytes + size(op.reads), size(op.writes))


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """`out[t] = table[token[t]] * scale (+ positions[position[t]])`."""

    out: str
    table: str
    scale: float = 1.0
    position_table: str | None = None

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def weights(self) -> tuple[str, ...]:
        return _names(self.table, self.position_table)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        row_bytes = sum(program.weights[w].size_bytes // program.weights[w].shape[0] for w in self.weights)
        flops = shape.num_tokens * program.buffers[self.out].width
        return _moved(program, shape, self, flops, weight_bytes=row_bytes * shape.num_tokens)


@dataclass(frozen=True, slots=True)
class Norm(Op):
    """`out = norm(x)`. With `residual`: first `residual += x` in place, then `out = norm(residual)`."""

    x: str
    out: str
    weight: str
    kind: NormKind
    eps: float
    bias: str | None = None
    residual: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return _names(self.x, self.residual)

    @property
    def writes(self) -> tuple[str, ...]:
        return _names(self.out, self.residual)

    @property
    def weights(self) -> tuple[str, ...]:
        return _names(self.weight, self.bias)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        x = program.buffers[self.x]
        return _moved(program, shape, self, 5 * shape.num_rows(x) * x.width)


@dataclass(frozen=True, slots=True)
class HeadNorm(Op):
    """RMS norm of each q head and each k head of `qkv`, in place (Qwen3, Gemma 3)."""

    qkv: str
    q_weight: str
    k_weight: str
    heads: HeadShape
    eps: float

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.qkv,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.qkv,)

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.q_weight, self.k_weight)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        width = (self.heads.num_qo_heads + self.heads.num_kv_heads) * self.heads.head_dim
        return _moved(program, shape, self, 4 * shape.num_tokens * width)


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """`out = x @ weight.T (+ bias)`; `weight: [out_features, in_features]`."""

    x: str
    out: str
    weight: str
    bias: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def weights(self) -> tuple[str, ...]:
        return _names(self.weight, self.bias)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        num_rows = shape.num_rows(program.buffers[self.x])
        return _moved(program, shape, self, 2 * num_rows * program.weights[self.weight].num_elements)


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotate the first `2 * len(inv_freq)` dims of each q and k head of `qkv` by position, in place, halves apart.

    Source: RoFormer (arXiv:2104.09864); frequencies already scaled (linear, llama3, yarn) by the model builder.
    """

    qkv: str
    heads: HeadShape
    inv_freq: tuple[float, ...]
    """Radians per position, one per pair of dims; float32 values."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.qkv,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.qkv,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        pairs = (self.heads.num_qo_heads + self.heads.num_kv_heads) * len(self.inv_freq)
        return _moved(program, shape, self, 6 * shape.num_tokens * pairs)


@dataclass(frozen=True, slots=True)
class WriteKV(Op):
    """Store the k and v heads of `qkv` in the pages, at each token's slot of layer group `group`."""

    qkv: str
    heads: HeadShape
    group: int
    layer_slot: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.qkv,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        return _moved(program, shape, self, 0)


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Causal attention of the q heads of `qkv` over the pages: prefill, decode and mixed batches alike.

    Keys go by tiles of 64 tokens by absolute position, whatever the page size; tiles add up in order inside fixed
    spans of 1,024 tokens, and spans merge in order: the sum does not depend on the batch.
    Source: FlashAttention (arXiv:2205.14135), PagedAttention (arXiv:2309.06180).
    """

    qkv: str
    out: str
    heads: HeadShape
    group: int
    layer_slot: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    """`score = softcap * tanh(score / softcap)` (Gemma 2)."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.qkv,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        flops = 4 * shape.context_tokens * self.heads.num_qo_heads * self.heads.head_dim
        kv_elements = 2 * shape.unique_context_tokens * self.heads.num_kv_heads * self.heads.head_dim
        return _moved(program, shape, self, flops) + Cost(0, 4 * kv_elements, 0)


@dataclass(frozen=True, slots=True)
class GatedActivation(Op):
    """`out = act(x[:, :width]) * x[:, width:]`, `x: [rows, 2 * width]`."""

    x: str
    out: str
    activation: Activation

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        out = program.buffers[self.out]
        return _moved(program, shape, self, 6 * shape.num_rows(out) * out.width)


@dataclass(frozen=True, slots=True)
class Activate(Op):
    """`out = act(x)`."""

    x: str
    out: str
    activation: Activation

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        out = program.buffers[self.out]
        return _moved(program, shape, self, 8 * shape.num_rows(out) * out.width)


@dataclass(frozen=True, slots=True)
class Route(Op):
    """Choose `top_k` experts per row: `ids` (int32) and `shares` (f32), both `[rows, top_k]`.

    Softmax over all experts, then the largest; `normalise` makes the chosen shares add up to 1 (Mixtral, Qwen3-MoE).
    """

    x: str
    ids: str
    shares: str
    weight: str
    top_k: int
    normalise: bool

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.ids, self.shares)

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.weight,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        num_rows = shape.num_rows(program.buffers[self.x])
        return _moved(program, shape, self, 2 * num_rows * program.weights[self.weight].num_elements)


@dataclass(frozen=True, slots=True)
class Experts(Op):
    """`out = sum over chosen experts of share * down(act(gate(x)) * up(x))`, experts in ascending order of id.

    `gate_up: [num_experts, 2 * ffn, hidden]`, `down: [num_experts, hidden, ffn]`.
    """

    x: str
    ids: str
    shares: str
    out: str
    gate_up: str
    down: str
    activation: Activation
    top_k: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.ids, self.shares)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.gate_up, self.down)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        num_experts = program.weights[self.down].shape[0]
        num_choices = shape.num_rows(program.buffers[self.x]) * self.top_k
        used = min(num_experts, num_choices)
        per_expert = sum(program.weights[w].num_elements for w in self.weights) // num_experts
        per_expert_bytes = sum(program.weights[w].size_bytes for w in self.weights) // num_experts
        flops = 2 * num_choices * per_expert
        return _moved(program, shape, self, flops, weight_bytes=used * per_expert_bytes)


@dataclass(frozen=True, slots=True)
class Gather(Op):
    """`out[s] = x[sample_rows[s]]`: from one row per token to one per sample."""

    x: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        row_bytes = program.buffers[self.out].row_bytes * shape.num_samples
        return Cost(0, row_bytes, row_bytes)


@dataclass(frozen=True, slots=True)
class Logits(Op):
    """`out = x @ weight.T (+ bias)`, times `scale`, then softcapped; `weight: [vocab_size, hidden]`."""

    x: str
    out: str
    weight: str
    bias: str | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def weights(self) -> tuple[str, ...]:
        return _names(self.weight, self.bias)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        return _moved(program, shape, self, 2 * shape.num_samples * program.weights[self.weight].num_elements)


@dataclass(frozen=True, slots=True)
class Sample(Op):
    """Draw one token per row of `logits`, with the parameters in `Step.sampling`; see `kvarto.core.step`."""

    logits: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits,)

    def cost(self, program: Program, shape: StepShape) -> Cost:
        return _moved(program, shape, self, 20 * shape.num_samples * program.vocab_size)
