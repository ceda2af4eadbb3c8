"""Which modules of a base model an adapter may update, and where each lies in the weights of its Program.

The decoder builder stacks q, k, v and gate, up into one weight each, so a module is a band of output rows:

```text
layer0.qkv  = q_proj rows | k_proj rows | v_proj rows     `qkv_proj`, `c_attn`, ... of a split base are all of them,
layer0.gate_up = gate_proj rows | up_proj rows            `q_proj`, `gate_proj`, ... of a fused base are bands
```
A, with its one row per rank, is shared by all of a band's outputs; B has a row per output row. Weights are laid out as
Hugging Face has them, whatever file the base came from (the interleaved q and k of GGUF came undone when it was read),
and A and B never lie transposed, not even where the base's matrices do (Conv1D): so rows of B are rows of the band.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvarto.core.buffers import Weight
from kvarto.core.errors import AdapterMismatch, UnsupportedAdapter
from kvarto.core.ops import Attention, Embed, Experts, GatedActivation, HeadShape, Linear, Logits, Route
from kvarto.core.program import Program

FUSED_QKV = ("qkv_proj", "c_attn", "W_pack", "query_key_value")
"""What one module for q, k and v is called elsewhere. All are read as rows of q, then k, then v."""
FUSED_GATE_UP = ("gate_up_proj",)
SPLIT_QKV = ("q_proj", "k_proj", "v_proj")
SPLIT_GATE_UP = ("gate_proj", "up_proj")
LM_HEAD = "lm_head"


class Role(StrEnum):
    """Which op an update joins. A tied table has two, and an update of one is none of the other."""

    LINEAR = "linear"
    LOGITS = "logits"
    EMBED = "embed"


@dataclass(frozen=True, slots=True)
class Target:
    """A band of outputs of one op."""

    weight: str
    """Of the Program."""
    role: Role
    first_row: int
    out_width: int
    """Rows of the band and of B; for an embedding table its width."""
    in_width: int
    """Columns of A; for an embedding table its number of tokens."""


@dataclass(frozen=True, slots=True)
class BaseTargets:
    """All modules of one base model."""

    architecture: str
    heads: HeadShape
    vocab_size: int
    is_tied: bool
    embed_module: str
    by_module: dict[str, Target] = field(default_factory=dict)
    without_place: dict[str, str] = field(default_factory=dict)
    """Modules of the base that cannot be updated, and why."""
    op_indices: dict[tuple[str, Role], int] = field(default_factory=dict)
    """Of the op that each weight and role belong to, in the Program."""

    @property
    def root(self) -> str:
        """What adapters leave out that were trained on a model without its output matrix."""
        return self.embed_module.rpartition(".")[0] + "."

    def order_of(self, target: Target) -> tuple[int, int]:
        """Sorts targets as a step meets them: by op, then by row."""
        return self.op_indices[target.weight, target.role], target.first_row

    def find(self, module: str) -> Target:
        """The band of a module path. Raises AdapterMismatch, or UnsupportedAdapter for modules without a place."""
        for name in (module, self.root + module):
            if name in self.by_module:
                return self.by_module[name]
            if name in self.without_place:
                raise UnsupportedAdapter(
                    f"module `{name}` {self.without_place[name]}, which adapters cannot update yet; "
                    "train attention and dense modules, or merge the adapter"
                )
        raise AdapterMismatch(
            f"the base, `{self.architecture}` with {len(self.by_module)} modules and spellings such as "
            f"{self._examples()}, has no module `{module}`; serve the base that the adapter was trained on"
        )

    def _examples(self) -> str:
        some = list(self.by_module)
        return ", ".join(f"`{name}`" for name in (some[:2] + some[-1:]))


def targets_of(program: Program) -> BaseTargets:
    """Read the modules off the ops of a decoder."""
    (embed,) = (op for op in program.ops if isinstance(op, Embed))
    (logits,) = (op for op in program.ops if isinstance(op, Logits))
    attentions = [op for op in program.ops if isinstance(op, Attention)]
    table = program.weights[embed.table]
    found = BaseTargets(
        architecture=program.architecture,
        heads=attentions[0].heads,
        vocab_size=program.vocab_size,
        is_tied=logits.weight == embed.table,
        embed_module=_module(table, 0),
    )
    found.by_module[found.embed_module] = Target(embed.table, Role.EMBED, 0, table.shape[1], table.shape[0])
    splits = {op.qkv: _qkv_widths(op.heads) for op in attentions}
    splits |= {op.x: _halves(program, op.x) for op in program.ops if isinstance(op, GatedActivation)}
    for index, op in enumerate(program.ops):
        if isinstance(op, Linear):
            found.op_indices[op.weight, Role.LINEAR] = index
            found.by_module.update(_linear_targets(program.weights[op.weight], splits.get(op.out)))
        elif isinstance(op, Route | Experts):
            found.without_place.update(_experts(program, op))
    output = program.weights[logits.weight]
    found.by_module[LM_HEAD] = Target(logits.weight, Role.LOGITS, 0, output.shape[0], output.shape[1])
    found.op_indices[embed.table, Role.EMBED] = program.ops.index(embed)
    found.op_indices[logits.weight, Role.LOGITS] = program.ops.index(logits)
    return found


def _qkv_widths(heads: HeadShape) -> tuple[int, ...]:
    kv_width = heads.num_kv_heads * heads.head_dim
    return heads.num_qo_heads * heads.head_dim, kv_width, kv_width


def _halves(program: Program, buffer: str) -> tuple[int, ...]:
    return (program.buffers[buffer].width // 2,) * 2


def _linear_targets(weight: Weight, split: tuple[int, ...] | None) -> Iterator[tuple[str, Target]]:
    """Modules as the base has them, then other spellings of the same rows."""
    modules = [_module(weight, index) for index in range(len(weight.sources))]
    parent = modules[0].rpartition(".")[0]
    if len(modules) == 1:
        yield modules[0], _band(weight, 0, weight.shape[0])
        if split is not None:
            names = SPLIT_QKV if len(split) == len(SPLIT_QKV) else SPLIT_GATE_UP
            yield from _bands(weight, [f"{parent}.{name}" for name in names], split)
        return
    assert split is not None, f"`{weight.name}` is stacked of {modules}, and nothing says how"
    yield from _bands(weight, modules, split)
    for name in FUSED_QKV if len(split) == len(SPLIT_QKV) else FUSED_GATE_UP:
        yield f"{parent}.{name}", _band(weight, 0, weight.shape[0])


def _bands(weight: Weight, modules: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, Target]]:
    assert sum(widths) == weight.shape[0], f"`{weight.name}` has {weight.shape[0]} rows, its parts {widths}"
    first_row = 0
    for module, width in zip(modules, widths, strict=True):
        yield module, _band(weight, first_row, width)
        first_row += width


def _band(weight: Weight, first_row: int, num_rows: int) -> Target:
    return Target(weight.name, Role.LINEAR, first_row, num_rows, weight.shape[1])


def _experts(program: Program, op: Route | Experts) -> Iterator[tuple[str, str]]:
    why = "routes tokens to experts" if isinstance(op, Route) else "is an expert"
    for name in op.weights:
        weight = program.weights[name]
        for index in range(len(weight.sources)):
            yield _module(weight, index), why


def _module(weight: Weight, index: int) -> str:
    return weight.sources[index].name.removesuffix(".weight")
