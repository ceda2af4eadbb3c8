"""The regions whose size the model and the step limits fix: weights and activations. Pages get what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvarto.core.buffers import StepLimits
from kvarto.core.kv_format import PAGE_ALIGNMENT
from kvarto.core.layout import Region
from kvarto.core.ops import GatedActivation, Linear, Logits
from kvarto.core.program import Program
from kvarto.core.units import align_up
from kvarto.memory.offset_check import check_packing
from kvarto.memory.offsets import Packing, PlannedBuffer, lower_bound, pack

TENSOR_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


@dataclass(frozen=True, slots=True)
class FixedRegions:
    """`weights | activations`, back to back from offset 0; offsets are absolute in the arena."""

    weights: Region
    activations: Region
    weight_offsets: dict[str, int]
    buffer_offsets: dict[str, int]
    scratch_offsets: dict[int, int]
    activation_peak_bytes: int
    """End of the highest buffer, before the region is rounded up to whole pages of the system."""
    activation_lower_bound_bytes: int

    @property
    def size_bytes(self) -> int:
        """Both regions."""
        return self.activations.end


def plan_fixed(program: Program, limits: StepLimits, scratch_bytes: Mapping[int, int]) -> FixedRegions:
    """Place weights in their order and pack activations by lifespan. `scratch_bytes` is by op index."""
    weight_offsets, weights_end = _stack_weights(program)
    weights = Region("weights", 0, align_up(weights_end, PAGE_ALIGNMENT))
    buffers = _buffers(program, limits)
    scratch = _scratch(program, scratch_bytes)
    planned = [*buffers.values(), *scratch.values()]
    packing = pack(planned)
    check_packing(planned, packing)  # an overlap would be silent corruption; this takes milliseconds
    activations = Region("activations", weights.end, align_up(packing.peak_bytes, PAGE_ALIGNMENT))
    offsets = _absolute(packing, activations.offset)
    return FixedRegions(
        weights,
        activations,
        weight_offsets,
        buffer_offsets=dict(zip(buffers, offsets, strict=False)),
        scratch_offsets=dict(zip(scratch, offsets[len(buffers) :], strict=True)),
        activation_peak_bytes=packing.peak_bytes,
        activation_lower_bound_bytes=lower_bound(planned),
    )


def _stack_weights(program: Program) -> tuple[dict[str, int], int]:
    offsets = {}
    end = 0
    for name, weight in program.weights.items():
        offsets[name] = align_up(end, TENSOR_ALIGNMENT)
        end = offsets[name] + weight.size_bytes
    return offsets, end


def _buffers(program: Program, limits: StepLimits) -> dict[str, PlannedBuffer]:
    lifespans = program.lifespans()
    for index, op in enumerate(program.ops):
        if isinstance(op, Linear) and _is_gated_next(program, index):
            first, last = lifespans[op.x]
            lifespans[op.x] = first, max(last, index + 2)
    return {
        name: PlannedBuffer(program.buffers[name].size_bytes(limits), first, last, TENSOR_ALIGNMENT)
        for name, (first, last) in lifespans.items()
    }


def _scratch(program: Program, scratch_bytes: Mapping[int, int]) -> dict[int, PlannedBuffer]:
    return {
        index: PlannedBuffer(size_bytes, index, index + 1 + _outlives_its_op(program, index), TENSOR_ALIGNMENT)
        for index, size_bytes in sorted(scratch_bytes.items())
        if size_bytes > 0
    }


def _outlives_its_op(program: Program, index: int) -> bool:
    """`Sample` may read what `Logits` left in its scratch."""
    op = program.ops[index]
    return isinstance(op, Logits) or (isinstance(op, Linear) and _is_gated_next(program, index))


def _is_gated_next(program: Program, index: int) -> bool:
    """What a gated activation writes may be written by the linear before it, while that still reads its rows."""
    return any(isinstance(op, GatedActivation) for op in program.ops[index + 1 : index + 2])


def _absolute(packing: Packing, base: int) -> list[int]:
    return [base + offset for offset in packing.offsets]
