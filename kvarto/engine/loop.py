"""EngineLoop: hear, decide, run, tell. One synchronous loop, and everything that waits or fails is an argument.

    receive ─> add / cancel ─> sweep deadlines and copies ─> schedule ─> send ─> build ─> run ─> collect ─┐
       ^                                                                                                   │
       └───────────────────────────────────────────────────────────────────────────────────────────────────┘

One frame per step: it carries what the step before yielded and names who is in the step that begins now. The frame is
sent by the loop that does the work, so it is also the proof of progress; an idle engine sends an empty one each second.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvarto.core.clock import Clock
from kvarto.core.errors import AdapterRefused, EngineError, InvalidRequest, RequestError, UnknownAdapter
from kvarto.core.step import StepResult
from kvarto.engine.adapters import Adapters
from kvarto.engine.batch import BatchBuilder
from kvarto.engine.carried_errors import refused_by
from kvarto.engine.channel import Channel
from kvarto.engine.chunk import Chunk
from kvarto.engine.deadlines import Deadlines
from kvarto.engine.messages import (
    MAX_NAMES_IN_STATS,
    AdapterAnswer,
    AddRequest,
    Cancel,
    ListAdapters,
    LoadAdapter,
    Refused,
    Shutdown,
    Stats,
    StatsRequest,
    StepOut,
    ToEngine,
    TokensOut,
    UnloadAdapter,
)
from kvarto.engine.request import Request, Status, make_request
from kvarto.engine.results import Outputs, collect, end_choice, ends_before_running
from kvarto.engine.scheduler import Scheduler
from kvarto.engine.validate import MAX_SEED, ModelLimits, resolve_max_tokens, validate_request
from kvarto.memory.transfers import Transfers
from kvarto.ops.base import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvarto.adapters.registry import AdapterVersion
    from kvarto.cache.kv_cache import KVCache

HEARTBEAT_S = 1.0
"""An idle engine says that often that it lives."""
COPY_POLL_S = 0.0005
"""Between looks at copies when nothing else can run; a page copies in about that time."""
STALL_LIMIT_S = 60.0
"""Without a step though requests are there: twice the deadline of a copy, the slowest thing that one waits for."""
CHECK_EVERY_STEPS = 1024
"""The full recount of pages takes milliseconds: sampled, and whenever the engine becomes idle."""

NO_ADAPTERS = "this server serves no adapters; start it with `--adapter-dir`, `--lora-modules` or `--max-lora-rank`"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a loop drives."""

    backend: Backend
    cache: KVCache
    transfers: Transfers
    scheduler: Scheduler
    batch: BatchBuilder
    adapters: Adapters | None = None
    """None: only the base is served."""


class EngineLoop:
    """Call `step` until it returns False, or `run`."""

    def __init__(
        self,
        parts: EngineParts,
        channel: Channel,
        clock: Clock,
        limits: ModelLimits,
        *,
        read_stats: Callable[[], Stats],
        uses_priority: bool = True,
        abort_if: Callable[[list[Chunk]], None] | None = None,
        seed: int | None = None,
    ) -> None:
        """`read_stats` gives the gauges of pool and ledger; without `uses_priority` all requests are equal; `abort_if`
        sees each step's chunks before it runs, for fault injection; `seed` seeds the seeds of requests without one.
        """
        self._parts = parts
        self._scheduler = parts.scheduler
        self._channel = channel
        self._clock = clock
        self._limits = limits
        self._read_stats = read_stats
        self._uses_priority = uses_priority
        self._abort_if = abort_if
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._num_steps = 0
        self._blamed: Request | None = None
        """Who was blamed for failed steps since the last one that succeeded."""
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._outputs = Outputs()
        self._refused: list[Refused] = []
        self._last_sent = clock.now()
        self._progressed_at = clock.now()
        self._is_idle = True
        self._is_blocked = False
        """Nothing could run although something waits; only a copy's end, a message or time can change that."""

    def run(self) -> None:
        """Until a Shutdown arrives."""
        while self.step():
            pass

    def step(self) -> bool:
        """One round. False once a Shutdown came. Raises EngineError when the device is past use, or a copy hangs and
        keeps the pages that everybody waits for.
        """
        for message in self._channel.receive(self._patience_s()):
            if isinstance(message, Shutdown):
                return False
            self._handle(message)
        self._sweep()
        chunks = self._scheduler.schedule()
        self._end_starved()
        self._end_failed()
        self._report(chunks)
        self._is_blocked = not chunks
        if chunks:
            self._run(chunks)
        self._watch_progress(ran=bool(chunks))
        self._check_when_due(ran=bool(chunks))
        return True

    def forget_all(self) -> None:
        """End all requests without a word; the engine is about to close."""
        for request in list(self._scheduler.requests.values()):
            self._scheduler.end_request(request)

    @property
    def has_work(self) -> bool:
        """A request has not ended, or something is still to be sent."""
        return bool(self._scheduler.requests or self._outputs or self._refused)

    def _patience_s(self) -> float:
        """How long to wait for a message: not at all while there is something to compute."""
        if not self.has_work:
            if self._parts.adapters is not None and self._parts.adapters.is_busy:
                return COPY_POLL_S
            return max(0.0, self._last_sent + HEARTBEAT_S - self._clock.now())
        return COPY_POLL_S if self._is_blocked else 0.0

    # ---- hearing -----------------------------------------------------------------------------------------------

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                try:
                    self._add(message)
                except RequestError as error:
                    self._refused.append(refused_by(message.request_id, error))
            case Cancel():
                self._forget(message)
            case StatsRequest():
                self._channel.send(self._stats())
            case LoadAdapter() | UnloadAdapter() | ListAdapters():
                self._handle_adapters(message)
            case _:
                raise EngineError(f"no handler for {type(message).__name__}")

    def _handle_adapters(self, message: LoadAdapter | UnloadAdapter | ListAdapters) -> None:
        adapters = self._parts.adapters
        if adapters is not None:
            adapters.handle(message)
        elif isinstance(message, ListAdapters):
            self._channel.send(AdapterAnswer(request_id=message.request_id))
        else:
            self._channel.send(
                AdapterAnswer(request_id=message.request_id, error=AdapterRefused.__name__, message=NO_ADAPTERS)
            )

    def _version_of(self, message: AddRequest) -> AdapterVersion | None:
        if message.adapter is None:
            return None
        if self._parts.adapters is None:
            raise UnknownAdapter(NO_ADAPTERS, param="model")
        return self._parts.adapters.find(message.adapter)

    def _add(self, message: AddRequest) -> None:
        validate_request(message, self._limits)
        adapter = self._version_of(message)
        if message.request_id in self._scheduler.requests:
            raise InvalidRequest("`request_id` is that of a request that still runs", param="request_id")
        if message.sampling.seed is None:
            seed = self._random.randint(0, MAX_SEED)
            message = msgspec.structs.replace(message, sampling=msgspec.structs.replace(message.sampling, seed=seed))
        max_tokens = resolve_max_tokens(message.sampling, len(message.prompt_token_ids), self._limits)
        request = make_request(
            message,
            priority=message.priority if self._uses_priority else 0,
            arrival=self._arrivals,
            max_tokens=max_tokens,
            vocab_size=self._limits.vocab_size,
            now=self._clock.now(),
            adapter=adapter,
        )
        self._scheduler.add(request)
        self._arrivals += 1
        self._num_prompt_tokens += request.num_prompt_tokens
        if request.deadline is not None:
            self._deadlines.add(request.request_id, request.deadline, self._scheduler.requests)
        for choice in request.choices:
            if (output := ends_before_running(choice)) is not None:
                self._scheduler.finish(choice)
                self._outputs.tokens.append(output)

    def _forget(self, message: Cancel) -> None:
        request = self._scheduler.requests.get(message.request_id)
        if request is None:
            return
        if message.choice is None:
            self._scheduler.end_request(request)
            return
        for choice in request.choices:
            if choice.index == message.choice and choice.status is not Status.FINISHED:
                self._scheduler.finish(choice)

    # ---- time --------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Copies and deadlines, in each round, so that nothing depends on new work to be cleaned up."""
        self._parts.transfers.sweep()
        self._parts.transfers.poll()
        if self._parts.adapters is not None:
            self._parts.adapters.sweep()
            if (names := self._parts.adapters.take_names()) is not None:
                self._channel.send(names)
            for answer in self._parts.adapters.take_answers():
                self._channel.send(answer)
        for request_id in self._deadlines.take_expired(self._clock.now()):
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                self._end_request(request, "deadline")

    def _end_request(self, request: Request, reason: str) -> None:
        for choice in self._scheduler.end_request(request):
            out = TokensOut(request_id=request.request_id, choice=choice.index, token_ids=(), finish_reason=reason)
            self._outputs.tokens.append(out)

    def _end_failed(self) -> None:
        """Requests whose adapter cannot be had hear why."""
        for request, error in self._scheduler.take_failed():
            log.warning("request %s ends: %s", request.request_id, error)
            self._scheduler.end_request(request)
            self._refused.append(refused_by(request.request_id, error))

    def _end_starved(self) -> None:
        for choice in self._scheduler.take_starved():
            log.error("request %s found no page though nothing else ran; it ends", choice.request.request_id)
            self._outputs.tokens.append(end_choice(choice, "error", self._scheduler))

    # ---- doing -------------------------------------------------------------------------------------------------

    def _run(self, chunks: list[Chunk]) -> None:
        if self._abort_if is not None:
            self._abort_if(chunks)
        try:
            result = self._parts.backend.run(self._parts.batch.build(chunks))
        except Exception as error:
            self._recover(chunks, error)
        else:
            self._blamed = None
            self._take(chunks, result)

    def _take(self, chunks: list[Chunk], result: StepResult) -> None:
        if self._parts.adapters is not None:
            self._parts.adapters.traffic.note(chunks)
        outputs = collect(chunks, result, self._scheduler)
        self._num_steps += 1
        self._num_generation_tokens += outputs.num_tokens
        self._outputs.extend(outputs)

    def _recover(self, chunks: list[Chunk], error: Exception) -> None:
        """Nothing of the step was committed, so all on board can be tried again, alone; who fails alone, ends. When two
        requests in a row would be to blame, the device is: this engine ends, and the client goes on with a fresh one.
        """
        log.error("a step of %d sequences failed: %s: %s", len(chunks), type(error).__name__, error)
        culprit = self._scheduler.fail(chunks)
        if culprit is None:
            return
        if self._blamed is not None:
            raise EngineError(f"no step succeeds any more, whatever it holds; the last error: {error}") from error
        self._blamed = culprit.request
        self._end_request(culprit.request, "error")

    def _watch_progress(self, *, ran: bool) -> None:
        """An engine that beats and computes nothing looks alive: it ends itself, and the client takes another."""
        now = self._clock.now()
        is_loading = self._parts.adapters is not None and self._parts.adapters.is_loading
        if ran or is_loading or not self._scheduler.requests:
            self._progressed_at = now
        elif now - self._progressed_at >= STALL_LIMIT_S:
            raise EngineError(
                f"no step in {now - self._progressed_at:.0f} s, though {self._scheduler.num_running} choices run and "
                f"{self._scheduler.num_waiting} wait; {self._parts.transfers.num_in_flight} copies are in flight"
            )

    def _check_when_due(self, *, ran: bool) -> None:
        becomes_idle = not self._scheduler.requests and not self._is_idle
        self._is_idle = not self._scheduler.requests
        if becomes_idle or (ran and self._num_steps % CHECK_EVERY_STEPS == 0):
            self._scheduler.check()
            self._parts.cache.check()
            self._parts.transfers.check()
            if self._parts.adapters is not None:
                self._parts.adapters.check()

    # ---- telling -----------------------------------------------------------------------------------------------

    def _report(self, chunks: list[Chunk]) -> None:
        """One frame: what came since the last, and who is on board now."""
        is_due = self._clock.now() - self._last_sent >= HEARTBEAT_S
        if not (chunks or self._outputs or self._refused or is_due):
            return
        running = tuple({chunk.choice.request.request_id: None for chunk in chunks}) if chunks else None
        self._channel.send(
            StepOut(
                step=self._num_steps,
                going_on=tuple(self._outputs.going_on),
                next_token_ids=tuple(self._outputs.next_token_ids),
                tokens=tuple(self._outputs.tokens),
                refused=tuple(self._refused),
                running=running,
            )
        )
        self._outputs = Outputs()
        self._refused = []
        self._last_sent = self._clock.now()

    def _stats(self) -> Stats:
        return msgspec.structs.replace(
            self._read_stats(),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_guessed_tokens=self._scheduler.num_guessed_tokens,
            num_right_guesses=self._scheduler.num_right_guesses,
            running_adapters=_names(self._scheduler.requests.values(), is_running=True),
            waiting_adapters=_names(self._scheduler.requests.values(), is_running=False),
        )


def _names(requests: Iterable[Request], *, is_running: bool) -> tuple[str, ...]:
    """Adapters of requests of which a choice runs, or of which none does; each once."""
    names = {
        request.adapter.name: None
        for request in requests
        if request.adapter is not None
        and any(choice.status is Status.RUNNING for choice in request.choices) is is_running
    }
    return tuple(names)[:MAX_NAMES_IN_STATS]
