"""What is computed in 8 bits: decided from the program alone, so that it is known before there is memory.

A product is int8 where every part of its matrix has 8 bits or less: activations are then quantised per row and group
of 32. A buffer lies quantised where such products are all that read it, and whoever writes it can quantise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core.buffers import Weight
from kvarto.core.errors import UsageError
from kvarto.core.ops import Activate, Attention, GatedActivation, Gather, Linear, Logits, Norm, Op
from kvarto.core.program import Program

ACTIVATIONS = ("auto", "f32", "int8")
"""What `--activations` may be."""
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

    @property
    def is_exact(self) -> bool:
        """Float32 throughout: attention too computes in nothing less."""
        return not self.int8_outputs

    @property
    def name(self) -> str:
        """For fingerprints."""
        return "f32" if self.is_exact else "int8"


def decide_numerics(program: Program, activations: str) -> Numerics:
    """`activations`: one of ACTIVATIONS. Raises UsageError where int8 is asked for and no matrix has so few bits."""
    if activations == "f32":
        return Numerics(frozenset(), frozenset())
    int8_outputs = frozenset(name for op in program.ops if _may_be_int8(op, program) for name in op.writes)
    if activations == "int8" and not int8_outputs:
        raise UsageError(
            "`--activations int8` needs matrices of 8 bits or less, and this model has none; use `auto` or `f32`"
        )
    return Numerics(int8_outputs, frozenset(_int8_buffers(program, int8_outputs)))


def _may_be_int8(op: Op, program: Program) -> bool:
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

