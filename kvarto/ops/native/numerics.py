"""What is computed in less than float32: decided from the program and the instruction set, before there is memory.

A product is int8 where every part of its matrix has 8 bits or less: activations are then quantised per row and group
of 32. A buffer lies quantised where such products are all that read it, and whoever writes it can quantise. Where the
set has matrix tiles, `bf16` lets linears multiply in bfloat16 instead, which is closer to float32 and slower for a
single row; logits, of few rows, stay int8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from kvarto.core.buffers import Weight
from kvarto.core.errors import UsageError
from kvarto.core.ops import Activate, Attention, GatedActivation, Gather, Linear, Logits, Norm, Op
from kvarto.core.program import Program

TILES_ISA = "amx"
"""The instruction set that has matrix tiles."""
GROUP = 32
"""Elements of a row that share a scale."""

_Quantiser = Norm | GatedActivation | Activate | Attention | Gather
"""Ops that can write quantised rows."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Of one program."""

    int8_outputs: frozenset[str]
    """Buffers that ops write whose products are int8."""
    int8_buffers: frozenset[str]
    """Buffers whose rows are quantised."""
    bf16_outputs: frozenset[str] = frozenset()
    """Buffers that linears write whose products are bfloat16."""

    @property
    def is_exact(self) -> bool:
        """Float32 throughout: attention too computes in nothing less."""
        return not self.int8_outputs and not self.bf16_outputs

    @property
    def name(self) -> str:
        """For fingerprints."""
        return "f32" if self.is_exact else "bf16" if self.bf16_outputs else "int8"

    def products(self, out: str) -> int:
        """Of the op that writes `out`: its place in the native enumeration."""
        return 2 if out in self.bf16_outputs else 1 if out in self.int8_outputs else 0


def decide_numerics(program: Program, activations: str, isa: str) -> Numerics:
    """`activations`: `auto`, `f32`, `bf16` or `int8`. Raises UsageError where what is asked for is not to be had."""
    if activations == "f32":
        return Numerics(frozenset(), frozenset())
    if activations == "bf16" and isa != TILES_ISA:
        raise UsageError(f"`--activations bf16` needs a machine with AMX, and this one runs `{isa}`; use `auto`")
    ops = [op for op in program.ops if _may_be_int8(op, program)]
    if activations != "auto" and not ops:
        asked = f"`--activations {activations}`"
        raise UsageError(f"{asked} needs matrices of 8 bits or less, and this model has none; use `auto` or `f32`")
    bf16_outputs = frozenset(op.out for op in ops if activations == "bf16" and isinstance(op, Linear))
    int8_outputs = frozenset(op.out for op in ops) - bf16_outputs
    return Numerics(int8_outputs, frozenset(_int8_buffers(program, int8_outputs)), bf16_outputs)


def _may_be_int8(op: Op, program: Program) -> TypeGuard[Linear | Logits]:
    # Experts keep their formats and multiply in float32: tokens of one expert are few, and reading its weights decides.
    return isinstance(op, Linear | Logits) and is_quantised(program.weights[op.weight])


def is_quantised(weight: Weight) -> bool:
    """Whether all its parts have codes of 8 bits or less."""
    return bool(weight.parts) and not any(part.format.is_float for part in weight.parts)


def _int8_buffers(program: Program, int8_outputs: frozenset[str]) -> set[str]:
    readers: dict[str, list[Op]] = {}
    writers: dict[str, list[Op]] = {}
    for op in program.ops:
        for name in op.reads:
            readers.setdefault(name, []).append(op)
        for name in op.writes:
            writers.setdefault(name, []).append(op)
    return {
        name
        for name, ops in readers.items()
        if all(isinstance(op, Linear | Logits) and op.out in int8_outputs for op in ops)
        and len(writers[name]) == 1
        and _can_quantise(writers[name][0], name, program)
    }


def _can_quantise(op: Op, name: str, program: Program) -> bool:
    if not isinstance(op, _Quantiser) or op.out != name or program.buffers[name].width % GROUP:
        return False
    return not isinstance(op, Attention) or op.heads.head_dim % GROUP == 0

