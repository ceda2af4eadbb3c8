"""AdapterTraffic: what adapters cost steps. Each distinct one of a step is read once, however many rows it has."""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.engine.chunk import Chunk


class AdapterTraffic:
    """Counters since start."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps with an adapter."""
        self.num_adapters = 0
        """Distinct adapters, added up over steps."""
        self.num_bytes = 0
        """Their bytes, added up over steps."""

    def note(self, chunks: Sequence[Chunk]) -> None:
        """A step of these chunks was computed, and nobody of them has ended yet."""
        residents = {chunk.choice.resident for chunk in chunks if _is_adapted(chunk)}
        if residents:
            self.num_steps += 1
            self.num_adapters += len(residents)
            self.num_bytes += sum(resident.size_bytes for resident in residents if resident is not None)


def _is_adapted(chunk: Chunk) -> bool:
    """Its adapter computes something of the chunk."""
    start = chunk.choice.request.adapter_start
    return chunk.choice.resident is not None and start is not None and start < chunk.stop
