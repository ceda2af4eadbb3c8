"""A real engine with adapters around the hashed model, virtual time and adapters without files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarto.adapters.source import Source
from kvarto.cache.kv_cache import KVCache
from kvarto.core.dtype import DType
from kvarto.core.ids import OwnerId
from kvarto.core.kv_format import KVFormat
from kvarto.engine.adapter_parts import AdapterSettings, wire_adapters
from kvarto.engine.adapters import Adapters
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.channel import Channel
from kvarto.engine.loop import EngineLoop, EngineParts
from kvarto.engine.messages import AdapterAnswer, AddRequest, FromEngine, Stats
from kvarto.engine.scheduler import Scheduler
from kvarto.engine.validate import ModelLimits
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.calls import Call
from kvarto.memory.executors import VirtualExecutor
from kvarto.memory.transfers import Transfers
from kvarto.planning.page_count import pages_for_sequence
from tests.adapters.fake_source import FakeFiles
from tests.engine.adapted_model import NUMBER_BYTES, AdaptedBackend, AdaptedOracle, Content, bind
from tests.engine.fake_model import VOCAB_SIZE
from tests.engine.hashed_engine import EOS, FaultyPool, Harness, HashedEngine, Hooks, Shape, VirtualClock

ADAPTERS = OwnerId(1)


def _nothing(_: object) -> None:
    return None


@dataclass(frozen=True)
class AdapterShape:
    """Tiers, and where faults get in."""

    host_pages: int = 0
    staging_pages: int = 0
    pages_per_copy: int = 1
    filling_pages: int = 1000
    adapter_floor_pages: int = 0
    kv_floor_pages: int = 0
    before_call: Callable[[Call], None] = _nothing
    call_duration_s: Callable[[], float] = lambda: 0.0
    deadline_s: float = 0.5
    max_adapters: int = 0
    max_adapter_wait_s: float = 0.0


class AdaptedEngine(HashedEngine):
    """As `HashedEngine`, with adapters from `source`."""

    def __init__(
        self,
        shape: Shape,
        channel: Channel,
        clock: VirtualClock,
        hooks: Hooks,
        *,
        source: Source,
        adapters: AdapterShape,
        seed: int = 1,
    ) -> None:
        self.shape = shape
        self.pool = FaultyPool(shape.num_pages, hooks.allocation_fails)
        self.arbiter = Arbiter(self.pool)
        self.backend = AdaptedBackend(shape.num_pages, shape.page_size, shape.groups, hooks.before_run)
        self.backend.bound = {}
        self.executor = VirtualExecutor(clock, hooks.copy_duration_s)
        self.readers = VirtualExecutor(clock, adapters.call_duration_s)  # type: ignore[arg-type]
        self.copiers = VirtualExecutor(clock, adapters.call_duration_s)  # type: ignore[arg-type]
        self.transfers = Transfers(
            self.backend.copy_page, clock, deadline_s=0.5, executor=self.executor, inject_fault=hooks.before_copy
        )
        self.cache = KVCache(
            pool=self.pool,
            arbiter=self.arbiter,
            transfers=self.transfers,
            groups=shape.groups,
            kv_format=KVFormat(DType.F32, shape.page_size, 1, 1, 1),
            identity=b"hashed",
            key=b"0" * 32,
            enable_prefix_caching=shape.is_caching,
            recompute_cost_s=lambda first, count: count * (1e-3 + first * 1e-6),
            floor_pages=adapters.kv_floor_pages,
        )
        page_bytes = shape.page_size * NUMBER_BYTES
        self.parts = wire_adapters(
            AdapterSettings(
                page_bytes,
                host_bytes=adapters.host_pages * page_bytes,
                staging_bytes=adapters.staging_pages * page_bytes,
                copy_bytes=adapters.pages_per_copy * page_bytes,
                fill_bytes=adapters.filling_pages * page_bytes,
                floor_pages=adapters.adapter_floor_pages,
                kv_floor_pages=adapters.kv_floor_pages,
                max_shared_pages=shape.num_pages
                - pages_for_sequence(shape.groups, shape.page_size, shape.max_context, shape.max_tokens),
                poisons=True,
                read_deadline_s=adapters.deadline_s,
                copy_deadline_s=adapters.deadline_s,
                readers=self.readers,
                copiers=self.copiers,
                inject_fault=adapters.before_call,
            ),
            source,
            pool=self.pool,
            arbiter=self.arbiter,
            cache=self.cache,
            backend=self.backend,  # type: ignore[arg-type]
            bind=bind,
            owner=ADAPTERS,
            clock=clock,
        )
        self.adapters = Adapters(self.parts, "base")
        self.scheduler = Scheduler(
            self.cache,
            shape.limits,
            max_num_queued=shape.max_num_queued,
            has_copies=lambda: self.transfers.num_unreported > 0 or self.adapters.has_copies,
            num_lookup_tokens=shape.num_lookup_tokens,
            parking=self.parts.parking,
            max_adapters=adapters.max_adapters,
            max_adapter_wait_s=adapters.max_adapter_wait_s,
        )
        batch = BatchBuilder(shape.limits, groups=shape.groups, page_size=shape.page_size)
        self.loop = EngineLoop(
            EngineParts(self.backend, self.cache, self.transfers, self.scheduler, batch, self.adapters),  # type: ignore[arg-type]
            channel,
            clock,
            ModelLimits(VOCAB_SIZE, shape.max_context),
            read_stats=lambda: Stats(num_pages=shape.num_pages),
            seed=seed,
        )

    def run_due(self) -> None:
        """What threads would have done by now."""
        for executor in (self.executor, self.readers, self.copiers):
            executor.run_due()

    def check(self) -> None:
        super().check()
        self.arbiter.check()
        self.adapters.check()
        handles = {resident.handle for resident in self.parts.residency.residents}
        assert set(self.backend.bound) == handles, "what is bound and what is resident differ"


class AdaptedHarness(Harness):
    """An engine with adapters under the hand of a test."""

    def __init__(
        self, shape: Shape | None = None, hooks: Hooks | None = None, adapters: AdapterShape | None = None
    ) -> None:
        self.files = FakeFiles()
        shape, hooks, self.adapters = shape or Shape(), hooks or Hooks(), adapters or AdapterShape()
        self.answers: dict[str, AdapterAnswer] = {}
        self.messages: dict[str, str] = {}
        super().__init__(shape, hooks)
        self.engine: AdaptedEngine = AdaptedEngine(
            shape, self, self.clock, hooks, source=self.files, adapters=self.adapters
        )

    def register(self, name: str, seed: int, num_pages: int) -> None:
        """Put an adapter on the fake disk and list it."""
        self.engine.adapters.register(name, self.files.put(name, seed, num_pages))

    def receive(self, timeout_s: float) -> list[object]:  # type: ignore[override]
        messages = super().receive(timeout_s)
        self.engine.run_due()
        return messages  # type: ignore[return-value]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, AdapterAnswer):
            self.answers[message.request_id] = message
        super().send(message)

    def round(self, count: int = 1) -> None:
        for _ in range(count):
            super().round()
            self.engine.run_due()

    def check_adapted(self, message: AddRequest, content: tuple[int, int] | None, start: int = 0) -> None:
        """Every choice yielded what it yields alone, with an adapter of that seed and size."""
        page_bytes = self.shape.page_size * NUMBER_BYTES
        known = None if content is None else Content(*content, page_bytes, start)
        oracle = AdaptedOracle(self.shape.windows, known)
        sampling = message.sampling
        for index in range(sampling.n):
            max_tokens = sampling.max_tokens or self.shape.max_context - len(message.prompt_token_ids)
            expected = oracle.choice(message.prompt_token_ids, sampling, EOS, max_tokens, index)
            heard = self.heard[message.request_id, index]
            assert (tuple(heard.tokens), heard.reason) == (expected.tokens, expected.reason)
