"""From settings to the parts that serve adapters, wired: registry, host tier, residency, and their threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvarto.adapters.arrays import Bytes, StoredArray
from kvarto.adapters.base_copies import IsCopy, copies_in
from kvarto.adapters.binding import bind
from kvarto.adapters.files import AdapterLimits
from kvarto.adapters.host_tier import HostTier
from kvarto.adapters.magnitudes import ReadRows, scale_of
from kvarto.adapters.page_hasher import PageHasher
from kvarto.adapters.page_writes import COPY_BYTES, FILL_BYTES, PageWrites
from kvarto.adapters.registry import AdapterVersion, Registry
from kvarto.adapters.residency import Bind, Residency
from kvarto.adapters.source import AdapterFiles, Source
from kvarto.adapters.targets import BaseTargets, targets_of
from kvarto.cache.kv_cache import KVCache
from kvarto.core.clock import Clock
from kvarto.core.errors import BadAdapter, UsageError
from kvarto.core.ids import OwnerId
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.engine.adapter_settings import adapter_codes, max_lora_rank, module_adapters, roots
from kvarto.engine.adapter_watch import AdapterWatch
from kvarto.engine.adapters import AdapterParts, Adapters
from kvarto.engine.config import EngineConfig
from kvarto.engine.load_pace import LoadPace
from kvarto.engine.parking import Parking
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.calls import Call, Calls
from kvarto.memory.executors import Executor, ThreadExecutor
from kvarto.memory.ledger import Ledger, OwnerKind
from kvarto.memory.page_pool import PagePool
from kvarto.models.files import open_weights
from kvarto.ops.base import Backend
from kvarto.planning.page_count import pages_for_sequence

NUM_READERS = 2
"""Threads that read and pack: one waits for the disk while another packs."""
NICENESS = 10
"""Of threads that load: those that compute go first, where there are fewer cores than both want. Linux gives weight 110
beside 1024: a tenth of a core on which another computes all the time, and what that one leaves while it waits for the
rest of its team. When an adapter of 20 MB took 14 ms, 27 a second took 0.4 cores: two tenths, and gaps of two cores.
"""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Sizes, and what tests put in the place of threads."""

    page_bytes: int
    host_bytes: int = 0
    staging_bytes: int = 64 << 20
    """Of host memory that adapters on their way to the device may take, if they may keep less. Three of 20 MB: one
    waits for the disk, another is packed, a third is copied; with room for one, they came one after the other."""
    copy_bytes: int = COPY_BYTES
    fill_bytes: int = FILL_BYTES
    """See `PageWrites`, both."""
    floor_pages: int = 0
    """That the KV cache cannot take from adapters."""
    kv_floor_pages: int = 0
    """That adapters cannot take from the KV cache."""
    max_shared_pages: int = 0
    """See `Residency`: what the longest sequence leaves."""
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
        executor=settings.readers or ThreadExecutor("kvarto-adapters", NUM_READERS, niceness=NICENESS),
        inject_fault=settings.inject_fault,
    )
    copies = Calls(
        clock,
        deadline_s=settings.copy_deadline_s,
        executor=settings.copiers or ThreadExecutor("kvarto-uploads", niceness=NICENESS),
        inject_fault=settings.inject_fault,
    )
    host = HostTier(
        source,
        reads,
        clock,
        capacity_bytes=settings.host_bytes,
        page_bytes=settings.page_bytes,
        staging_bytes=settings.staging_bytes,
    )
    gone: list[Callable[[AdapterVersion], None]] = []  # the residency, which is made after the registry
    registry = Registry(source, reads, lambda version: gone[0](version))
    writes = PageWrites(
        source=source,
        host=host,
        pool=pool,
        backend=backend,
        reads=reads,
        copies=copies,
        clock=clock,
        copy_bytes=settings.copy_bytes,
        fill_bytes=settings.fill_bytes,
    )
    residency = Residency(
        registry=registry,
        host=host,
        writes=writes,
        pool=pool,
        arbiter=arbiter,
        backend=backend,
        bind=bind,
        owner=owner,
        clock=clock,
        floor_pages=settings.floor_pages,
        max_shared_pages=settings.max_shared_pages,
        on_drop=cache.forget_adapter,
        poisons=settings.poisons,
    )
    gone.append(residency.forget)
    parking = Parking(residency, registry, LoadPace(clock))
    parking.adapter_floor_pages, parking.kv_floor_pages = settings.floor_pages, settings.kv_floor_pages
    return AdapterParts(registry, host, residency, writes, reads, copies, parking)


def open_adapters(
    config: EngineConfig,
    program: Program,
    layout: Layout,
    base_name: str,
    *,
    pool: PagePool,
    arbiter: Arbiter,
    cache: KVCache,
    ledger: Ledger,
    backend: Backend,
    clock: Clock,
) -> Adapters | None:
    """All that serves the adapters of a configuration; None where there can be none. Raises UsageError."""
    if not layout.limits.max_lora_rank:
        return None
    page_bytes = layout.kv_format.page_bytes
    parts = wire_adapters(
        AdapterSettings(
            page_bytes,
            host_bytes=config.adapter_host_memory,
            floor_pages=config.adapter_floor_memory // page_bytes,
            kv_floor_pages=config.kv_floor_memory // page_bytes,
            max_shared_pages=layout.num_pages - _longest_sequence(program, layout),
        ),
        adapter_files(config, program, page_bytes, backend.read_rows),
        pool=pool,
        arbiter=arbiter,
        cache=cache,
        backend=backend,
        bind=lambda found, pages: bind(found.bound_shape, pages, page_bytes),
        owner=ledger.register("adapters", OwnerKind.ADAPTER),
        clock=clock,
    )
    watch = AdapterWatch([Path(folder) for folder in config.adapter_dir], parts.registry, parts.reads, clock)
    adapters = Adapters(parts, base_name, watch)
    for each in module_adapters(config):
        adapters.register(each.name, each.path)
    try:
        watch.begin()
    except BadAdapter as error:
        raise UsageError(f"`--adapter-dir`: {error}") from error
    return adapters


def adapter_files(
    config: EngineConfig, program: Program, page_bytes: int, read_rows: ReadRows | None = None
) -> AdapterFiles:
    """Reads the adapters of a configuration; `read_rows`, of the base's weights, is needed to pack magnitudes."""
    base = targets_of(program)
    return AdapterFiles(
        base,
        roots(config),
        page_bytes,
        limits=AdapterLimits(max_rank=max_lora_rank(config)),
        is_copy=_is_copy(Path(config.model), base),
        scale_of=None if read_rows is None else partial(scale_of, read_rows=read_rows),
        codes=adapter_codes(config),
        hasher=PageHasher(config.secret.page_key or None),
    )


def _longest_sequence(program: Program, layout: Layout) -> int:
    """Pages."""
    limits, page_size = layout.limits, layout.kv_format.page_size
    return pages_for_sequence(program.layer_groups, page_size, limits.max_context, limits.max_tokens)


def _is_copy(model: Path, base: BaseTargets) -> IsCopy:
    """Compares with the base's files, opened for each comparison: hardly an adapter has copies."""

    def is_copy(module: str, array: StoredArray, file: Bytes) -> bool:
        files = open_weights(model)
        try:
            return copies_in(files, base)(module, array, file)
        finally:
            files.close()

    return is_copy
