"""Assemble: from settings to an engine that runs. The engine process, `kvarto.LLM` and tests all come through here.

    settings ─> program ─> step limits ─> budget ─> layout ─> backend.open ─> weights ─> warm-up ─> cache ─> loop

Everything that can be refused is refused before the arena is reserved.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvarto.cache.kv_cache import KVCache
from kvarto.core.clock import Clock, MonotonicClock
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.engine.adapter_parts import open_adapters
from kvarto.engine.adapters import Adapters
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.calibration import measure_flops_per_s
from kvarto.engine.channel import Channel
from kvarto.engine.config import EngineConfig
from kvarto.engine.faults import abort_on
from kvarto.engine.loop import EngineLoop, EngineParts
from kvarto.engine.malloc import trim_heap
from kvarto.engine.messages import Ready, Stats
from kvarto.engine.phases import ByteCount, Phases
from kvarto.engine.scheduler import Scheduler
from kvarto.engine.settings import check_settings, open_backend, plan_layout, row_major_dtype
from kvarto.engine.validate import ModelLimits
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.ledger import Ledger, OwnerKind
from kvarto.memory.limits import read_limits
from kvarto.memory.page_pool import PagePool
from kvarto.memory.system_memory import process_bytes
from kvarto.memory.transfers import Transfers
from kvarto.models.base import WeightFiles
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.files import model_name, open_weights
from kvarto.models.loader import check_tensors, load_weights
from kvarto.models.packing import format_names, pack_matrices
from kvarto.ops.base import Backend
from kvarto.planning.cost import RecomputeCost
from kvarto.planning.page_count import pages_for_sequence
from kvarto.planning.table import layout_table

LAYOUT_VERSION = 1
"""Of KV in pages; part of every cache key."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything of one engine, wired. `close` it."""

    loop: EngineLoop
    limits: ModelLimits
    program: Program
    layout: Layout
    backend: Backend
    cache: KVCache
    pool: PagePool
    ledger: Ledger
    transfers: Transfers
    adapters: Adapters | None
    model_name: str
    fingerprint: str
    """Two engines with equal ones give equal bits."""
    process_bytes: int | None
    """Memory of this process when the plan was made; None where the system does not say."""
    phases: tuple[tuple[str, float], ...]

    def ready(self) -> Ready:
        """What the client hears first."""
        return Ready(
            model_name=self.model_name,
            fingerprint=self.fingerprint,
            vocab_size=self.limits.vocab_size,
            max_model_len=self.limits.max_model_len,
            page_size=self.layout.kv_format.page_size,
            num_pages=self.layout.num_pages,
            max_concurrency=self._max_concurrency,
            layout=layout_table(self.layout, self.program, self.process_bytes),
            phases=self.phases,
            adapters=() if self.adapters is None else self.adapters.names,
        )

    @property
    def _max_concurrency(self) -> float:
        layout, limits = self.layout, self.layout.limits
        page_size = layout.kv_format.page_size
        num_each = pages_for_sequence(self.program.layer_groups, page_size, limits.max_context, limits.max_tokens)
        return layout.num_pages / num_each

    def close(self) -> None:
        """Give all memory back. Requests that still run are forgotten."""
        self.loop.forget_all()
        if self.adapters is not None:
            self.adapters.close()
        self.transfers.close()
        self.backend.close()


def open_program(config: EngineConfig, backend: Backend) -> tuple[WeightFiles, Program]:
    """Headers and configuration of the model, and the program that they make for that backend. Nothing big is read. The
    caller closes the files. Raises BadFile, UnsupportedModel or UsageError.
    """
    check_settings(config)
    files = open_weights(Path(config.model))
    try:
        program = build_program(parse_config(files.config), row_major_dtype(config, backend))
        check_tensors(program, files)
        program = pack_matrices(program, files, backend.weight_format)
    except BaseException:
        files.close()
        raise
    return files, program


def plan_engine(config: EngineConfig) -> tuple[Program, Layout]:
    """What `build` would lay out, without reserving anything; for `kvarto plan`."""
    backend = open_backend(config)
    files, program = open_program(config, backend)
    files.close()
    return program, plan_layout(config, program, backend)


def build(
    config: EngineConfig,
    channel: Channel,
    *,
    clock: Clock | None = None,
    backend: Backend | None = None,
    on_phase: Callable[[str], None] = lambda name: None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Engine:
    """Load the model and wire an engine to `channel`. Raises KvartoError, and leaves no memory behind then.

    `backend` takes the place of the one that `config.device` names; `on_phase` hears the name of each phase of loading,
    `on_progress` how far the one that reads weights is.
    """
    clock = clock or MonotonicClock()
    phases = Phases(clock, on_phase)
    with phases.phase("read model"):
        backend = backend or open_backend(config)
        files, program = open_program(config, backend)
    try:
        with phases.phase("plan memory"):
            layout = plan_layout(config, program, backend)
        model = _Model(files, program, layout, backend, process_bytes())
        return _open(config, channel, clock, phases, model, on_progress)
    finally:
        files.close()


@dataclass(frozen=True, slots=True)
class _Model:
    files: WeightFiles
    program: Program
    layout: Layout
    backend: Backend
    process_bytes: int | None


def _open(
    config: EngineConfig,
    channel: Channel,
    clock: Clock,
    phases: Phases,
    model: _Model,
    on_progress: Callable[[float], None],
) -> Engine:
    backend, layout, program = model.backend, model.layout, model.program
    with phases.phase("reserve memory"):
        backend.open(program, layout)
    try:
        with phases.phase("load weights"):
            num_threads = config.threads or read_limits().num_cpus
            count = ByteCount(sum(weight.size_bytes for weight in program.weights.values()), clock, on_progress)
            load_weights(program, model.files, backend, count.add, num_threads=num_threads)
            trim_heap()
        with phases.phase("warm up"):
            flops_per_s = measure_flops_per_s(backend, program, layout, clock)
            _touch_pages(backend, layout, waits=config.prefault)
        return _wire(config, channel, clock, phases, model, flops_per_s)
    except BaseException:
        backend.close()
        raise


def _touch_pages(backend: Backend, layout: Layout, *, waits: bool) -> None:
    """First touch is slow, so a thread does it ahead. Only arenas in host memory need it."""
    arena = getattr(backend, "arena", None)
    if arena is not None:
        prefault = arena.prefault(layout.activations.offset, layout.total_bytes - layout.activations.offset)
        if waits:
            prefault.wait()


def _wire(
    config: EngineConfig, channel: Channel, clock: Clock, phases: Phases, model: _Model, flops_per_s: float
) -> Engine:
    backend, layout, program = model.backend, model.layout, model.program
    pool = PagePool(layout.num_pages)
    ledger = Ledger(layout, pool)
    transfers = Transfers(backend.copy_page, clock)
    arbiter = Arbiter(pool)
    page_bytes = layout.kv_format.page_bytes
    name = model_name(model.files.path)
    fingerprint = f"{backend.fingerprint}/weights-{format_names(program)}/kv-{layout.kv_format.dtype}"
    cache = KVCache(
        pool=pool,
        arbiter=arbiter,
        transfers=transfers,
        groups=program.layer_groups,
        kv_format=layout.kv_format,
        identity=f"{name}/{program.architecture}/{fingerprint}/layout-{LAYOUT_VERSION}".encode(),
        key=secrets.token_bytes(32),
        enable_prefix_caching=config.enable_prefix_caching,
        recompute_cost_s=RecomputeCost.of(program, flops_per_s),
        owner=ledger.register("kv cache", OwnerKind.KV),
        floor_pages=config.kv_floor_memory // page_bytes,
    )
    adapters = open_adapters(
        config, model.program, layout, name, pool=pool, arbiter=arbiter, cache=cache, ledger=ledger, backend=backend,
        clock=clock,
    )  # fmt: skip
    scheduler = Scheduler(
        cache,
        layout.limits,
        max_num_queued=config.max_num_queued,
        has_copies=lambda: transfers.num_unreported > 0 or (adapters is not None and adapters.has_copies),
        num_lookup_tokens=config.prompt_lookup_num_tokens,
        parking=None if adapters is None else adapters.parking,
        max_adapters=config.max_adapters_per_step,
        max_adapter_wait_s=config.max_adapter_wait_s,
        adapter_affinity=config.adapter_affinity,
    )
    batch = BatchBuilder(layout.limits, groups=program.layer_groups, page_size=layout.kv_format.page_size)
    limits = ModelLimits(program.vocab_size, layout.limits.max_context)
    loop = EngineLoop(
        EngineParts(backend, cache, transfers, scheduler, batch, adapters),
        channel,
        clock,
        limits,
        read_stats=lambda: _stats(pool, ledger, cache, adapters),
        uses_priority=config.scheduling_policy == "priority",
        abort_if=abort_on(config.faults),
        seed=config.seed,
    )
    return Engine(
        loop=loop,
        limits=limits,
        program=program,
        layout=layout,
        backend=backend,
        cache=cache,
        pool=pool,
        ledger=ledger,
        transfers=transfers,
        adapters=adapters,
        model_name=name,
        fingerprint=fingerprint,
        process_bytes=model.process_bytes,
        phases=phases.finished,
    )


def _stats(pool: PagePool, ledger: Ledger, cache: KVCache, adapters: Adapters | None) -> Stats:
    stats = Stats(
        num_pages=pool.num_pages,
        num_free_pages=pool.num_free,
        num_held_pages=pool.num_held,
        num_evictable_pages=pool.num_evictable,
        num_draining_pages=pool.num_draining,
        prefix_queries_tokens=cache.stats.query_tokens,
        prefix_hits_tokens=cache.stats.hit_tokens,
        region_bytes=ledger.region_bytes(),
    )
    return stats if adapters is None else msgspec.structs.replace(stats, **adapters.stats())
