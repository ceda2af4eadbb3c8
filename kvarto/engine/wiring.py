"""Wiring: from a model on a backend to an engine that runs. Owners of pages, cache, adapters, scheduler, loop."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from kvarto.cache.kv_cache import KVCache
from kvarto.core.clock import Clock
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.engine.adapter_parts import open_adapters
from kvarto.engine.adapters import Adapters
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.channel import Channel
from kvarto.engine.config import EngineConfig
from kvarto.engine.engine import Engine
from kvarto.engine.faults import abort_on
from kvarto.engine.loop import EngineLoop, EngineParts
from kvarto.engine.messages import Stats
from kvarto.engine.phases import Phases
from kvarto.engine.scheduler import Scheduler
from kvarto.engine.validate import ModelLimits
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.ledger import Ledger, OwnerKind
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfers
from kvarto.models.base import WeightFiles
from kvarto.models.files import model_name
from kvarto.models.packing import format_names
from kvarto.ops.base import Backend
from kvarto.planning.cost import RecomputeCost

LAYOUT_VERSION = 1
"""Of KV in pages; part of every cache key."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model, where its bytes go, and the backend that runs it."""

    files: WeightFiles
    program: Program
    layout: Layout
    backend: Backend
    process_bytes: int | None
    """See `Engine`."""

    @property
    def name(self) -> str:
        """In answers and cache keys."""
        return model_name(self.files.path)

    @property
    def fingerprint(self) -> str:
        """Two engines with equal ones give equal bits."""
        weights, kv = format_names(self.program), self.layout.kv_format.dtype
        return f"{self.backend.fingerprint}/weights-{weights}/kv-{kv}"


@dataclass(frozen=True, slots=True)
class _Memory:
    """Who owns which page, and what moves pages."""

    pool: PagePool
    ledger: Ledger
    arbiter: Arbiter
    transfers: Transfers

    @classmethod
    def of(cls, model: PlannedModel, clock: Clock) -> _Memory:
        pool = PagePool(model.layout.num_pages)
        return cls(pool, Ledger(model.layout, pool), Arbiter(pool), Transfers(model.backend.copy_page, clock))


def wire(
    config: EngineConfig, channel: Channel, clock: Clock, phases: Phases, model: PlannedModel, flops_per_s: float
) -> Engine:
    """An engine that serves the model over `channel`; `flops_per_s` says what lost KV costs."""
    memory, limits = _Memory.of(model, clock), ModelLimits(model.program.vocab_size, model.layout.limits.max_context)
    cache = _make_cache(config, model, memory, flops_per_s)
    adapters = open_adapters(
        config, model.program, model.layout, model.name, pool=memory.pool, arbiter=memory.arbiter, cache=cache,
        ledger=memory.ledger, backend=model.backend, clock=clock,
    )  # fmt: skip
    scheduler = _make_scheduler(config, model, memory, cache, adapters)
    batch = BatchBuilder(
        model.layout.limits, groups=model.program.layer_groups, page_size=model.layout.kv_format.page_size
    )
    loop = EngineLoop(
        EngineParts(model.backend, cache, memory.transfers, scheduler, batch, adapters),
        channel,
        clock,
        limits,
        read_stats=lambda: _stats(memory, cache, adapters),
        uses_priority=config.scheduling_policy == "priority",
        abort_if=abort_on(config.faults),
        seed=config.seed,
    )
    return Engine(
        loop=loop,
        limits=limits,
        program=model.program,
        layout=model.layout,
        backend=model.backend,
        cache=cache,
        pool=memory.pool,
        ledger=memory.ledger,
        transfers=memory.transfers,
        adapters=adapters,
        model_name=model.name,
        fingerprint=model.fingerprint,
        process_bytes=model.process_bytes,
        phases=phases.finished,
    )


def _make_cache(config: EngineConfig, model: PlannedModel, memory: _Memory, flops_per_s: float) -> KVCache:
    layout, program = model.layout, model.program
    return KVCache(
        pool=memory.pool,
        arbiter=memory.arbiter,
        transfers=memory.transfers,
        groups=program.layer_groups,
        kv_format=layout.kv_format,
        identity=f"{model.name}/{program.architecture}/{model.fingerprint}/layout-{LAYOUT_VERSION}".encode(),
        key=secrets.token_bytes(32),
        enable_prefix_caching=config.enable_prefix_caching,
        recompute_cost_s=RecomputeCost.of(program, flops_per_s),
        owner=memory.ledger.register("kv cache", OwnerKind.KV),
        floor_pages=config.kv_floor_memory // layout.kv_format.page_bytes,
    )


def _make_scheduler(
    config: EngineConfig, model: PlannedModel, memory: _Memory, cache: KVCache, adapters: Adapters | None
) -> Scheduler:
    return Scheduler(
        cache,
        model.layout.limits,
        max_num_queued=config.max_num_queued,
        has_copies=lambda: memory.transfers.num_unreported > 0 or (adapters is not None and adapters.has_copies),
        num_lookup_tokens=config.prompt_lookup_num_tokens,
        parking=None if adapters is None else adapters.parking,
        max_adapters=config.max_adapters_per_step,
        max_adapter_wait_s=config.max_adapter_wait_s,
        adapter_affinity=config.adapter_affinity,
    )


def _stats(memory: _Memory, cache: KVCache, adapters: Adapters | None) -> Stats:
    pool = memory.pool
    stats = Stats(
        num_pages=pool.num_pages,
        num_free_pages=pool.num_free,
        num_held_pages=pool.num_held,
        num_evictable_pages=pool.num_evictable,
        num_draining_pages=pool.num_draining,
        prefix_queries_tokens=cache.stats.query_tokens,
        prefix_hits_tokens=cache.stats.hit_tokens,
        region_bytes=memory.ledger.region_bytes(),
    )
    return stats if adapters is None else msgspec.structs.replace(stats, **adapters.stats())
