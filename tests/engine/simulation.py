"""The whole engine from one seed: the real loop, scheduler, cache, pool and transfers; hashed tokens, virtual time.

An episode draws its geometry, its requests and its faults from a seed. Faults: allocations that fail, copies that are
slow, fail or time out, steps that raise, engines that are killed (and whose requests resume on a fresh one), poison
prompts, cancels at any moment, deadlines, bursts beyond the queue. In the end each choice must have ended exactly once
with the tokens of an unperturbed run alone, and no page may be lost.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvarto.cache.kv_cache import KVCache
from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import EngineError, OutOfPages
from kvarto.core.ids import OwnerId
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Int32, Step
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.loop import EngineLoop, EngineParts
from kvarto.engine.messages import (
    AddRequest,
    Cancel,
    FromEngine,
    ResumedChoice,
    Stats,
    StatsRequest,
    StepOut,
    ToEngine,
    TokensOut,
)
from kvarto.engine.scheduler import Scheduler
from kvarto.engine.validate import ModelLimits
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.executors import VirtualExecutor
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfer, Transfers
from kvarto.planning.page_count import pages_for_sequence
from tests.engine.fake_model import VOCAB_SIZE, HashBackend, Oracle

POISON = 0
"""A prompt that begins with this token makes every step fail that computes its start."""
EOS = (1, 2)
COPY_DEADLINE_S = 0.5
MAX_IDLE_ROUNDS = 20_000
"""Rounds in a row without any news, while requests are open, that count as stuck."""


class Killed(BaseException):
    """The engine process is gone; nothing in it may catch this."""


class StepFault(RuntimeError):
    """What a backend raises when a step fails."""


@dataclass(frozen=True)
class Faults:
    """Probabilities: of an allocation, a copy, a step, a round."""

    allocation: float = 0.05
    copy_fails: float = 0.05
    copy_is_slow: float = 0.05
    step_fails: float = 0.01
    kill: float = 0.002
    cancel: float = 0.015


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0)


class SimClock:
    """Time that only moves when told."""

    def __init__(self) -> None:
        self._now = 1000.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class FaultyPool(PagePool):
    """A pool whose allocations fail now and then though there are pages."""

    def __init__(self, num_pages: int, rng: random.Random, probability: float) -> None:
        super().__init__(num_pages)
        self._rng = rng
        self._probability = probability
        self.num_faults = 0

    def allocate(self, num_pages: int, owner: OwnerId) -> Int32:
        if self._rng.random() < self._probability:
            self.num_faults += 1
            raise OutOfPages("injected")
        return super().allocate(num_pages, owner)


@dataclass
class Record:
    """What the client knows of one request."""

    message: AddRequest
    submitted_s: float
    is_cancelled: bool = False
    refused: str | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: list[float] | None = None

    @property
    def is_open(self) -> bool:
        return not self.is_cancelled and self.refused is None and len(self.reasons) < self.message.sampling.n


class Episode:
    """One engine, or several after kills, and its client."""

    def __init__(self, seed: int, *, num_requests: int, faults: Faults = Faults()) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.clock = SimClock()
        self.counts: Counter[str] = Counter()
        self.records: dict[str, Record] = {}
        self.max_preemptions = 0
        self._num_left = num_requests
        self._draw_geometry()
        self._bases = [[self.rng.randrange(3, VOCAB_SIZE) for _ in range(self._max_context)] for _ in range(3)]
        self._quiet_rounds = 0
        self._step_failed = False
        self._start_engine()

    def _draw_geometry(self) -> None:
        rng = self.rng
        self._page_size = rng.choice([8, 16, 32])
        windows: tuple[int | None, ...] = rng.choice([(None,), (None,), (None, 24), (40, None), (20,)])
        self._groups = tuple(LayerGroup((index,), 1, 1, 1, window) for index, window in enumerate(windows))
        max_seqs = rng.choice([1, 2, 4, 8, 16])
        max_tokens = rng.choice([max_seqs, 24, 64, 200])
        self._max_context = rng.choice([64, 160, 256])
        self._limits = StepLimits(max(max_seqs, max_tokens), max_seqs, max_seqs + 8, self._max_context)
        least = pages_for_sequence(self._groups, self._page_size, self._max_context, self._limits.max_tokens)
        self.num_pages = round(least * rng.choice([1.0, 1.2, 1.6, 2.5, 5.0]))
        self._oracle = Oracle(windows)

    # ---- the engine --------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        self.pool = FaultyPool(self.num_pages, self.rng, self.faults.allocation)
        backend = HashBackend(self.num_pages, self._page_size, self._groups, self._before_run)
        self.executor = VirtualExecutor(self.clock, self._copy_duration_s)
        transfers = Transfers(
            backend.copy_page,
            self.clock,
            deadline_s=COPY_DEADLINE_S,
            executor=self.executor,
            inject_fault=self._before_copy,
        )
        self.cache = KVCache(
            pool=self.pool,
            arbiter=Arbiter(self.pool),
            transfers=transfers,
            groups=self._groups,
            kv_format=KVFormat(DType.F32, self._page_size, 1, 1, 1),
            identity=b"simulated",
            key=b"0" * 32,
            enable_prefix_caching=self.rng.random() < 0.85,
            recompute_cost_s=lambda first, count: count * (1e-3 + first * 1e-6),
        )
        self.transfers = transfers
        self.scheduler = Scheduler(
            self.cache, self._limits, max_num_queued=20, has_copies=lambda: transfers.num_unreported > 0
        )
        batch = BatchBuilder(self._limits, num_groups=len(self._groups), page_size=self._page_size)
        self.inbox: list[ToEngine] = []
        self.loop = EngineLoop(
            EngineParts(backend, self.cache, transfers, self.scheduler, batch),  # type: ignore[arg-type]
            self,
            self.clock,
            ModelLimits(VOCAB_SIZE, self._max_context),
            read_stats=lambda: Stats(num_pages=self.num_pages),
            seed=self.rng.randrange(1 << 32),
        )

    def _before_run(self, step: Step) -> None:
        if self.rng.random() < self.faults.kill:
            raise Killed
        starts = step.token_ids[step.positions == 0]
        is_poisoned = bool((starts == POISON).any())
        # Never two transient faults in a row, so that only poison can fail alone.
        fails = is_poisoned or (not self._step_failed and self.rng.random() < self.faults.step_fails)
        self._step_failed = fails
        if fails:
            self.counts["step faults"] += 1
            raise StepFault("injected")

    def _before_copy(self, transfer: Transfer) -> None:
        self.counts["copies"] += 1
        if self.rng.random() < self.faults.copy_fails:
            self.counts["copy faults"] += 1
            raise OSError("injected")

    def _copy_duration_s(self) -> float:
        if self.rng.random() < self.faults.copy_is_slow:
            return self.rng.uniform(0.1, 3 * COPY_DEADLINE_S)
        return self.rng.uniform(0.0, 0.02)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """The loop's channel; waiting moves the clock."""
        if not self.inbox and timeout_s > 0:
            self.clock.advance(timeout_s)
            self.executor.run_due()
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, StepOut):
            assert isinstance(message, Stats)
            return
        for refused in message.refused:
            assert self.records[refused.request_id].refused is None
            self.records[refused.request_id].refused = refused.error
        for tokens in message.tokens:
            self._hear(tokens)
        self._quiet_rounds = 0 if message.tokens or message.refused else self._quiet_rounds

    # ---- the client --------------------------------------------------------------------------------------------

    def _hear(self, out: TokensOut) -> None:
        record = self.records[out.request_id]
        if record.is_cancelled:
            return  # on its way when the cancel was sent
        assert record.refused is None
        assert out.choice not in record.reasons, f"{out.request_id}/{out.choice} goes on after its end"
        tokens = record.tokens.setdefault(out.choice, [])
        asks_prompt = record.message.sampling.prompt_logprobs is not None
        if asks_prompt and out.token_ids and not any(record.tokens.values()):
            assert out.prompt_logprobs is not None, "the first output lacks prompt_logprobs"
        if out.prompt_logprobs is not None:
            assert record.prompt_logprobs is None, "prompt_logprobs came twice"
            record.prompt_logprobs = [entry.logprob for entry in out.prompt_logprobs]
            assert [entry.token_id for entry in out.prompt_logprobs] == list(record.message.prompt_token_ids[1:])
        tokens += out.token_ids
        if record.message.sampling.logprobs is not None and out.token_ids:
            assert out.logprobs is not None
            assert [entry.token_id for entry in out.logprobs] == list(out.token_ids)
            assert all(len(entry.top) == record.message.sampling.logprobs for entry in out.logprobs)
            record.logprobs.setdefault(out.choice, []).extend(entry.logprob for entry in out.logprobs)
        if out.finish_reason is not None:
            record.reasons[out.choice] = out.finish_reason

    def _submit(self) -> None:
        message = self._draw_request(f"r{len(self.records)}")
        self.records[message.request_id] = Record(message, self.clock.now())
        self.inbox.append(message)
        self._num_left -= 1

    def _draw_request(self, request_id: str) -> AddRequest:
        rng = self.rng
        prompt = rng.choice(self._bases)[: rng.randrange(self._max_context - 24)]
        prompt = prompt + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
        if rng.random() < 0.01:
            prompt[0] = POISON
        room = self._max_context - len(prompt)
        max_tokens = rng.randrange(1, room + 1) if rng.random() < 0.1 else rng.randrange(1, min(24, room) + 1)
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=self._draw_sampling(max_tokens),
            eos_token_ids=EOS,
            cache_salt=rng.choice([None, None, None, "tenant"]),
            priority=rng.choice([0, 0, 0, -1, 1]),
            deadline_s=rng.uniform(0.01, 3.0) if rng.random() < 0.05 else None,
            runs_alone=rng.random() < 0.02,
        )

    def _draw_sampling(self, max_tokens: int) -> SamplingParams:
        rng = self.rng
        is_penalised = rng.random() < 0.1
        return SamplingParams(
            n=rng.choice([1] * 12 + [2, 3, 5, 9]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 5]),
            repetition_penalty=1.25 if is_penalised and rng.random() < 0.5 else 1.0,
            presence_penalty=0.5 if is_penalised else 0.0,
            logit_bias={rng.randrange(VOCAB_SIZE): 1.5, 1: -2.0} if rng.random() < 0.1 else {},
            seed=rng.randrange(1 << 63),
            max_tokens=max_tokens,
            min_tokens=rng.randrange(max_tokens + 1) if rng.random() < 0.1 else 0,
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 3)) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.2,
            logprobs=rng.choice([None, None, 0, 3]),
            prompt_logprobs=rng.choice([0, 2]) if rng.random() < 0.05 else None,
        )

    def _cancel(self, record: Record) -> None:
        record.is_cancelled = True
        self.counts["cancels"] += 1
        self.inbox.append(Cancel(record.message.request_id))

    def _resume_all(self) -> None:
        """The engine died: a fresh one gets every open request, each choice with the tokens that are known."""
        self.counts["engine deaths"] += 1
        self._start_engine()
        for record in self.records.values():
            if record.is_open:
                self.inbox.append(self._resumed(record))

    def _resumed(self, record: Record) -> AddRequest:
        message = record.message
        if not record.tokens:
            return message
        self.counts["resumed requests"] += 1
        choices = tuple(
            ResumedChoice(index, tuple(record.tokens.get(index, ())))
            for index in range(message.sampling.n)
            if index not in record.reasons
        )
        return AddRequest(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling=message.sampling,
            eos_token_ids=message.eos_token_ids,
            cache_salt=message.cache_salt,
            priority=message.priority,
            deadline_s=message.deadline_s,
            resumed=choices,
            runs_alone=message.runs_alone,
        )

    # ---- running -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """To the end, then `judge`."""
        rounds = 0
        while self._num_left or any(record.is_open for record in self.records.values()) or self.loop.has_work:
            self._act()
            try:
                assert self.loop.step()
            except (Killed, EngineError):
                self._resume_all()
            self.clock.advance(self.rng.uniform(0.0, 0.01))
            self.executor.run_due()
            rounds += 1
            self._quiet_rounds += 1
            assert self._quiet_rounds < MAX_IDLE_ROUNDS, f"nothing moves: {self.describe()}"
            if rounds % 20 == 0:
                self.check()
        self.counts["rounds"] += rounds
        self._settle_copies()
        self._judge()

    def _act(self) -> None:
        rng = self.rng
        open_records = [record for record in self.records.values() if record.is_open]
        # Mostly a queue that is full enough to press, now and then a burst beyond its limit.
        is_burst = rng.random() < 0.002
        rate = 0.9 if is_burst else 0.3 if len(open_records) < 16 else 0.0
        while self._num_left and rng.random() < rate:
            self._submit()
        if open_records and rng.random() < self.faults.cancel:
            self._cancel(rng.choice(open_records))
        if rng.random() < 0.01:
            self.inbox.append(StatsRequest())

    def check(self) -> None:
        """The laws, in the middle of everything."""
        self.scheduler.check()
        self.cache.check()
        self.pool.check()
        for request in self.scheduler.requests.values():
            self.max_preemptions = max(self.max_preemptions, *(c.num_preemptions for c in request.choices))

    def describe(self) -> str:
        """For a failure."""
        return (
            f"{self.scheduler.num_running} run, {self.scheduler.num_waiting} wait, pages {self.pool.num_free} free, "
            f"{self.pool.num_held} held, {self.pool.num_evictable} evictable, {self.pool.num_draining} draining "
            f"of {self.num_pages}"
        )

    def _settle_copies(self) -> None:
        for _ in range(1000):
            if not self.transfers.num_unreported:
                return
            self.clock.advance(0.05)
            self.executor.run_due()
            self.transfers.sweep()
            self.transfers.poll()

    def _judge(self) -> None:
        self.check()
        assert self.pool.num_held == 0, f"pages are lost: {self.describe()}"
        assert self.pool.num_draining == 0, f"pages are pinned for ever: {self.describe()}"
        assert self.pool.num_free + self.pool.num_evictable == self.num_pages
        assert not self.scheduler.requests
        for record in self.records.values():
            self._judge_record(record)
        self.counts["allocation faults"] += self.pool.num_faults
        self.counts["preemptions"] += self.scheduler.num_preemptions

    def _judge_record(self, record: Record) -> None:
        message = record.message
        if record.refused is not None:
            assert record.refused == "Overloaded", f"{message.request_id} was refused: {record.refused}"
            assert not record.tokens or not any(record.tokens.values()) or self.counts["engine deaths"]
            self.counts["refused"] += 1
            return
        assert record.is_cancelled or set(record.reasons) == set(range(message.sampling.n))
        assert message.sampling.max_tokens is not None
        for index in range(message.sampling.n):
            self._judge_choice(record, index)
        if record.prompt_logprobs is not None:
            assert record.prompt_logprobs == self._oracle.prompt_logprobs(message.prompt_token_ids)
            self.counts["prompt logprobs"] += 1

    def _judge_choice(self, record: Record, index: int) -> None:
        message, reason = record.message, record.reasons.get(index)
        got = record.tokens.get(index, [])
        max_tokens = message.sampling.max_tokens or 0
        if message.prompt_token_ids[0] == POISON:
            assert got == []
            assert reason in ("error", "deadline", None)
            self.counts["poisoned"] += 1
            return
        expected = self._oracle.choice(message.prompt_token_ids, message.sampling, EOS, max_tokens, index)
        assert tuple(got) == expected.tokens[: len(got)], f"{message.request_id}/{index}: {got} for {expected}"
        logprobs = record.logprobs.get(index, [])
        assert np.array_equal(logprobs, expected.logprobs[: len(logprobs)])
        if reason == "deadline":
            assert message.deadline_s is not None
        elif reason is not None:
            assert (tuple(got), reason) == (expected.tokens, expected.reason), f"{message.request_id}/{index} {reason}"
        self.counts[f"ended by {reason or 'cancel'}"] += 1
