"""What one server asks of a node: bytes on the device and in its container. From the planner's layout, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core.layout import Layout
from kvarto.core.units import GIB, MIB, align_up
from kvarto.memory.device_limit import DEVICE_OVERHEAD_BYTES

PROCESS_BYTES = 1 * GIB
"""Server, engine and template processes with their libraries on a CPU: an allowance. 0.4 GiB with the demo model, in
`tests/cluster/test_size.py`; tokenizers of a quarter million words take more."""
GPU_PROCESS_BYTES = 3 * GIB
"""The same with PyTorch for CUDA, whose libraries alone are larger than that, though not all is ever loaded."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one server, whole MiB each."""

    arena_bytes: int
    """Weights, activations and pages: what `--device-memory` says."""
    overhead_bytes: int
    """Beside the arena on a GPU: the driver's context and workspaces. None on a CPU."""
    host_bytes: int
    """Of the container's own memory, beside an arena on a GPU; with the arena in it on a CPU."""

    @property
    def limit_bytes(self) -> int:
        """What a limit on the GPU must leave to the container."""
        return self.arena_bytes + self.overhead_bytes


def need_of(layout: Layout, *, on_gpu: bool, overhead_bytes: int = DEVICE_OVERHEAD_BYTES) -> Need:
    """The need of a server with that layout. The arena is taken whole, also where its last page leaves a rest."""
    arena_bytes = align_up(layout.budget.device_bytes, MIB)
    tables_bytes = align_up(layout.host_bytes + layout.record_bytes, MIB)
    if on_gpu:
        return Need(arena_bytes, align_up(overhead_bytes, MIB), tables_bytes + GPU_PROCESS_BYTES)
    return Need(arena_bytes, 0, arena_bytes + tables_bytes + PROCESS_BYTES)
