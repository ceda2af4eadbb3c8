"""A real engine around the hash backend and virtual time, for the simulation and the tests of scheduler and loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvarto.cache.kv_cache import KVCache
from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import OutOfPages
from kvarto.core.ids import OwnerId
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Int32, Step
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.channel import Channel
from kvarto.engine.loop import EngineLoop, EngineParts
from kvarto.engine.messages import AddRequest, FromEngine, Refused, Stats, StepOut, ToEngine, TokensOut
from kvarto.engine.scheduler import Scheduler
from kvarto.engine.validate import ModelLimits
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.executors import VirtualExecutor
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfer, Transfers
from tests.engine.fake_model import VOCAB_SIZE, HashBackend, Oracle

EOS = (1, 2)


class VirtualClock:
    """Time that only moves when told."""

    def __init__(self) -> None:
        self._now = 1000.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class FaultyPool(PagePool):
    """A pool whose allocations fail now and then though there are pages."""

    def __init__(self, num_pages: int, fails: Callable[[], bool]) -> None:
        super().__init__(num_pages)
        self._fails = fails
        self.num_faults = 0

    def allocate(self, num_pages: int, owner: OwnerId) -> Int32:
        if self._fails():
            self.num_faults += 1
            raise OutOfPages("injected")
        return super().allocate(num_pages, owner)


def _nothing(_: object) -> None:
    return None


@dataclass(frozen=True)
class Shape:
    """Geometry and limits of one engine."""

    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    num_pages: int = 64
    max_tokens: int = 64
    max_seqs: int = 8
    max_context: int = 256
    prompt_rows: int = 8
    max_num_queued: int = 1000
    is_caching: bool = True
    num_lookup_tokens: int = 0

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return tuple(LayerGroup((index,), 1, 1, 1, window) for index, window in enumerate(self.windows))

    @property
    def limits(self) -> StepLimits:
        return StepLimits(self.max_tokens, self.max_seqs, self.max_seqs + self.prompt_rows, self.max_context)


@dataclass(frozen=True)
class Hooks:
    """Where faults get in."""

    before_run: Callable[[Step], None] = _nothing
    before_copy: Callable[[Transfer], None] = _nothing
    copy_duration_s: Callable[[], float] = lambda: 0.0
    allocation_fails: Callable[[], bool] = lambda: False


class HashedEngine:
    """Everything wired, as `kvarto.engine.assemble` does it."""

    def __init__(
        self, shape: Shape, channel: Channel, clock: VirtualClock, hooks: Hooks = Hooks(), *, seed: int = 1
    ) -> None:
        self.shape = shape
        self.pool = FaultyPool(shape.num_pages, hooks.allocation_fails)
        backend = HashBackend(shape.num_pages, shape.page_size, shape.groups, hooks.before_run)
        self.executor = VirtualExecutor(clock, hooks.copy_duration_s)
        self.transfers = Transfers(
            backend.copy_page, clock, deadline_s=0.5, executor=self.executor, inject_fault=hooks.before_copy
        )
        self.cache = KVCache(
            pool=self.pool,
            arbiter=Arbiter(self.pool),
            transfers=self.transfers,
            groups=shape.groups,
            kv_format=KVFormat(DType.F32, shape.page_size, 1, 1, 1),
            identity=b"hashed",
            key=b"0" * 32,
            enable_prefix_caching=shape.is_caching,
            recompute_cost_s=lambda first, count: count * (1e-3 + first * 1e-6),
        )
        self.scheduler = Scheduler(
            self.cache,
            shape.limits,
            max_num_queued=shape.max_num_queued,
            has_copies=lambda: self.transfers.num_unreported > 0,
            num_lookup_tokens=shape.num_lookup_tokens,
        )
        batch = BatchBuilder(shape.limits, groups=shape.groups, page_size=shape.page_size)
        self.loop = EngineLoop(
            EngineParts(backend, self.cache, self.transfers, self.scheduler, batch),  # type: ignore[arg-type]
            channel,
            clock,
            ModelLimits(VOCAB_SIZE, shape.max_context),
            read_stats=lambda: Stats(num_pages=shape.num_pages),
            seed=seed,
        )

    def check(self) -> None:
        """All laws."""
        self.scheduler.check()
        self.cache.check()
        self.pool.check()
        self.transfers.check()

    def check_empty(self) -> None:
        """Nobody is left, and no page is lost."""
        self.check()
        assert not self.scheduler.requests
        assert self.pool.num_held == 0, f"pages are lost: {self.describe()}"
        assert self.pool.num_draining == 0, f"pages are pinned for ever: {self.describe()}"
        assert self.pool.num_free + self.pool.num_evictable == self.pool.num_pages

    def describe(self) -> str:
        """For a failure."""
        pool = self.pool
        return (
            f"{self.scheduler.num_running} run, {self.scheduler.num_waiting} wait, pages {pool.num_free} free, "
            f"{pool.num_held} held, {pool.num_evictable} evictable, {pool.num_draining} draining of {pool.num_pages}"
        )


@dataclass
class Heard:
    """What a client heard of one choice."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    outputs: list[TokensOut] = field(default_factory=list)


class Harness:
    """An engine under the hand of a test: put requests in, take rounds, look at what was said."""

    def __init__(self, shape: Shape = Shape(), hooks: Hooks = Hooks()) -> None:
        self.shape = shape
        self.clock = VirtualClock()
        self.inbox: list[ToEngine] = []
        self.frames: list[FromEngine] = []
        self.heard: dict[tuple[str, int], Heard] = {}
        self.refused: dict[str, str] = {}
        self.refusals: list[Refused] = []
        self.engine = HashedEngine(shape, self, self.clock, hooks)
        self._num_added = 0

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """The loop's channel; waiting moves the clock."""
        if not self.inbox and timeout_s > 0:
            self.clock.advance(timeout_s)
            self.engine.executor.run_due()
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.frames.append(message)
        if isinstance(message, StepOut):
            self.refused |= {refused.request_id: refused.error for refused in message.refused}
            self.refusals += message.refused
            for out in message.outputs():
                heard = self.heard.setdefault((out.request_id, out.choice), Heard())
                assert heard.reason is None, f"{out} came after the end"
                heard.tokens += out.token_ids
                heard.reason = out.finish_reason
                heard.outputs.append(out)

    def add(self, num_prompt_tokens: int = 20, **fields: object) -> AddRequest:
        """Queue a request with a prompt of its own; `fields` are those of AddRequest and SamplingParams."""
        self._num_added += 1
        rng = random.Random(self._num_added)
        prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(num_prompt_tokens))
        own = {name: fields.pop(name) for name in list(fields) if name in AddRequest.__struct_fields__}
        sampling = SamplingParams(**({"max_tokens": 8, "seed": self._num_added, "ignore_eos": True} | fields))  # type: ignore[arg-type]
        message = AddRequest(
            **({"request_id": f"r{self._num_added}", "prompt_token_ids": prompt, "eos_token_ids": EOS} | own),  # type: ignore[arg-type]
            sampling=sampling,
        )
        self.inbox.append(message)
        return message

    def round(self, count: int = 1) -> None:
        """Rounds of the loop, with the laws checked after each."""
        for _ in range(count):
            assert self.engine.loop.step()
            self.clock.advance(0.001)
            self.engine.executor.run_due()
            self.engine.check()

    def run(self, most_rounds: int = 2000) -> None:
        """Until nothing is left to do; fails when that takes too long."""
        for _ in range(most_rounds):
            if not (self.inbox or self.engine.loop.has_work or self.engine.transfers.num_unreported):
                return
            self.round()
        raise AssertionError(f"not done after {most_rounds} rounds: {self.engine.describe()}")

    @property
    def steps(self) -> list[tuple[str, ...]]:
        """Ids on board of each step so far."""
        return [f.running for f in self.frames if isinstance(f, StepOut) and f.running is not None]

    def check_tokens(self, message: AddRequest, *, without: Collection[int] = ()) -> None:
        """Every choice yielded what it yields alone, but for those that were cancelled."""
        oracle = Oracle(self.shape.windows)
        sampling = message.sampling
        for index in set(range(sampling.n)) - set(without):
            max_tokens = sampling.max_tokens or self.shape.max_context - len(message.prompt_token_ids)
            expected = oracle.choice(message.prompt_token_ids, sampling, EOS, max_tokens, index)
            heard = self.heard[message.request_id, index]
            assert (tuple(heard.tokens), heard.reason) == (expected.tokens, expected.reason)
