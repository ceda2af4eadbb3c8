"""The hashed model with adapters: what a token leaves in its page depends on the bytes in the pages that are bound.

So a page that is wrong, stale, poisoned or half copied changes the KV, and every token after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.source import FoundAdapter
from kvarto.core.bound_adapter import BoundAdapter, BoundShape
from kvarto.core.ids import NO_ADAPTER
from kvarto.core.step import Step, StepResult
from tests.adapters.fake_source import page_of
from tests.engine.fake_model import HashBackend, Oracle, context_hash, kv_of

NUMBER_BYTES = 8


_SHAPE = BoundShape(updates=())


def bind(found: FoundAdapter, pages: NDArray[np.int32]) -> BoundAdapter:
    return BoundAdapter(page_bytes=0, pages=pages, shape=_SHAPE)


def hash_of(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=NUMBER_BYTES).digest(), "little")


class AdaptedBackend(HashBackend):
    """Beside the base, what is bound."""

    bound: dict[int, BoundAdapter]
    are_pages_here = False
    """In this machine's memory, as a backend would say that has them there."""

    @property
    def _bytes(self) -> NDArray[np.uint8]:
        return self._slots.view(np.uint8)

    def host_pages(self) -> NDArray[np.uint8] | None:
        return self._bytes if self.are_pages_here else None

    def write_pages(self, pages: NDArray[np.int32], images: NDArray[np.uint8], which: NDArray[np.int32]) -> None:
        self._bytes[pages, : images.shape[1]] = images[which]

    def bind_adapter(self, handle: int, adapter: BoundAdapter) -> None:
        assert handle not in self.bound, f"handle {handle} is bound twice"
        self.bound[handle] = adapter

    def unbind_adapter(self, handle: int) -> None:
        del self.bound[handle]

    def run(self, step: Step) -> StepResult:
        self.check_step(step)
        self._check_windows(step)
        slots = self._slots.reshape(-1)
        try:
            self._before_run(step)
        except BaseException:
            slots[step.slot_mapping[:, ::2]] = 13
            raise
        mixed = self._adapter_hashes(step)
        for group, mapping in enumerate(step.slot_mapping):
            slots[mapping] = kv_of(step.token_ids, step.positions, group) ^ mixed
        return self._sample(step)

    def _adapter_hashes(self, step: Step) -> NDArray[np.uint64]:
        """Per row: the hash of the adapter's bytes where it is active, else 0."""
        hashes = np.zeros(step.num_tokens, np.uint64)
        if step.adapters is None:
            assert step.adapter_starts is None
            return hashes
        assert step.adapter_starts is not None
        assert (step.adapters != NO_ADAPTER).any(), "a step without adapters says so with None"
        for index, (handle, start) in enumerate(zip(step.adapters.tolist(), step.adapter_starts.tolist(), strict=True)):
            if handle == NO_ADAPTER:
                continue
            rows = np.arange(step.cu_seqlens[index], step.cu_seqlens[index + 1])
            content = self._bytes[self.bound[handle].pages].tobytes()
            hashes[rows[step.positions[rows] >= start]] = hash_of(content)
        return hashes


@dataclass(frozen=True)
class Content:
    """What an adapter is, for the oracle."""

    seed: int
    num_pages: int
    page_bytes: int
    start: int = 0

    @property
    def hash(self) -> int:
        return hash_of(b"".join(page_of(self.seed, i, self.page_bytes).tobytes() for i in range(self.num_pages)))


class AdaptedOracle(Oracle):
    """The unperturbed run of one request alone, with its adapter."""

    def __init__(self, windows: Sequence[int | None], content: Content | None) -> None:
        super().__init__(windows)
        self._mixed = 0 if content is None else content.hash
        self._start = 0 if content is None else content.start

    def contexts(self, tokens: Sequence[int], start: int, stop: int) -> list[int]:
        ids = np.array(tokens, dtype=np.int64)
        places = np.arange(len(ids))
        mixed = np.where(places >= self._start, np.uint64(self._mixed), np.uint64(0))
        kv = [kv_of(ids, places, group) ^ mixed for group in range(len(self._windows))]
        return [context_hash(kv, last, self._windows) for last in range(start, stop)]
