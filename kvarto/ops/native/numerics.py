"""What is computed in less than float32: decided from the program and the instruction set, before there is memory.

A product may be narrow where every part of its matrix has 8 bits or less: activations are then quantised to int8 per
row and group of 32, or, with matrix tiles, rounded to bfloat16 as the weights are. A buffer lies narrowed where
products of one kind are all that read it, and whoever writes it can narrow. Where every part is of floats and there are
matrix tiles, a product is one of three parts of bfloat16, which is as precise as float32 (native/ops/linear_bf16x3.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from kvarto.core.buffers import Weight
from kvarto.core.errors import UsageError
from kvarto.core.ops import Activate, Attention, GatedActivation, Gather, Linear, Logits, Norm, Op
from kvarto.core.program import Program

TILES_ISA = "amx"
"""The instruction set that has matrix tiles."""
BF16_ISAS = ("avx512_bf16", TILES_ISA)
"""Those that multiply pairs of bfloat16: what attention then computes in, where not all is float32."""
GROUP = 32
"""Elements of a row that share a scale."""
FEWEST_BF16_ROWS = 8
PRODUCTS = ("f32", "int8", "bf16", "bf16x3")
"""In the order of `enum class Products` in native/core. The first three are forms of rows too: `enum class RowForm`."""

_Narrower = Norm | GatedActivation | Activate | Attention | Gather
"""Ops that can write narrow rows."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Of one program."""

    products_of: Mapping[str, str]
    """In what is multiplied, of `PRODUCTS`, by the buffer that receives it; float32 where it is not named."""
    forms: Mapping[str, str]
    """What rows of a buffer are, likewise."""

    @property
    def is_exact(self) -> bool:
        """As precise as float32 throughout: attention too computes in nothing less."""
        return self._is_all(("f32", "bf16x3"))

    @property
    def is_plain(self) -> bool:
        """Sums are chains of float32, and the same on every set that has fused multiply-add."""
        return self._is_all(("f32",))

    @property
    def name(self) -> str:
        """For fingerprints."""
        return "f32" if self.is_exact else "bf16" if "bf16" in self.products_of.values() else "int8"

    def _is_all(self, kinds: tuple[str, ...]) -> bool:
        return all(kind in kinds for kind in self.products_of.values())

    def products(self, out: str) -> int:
        """Of the op that writes `out`: its place in the native enumeration."""
        return PRODUCTS.index(self.products_of.get(out, "f32"))

    def form(self, buffer: str, num_rows: int) -> str:
        """Of a buffer's rows, of `PRODUCTS`. Bfloat16 rows lie by sixteens, and few of them would not fit in the place
        of float32 ones."""
        form = self.forms.get(buffer, "f32")
        return "f32" if form == "bf16" and num_rows < FEWEST_BF16_ROWS else form


def decide_numerics(program: Program, activations: str, isa: str) -> Numerics:
    """`activations`: `auto`, `f32`, `bf16` or `int8`. Raises UsageError where what is asked for is not to be had."""
    exact = _exact_products(program, isa)
    if activations == "f32":
        return Numerics(exact, {})
    if activations == "bf16" and isa != TILES_ISA:
        raise UsageError(f"`--activations bf16` needs a machine with AMX, and this one runs `{isa}`; use `auto`")
    narrow = ("bf16" if isa == TILES_ISA else "int8") if activations == "auto" else activations
    products = {op.out: narrow for op in program.ops if _may_be_narrow(op, program)}
    if activations != "auto" and not products:
        asked = f"`--activations {activations}`"
        raise UsageError(f"{asked} needs matrices of 8 bits or less, and this model has none; use `auto` or `f32`")
    return Numerics(exact | products, _narrow_buffers(program, products))


def _exact_products(program: Program, isa: str) -> dict[str, str]:
    """Matrices of floats are multiplied in parts where there are tiles for it: as precise, and faster."""
    if isa != TILES_ISA:
        return {}
    linears = (op for op in program.ops if isinstance(op, Linear | Logits))
    return {op.out: "bf16x3" for op in linears if _has_tiles_of_floats(program.weights[op.weight])}


def _has_tiles_of_floats(weight: Weight) -> bool:
    return bool(weight.parts) and all(part.format.is_float for part in weight.parts) and weight.shape[-1] % GROUP == 0


def _may_be_narrow(op: Op, program: Program) -> TypeGuard[Linear | Logits]:
    # Experts keep their formats and multiply in float32: tokens of one expert are few, and reading its weights decides.
    return isinstance(op, Linear | Logits) and is_quantised(program.weights[op.weight])


def is_quantised(weight: Weight) -> bool:
    """Whether all its parts have codes of 8 bits or less."""
    return bool(weight.parts) and not any(part.format.is_float for part in weight.parts)


def _narrow_buffers(program: Program, products: Mapping[str, str]) -> dict[str, str]:
    readers: dict[str, set[str]] = {}
    writers: dict[str, list[Op]] = {}
    for op in program.ops:
        kind = products.get(op.out, "f32") if isinstance(op, Linear | Logits) else "f32"
        for name in op.reads:
            readers.setdefault(name, set()).add(kind)
        for name in op.writes:
            writers.setdefault(name, []).append(op)
    return {
        name: next(iter(kinds))
        for name, kinds in readers.items()
        if len(kinds) == 1
        and "f32" not in kinds
        and len(writers[name]) == 1
        and _can_narrow(writers[name][0], name, program)
    }


def _can_narrow(op: Op, name: str, program: Program) -> bool:
    if not isinstance(op, _Narrower) or op.out != name or program.buffers[name].width % GROUP:
        return False
    return not isinstance(op, Attention) or op.heads.head_dim % GROUP == 0

