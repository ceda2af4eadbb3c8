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
from hashlib import sha256

import numpy as np

from kvarto.core.errors import EngineError
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Step
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
from kvarto.memory.transfers import Transfer
from kvarto.planning.page_count import pages_for_sequence
from tests.engine.fake_model import VOCAB_SIZE, Oracle
from tests.engine.hashed_engine import EOS, HashedEngine, Hooks, Shape, VirtualClock

POISON = 0
"""A prompt that begins with this token makes every step fail that computes its start."""
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


def draw_shape(rng: random.Random) -> Shape:
    """A geometry, from pools that hold one longest sequence and nothing else to pools with room."""
    page_size = rng.choice([8, 16, 32])
    windows: tuple[int | None, ...] = rng.choice([(None,), (None,), (None, 24), (40, None), (20,)])
    max_seqs = rng.choice([1, 2, 4, 8, 16])
    max_tokens = max(max_seqs, rng.choice([max_seqs, 24, 64, 200]))
    max_context = rng.choice([64, 160, 256])
    groups = Shape(windows=windows).groups
    least = pages_for_sequence(groups, page_size, max_context, max_tokens)
    return Shape(
        page_size=page_size,
        windows=windows,
        num_pages=round(least * rng.choice([1.0, 1.2, 1.6, 2.5, 5.0])),
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_context=max_context,
        max_num_queued=20,
        is_caching=rng.random() < 0.85,
        num_lookup_tokens=rng.choice((0, 0, 3)),
    )


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
        self.clock = VirtualClock()
        self.counts: Counter[str] = Counter()
        self.records: dict[str, Record] = {}
        self.trace = sha256()
        """Of all that the engine said."""
        self.max_preemptions = 0
        self._num_left = num_requests
        self._shape = draw_shape(self.rng)
        self._oracle = Oracle(self._shape.windows)
        self._bases = [[self.rng.randrange(3, VOCAB_SIZE) for _ in range(self._shape.max_context)] for _ in range(3)]
        self._quiet_rounds = 0
        self._step_failed = False
        self._start_engine()

    # ---- the engine --------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        hooks = Hooks(
            before_run=self._before_run,
            before_copy=self._before_copy,
            copy_duration_s=self._copy_duration_s,
            allocation_fails=lambda: self.rng.random() < self.faults.allocation,
        )
        self.inbox: list[ToEngine] = []
        self.engine = HashedEngine(self._shape, self, self.clock, hooks, seed=self.rng.randrange(1 << 32))

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
            return self.rng.uniform(0.1, 1.5)  # the deadline is 0.5 s
        return self.rng.uniform(0.0, 0.02)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """The loop's channel; waiting moves the clock."""
        if not self.inbox and timeout_s > 0:
            self.clock.advance(timeout_s)
            self.engine.executor.run_due()
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.trace.update(repr(message).encode())
        if not isinstance(message, StepOut):
            assert isinstance(message, Stats)
            return
        for refused in message.refused:
            assert self.records[refused.request_id].refused is None
            self.records[refused.request_id].refused = refused.error
        for tokens in message.outputs():
            self._hear(tokens)
        self._quiet_rounds = 0 if message.going_on or message.tokens or message.refused else self._quiet_rounds

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
        prompt = rng.choice(self._bases)[: rng.randrange(self._shape.max_context - 24)]
        prompt = prompt + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
        if rng.random() < 0.01:
            prompt[0] = POISON
        room = self._shape.max_context - len(prompt)
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
        while self._num_left or any(record.is_open for record in self.records.values()) or self.engine.loop.has_work:
            self._act()
            try:
                assert self.engine.loop.step()
            except (Killed, EngineError):
                self._resume_all()
            self.clock.advance(self.rng.uniform(0.0, 0.01))
            self.engine.executor.run_due()
            rounds += 1
            self._quiet_rounds += 1
            assert self._quiet_rounds < MAX_IDLE_ROUNDS, f"nothing moves: {self.engine.describe()}"
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
        self.engine.check()
        for request in self.engine.scheduler.requests.values():
            self.max_preemptions = max(self.max_preemptions, *(c.num_preemptions for c in request.choices))

    def _settle_copies(self) -> None:
        for _ in range(1000):
            if not self.engine.transfers.num_unreported:
                return
            self.clock.advance(0.05)
            self.engine.executor.run_due()
            self.engine.transfers.sweep()
            self.engine.transfers.poll()

    def _judge(self) -> None:
        self.check()
        self.engine.check_empty()
        for record in self.records.values():
            self._judge_record(record)
        self.counts["allocation faults"] += self.engine.pool.num_faults
        self.counts["preemptions"] += self.engine.scheduler.num_preemptions

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
