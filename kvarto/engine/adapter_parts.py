"""From settings to the parts that serve adapters, wired: registry, host tier, residency, and their threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarto.adapters.host_tier import HostTier
from kvarto.adapters.registry import AdapterVersion, Registry
from kvarto.adapters.residency import Bind, Residency
from kvarto.adapters.source import Source
from kvarto.cache.kv_cache import KVCache
from kvarto.core.clock import Clock
from kvarto.core.ids import OwnerId
from kvarto.engine.adapters import AdapterParts
from kvarto.engine.parking import Parking
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.calls import Call, Calls
from kvarto.memory.executors import Executor, ThreadExecutor
from kvarto.memory.page_pool import PagePool
from kvarto.ops.base import Backend

NUM_READERS = 2
"""Threads that read and pack: one waits for the disk while another packs."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Sizes, and what tests put in the place of threads."""

    page_bytes: int
    host_bytes: int = 0
    floor_pages: int = 0
    """That the KV cache cannot take from adapters."""
    poisons: bool = False
    read_deadline_s: float = 60.0
    copy_deadline_s: float = 30.0
    readers: Executor | None = None
    copiers: Executor | None = None
    inject_fault: Callable[[Call], None] | None = None


def wire_adapters(
    settings: AdapterSettings,
    source: Source,
    *,
    pool: PagePool,
    arbiter: Arbiter,
    cache: KVCache,
    backend: Backend,
    bind: Bind,
    owner: OwnerId,
    clock: Clock,
) -> AdapterParts:
    """Nothing is read and no page is taken until an adapter is wanted."""
    reads = Calls(
        clock,
        deadline_s=settings.read_deadline_s,
        executor=settings.readers or ThreadExecutor("kvarto-adapters", NUM_READERS),
        inject_fault=settings.inject_fault,
    )
    copies = Calls(
        clock,
        deadline_s=settings.copy_deadline_s,
        executor=settings.copiers or ThreadExecutor("kvarto-uploads"),
        inject_fault=settings.inject_fault,
    )
    host = HostTier(source, reads, clock, capacity_bytes=settings.host_bytes, page_bytes=settings.page_bytes)
    gone: list[Callable[[AdapterVersion], None]] = []  # the residency, which is made after the registry
    registry = Registry(source, reads, lambda version: gone[0](version))
    residency = Residency(
        registry=registry,
        host=host,
        pool=pool,
        arbiter=arbiter,
        copies=copies,
        backend=backend,
        bind=bind,
        owner=owner,
        clock=clock,
        floor_pages=settings.floor_pages,
        on_drop=cache.forget_adapter,
        poisons=settings.poisons,
    )
    gone.append(residency.forget)
    return AdapterParts(registry, host, residency, reads, copies, Parking(residency, registry))
