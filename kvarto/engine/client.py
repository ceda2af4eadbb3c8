"""EngineClient: the server's side of the engine. It submits prompts, and hides that engines die.

The client keeps every request's prompt and the tokens already received. When the engine process dies, or says nothing
for too long, a fresh one is started and every running request is handed to it from where it was: because tokens do not
depend on the batch, its reader sees a pause and nothing else. Requests in the step that died are suspects
(`suspects.py`); the one that proves to kill engines fails alone.

Everything runs in one asyncio loop; nothing here blocks. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvarto.core.errors import EngineDied, EngineError, InvalidRequest, KvartoError, Overloaded, Unavailable
from kvarto.core.sampling import SamplingParams
from kvarto.engine.backoff import Backoff
from kvarto.engine.carried_errors import error_from
from kvarto.engine.child import ENGINE_COMMAND, EngineChild
from kvarto.engine.config import EngineConfig
from kvarto.engine.detokenizer import TokenBytes
from kvarto.engine.gate import Gate
from kvarto.engine.generation import Generation
from kvarto.engine.messages import (
    AddRequest,
    Cancel,
    LoadFailed,
    Phase,
    Ready,
    Stats,
    StatsRequest,
    StepOut,
    TokensOut,
)
from kvarto.engine.open_request import Observer, OpenRequest, RequestTimes
from kvarto.engine.outputs import RequestOutputs
from kvarto.engine.suspects import Suspects
from kvarto.engine.validate import ModelLimits, resolve_max_tokens, validate_request

logger = logging.getLogger("kvarto.engine")

MAX_FAILED_STARTS = 6
"""Starts in a row that may fail before the client gives up on engines."""
MAX_OUTPUTS = 4096
"""Prompts times choices of one submission."""
_RATE_WINDOW = 64
"""Ended requests from which the pace is taken."""


class State(enum.Enum):
    """Of the engine, as clients of the server should see it."""

    LOADING = "loading"
    RUNNING = "running"
    RESTARTING = "restarting"
    BROKEN = "broken"
    CLOSED = "closed"


class EngineClient:
    """One engine process after the other, and the requests that outlive them. `start` first; `close` at the end."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: TokenBytes,
        *,
        eos_token_ids: tuple[int, ...] = (),
        silence_limit_s: float = 120.0,
        command: Sequence[str] = ENGINE_COMMAND,
        observer: Observer | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        """`silence_limit_s`: an engine that sends nothing for so long, though it beats each second when idle and
        before each step, is killed and replaced; it must be longer than the longest step.
        """
        self.state = State.LOADING
        self.is_draining = False
        self.num_restarts = 0
        self._config = config
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._silence_limit_s = silence_limit_s
        self._command = command
        self._observer = observer
        self._on_phase = on_phase
        self._seeds: random.Random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._child: EngineChild | None = None
        self._ready: Ready | None = None
        self._started_s = 0.0
        self._heard_s = 0.0
        self._open: dict[str, OpenRequest] = {}
        self._by_engine_id: dict[str, OpenRequest] = {}
        self._in_step: tuple[str, ...] = ()
        self._gate = Gate(config.max_num_queued)
        self._suspects = Suspects()
        self._backoff = Backoff()
        self._ended_s: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._stats = Stats()
        self._stats_base = Stats()
        self._stats_waiters: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start an engine and wait until it serves. Raises what the engine could not do, as its own KvartoError."""
        self._child = await self._load()
        self.state = State.RUNNING
        self._tasks = [asyncio.create_task(self._supervise(self._child)), asyncio.create_task(self._watch())]
        return self.ready

    @property
    def ready(self) -> Ready:
        """What the engine said about itself when it was loaded."""
        assert self._ready is not None, "start() has not returned"
        return self._ready

    @property
    def limits(self) -> ModelLimits:
        """What requests are checked against."""
        return ModelLimits(vocab_size=self.ready.vocab_size, max_model_len=self.ready.max_model_len)

    @property
    def num_open(self) -> int:
        """Prompts that are queued or running."""
        return len(self._open)

    @property
    def silent_s(self) -> float:
        """Seconds since the engine last said anything."""
        return time.monotonic() - self._heard_s

    @property
    def engine_pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def is_alive(self) -> bool:
        """Does the engine make progress, or will another one soon? Liveness, for an orchestrator."""
        if self.state is State.RUNNING:
            return self.silent_s < self._silence_limit_s
        return self.state in (State.LOADING, State.RESTARTING)

    @property
    def can_admit(self) -> bool:
        """Would a request be taken and run now? Readiness, for a load balancer."""
        return self.state is State.RUNNING and not self.is_draining and self.is_alive and not self._is_full(1)

    async def drain(self) -> None:
        """Take no more requests, and return when those that run have ended."""
        self.is_draining = True
        await self._is_idle.wait()

    async def close(self) -> None:
        """End the engine; requests that still run fail with Unavailable."""
        self.state = State.CLOSED
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(Unavailable("the server is shutting down"))
        if self._child is not None:
            await self._child.close()
            self._child = None

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Generation:
        """Queue prompts, all or none, each with `sampling.n` choices. Raises RequestError before anything is queued."""
        self._check_admission(len(prompts), priority)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
        messages = [self._checked(tuple(prompt), sampling, cache_salt, priority, deadline_s) for prompt in prompts]
        if len(messages) * sampling.n > MAX_OUTPUTS:
            raise InvalidRequest(
                f"{len(messages)} prompts with `n` {sampling.n} make {len(messages) * sampling.n} outputs; at most "
                f"{MAX_OUTPUTS} in one request, send several",
                param="n",
            )
        requests: list[OpenRequest] = []
        generation = Generation(len(messages) * sampling.n, lambda: self._cancel(requests))
        now_s = time.monotonic()
        for index, message in enumerate(messages):
            outputs = RequestOutputs(
                message.sampling, self._tokenizer, eos_token_ids=self._eos_token_ids, prompt_index=index
            )
            requests.append(OpenRequest(message, generation, outputs, RequestTimes(submitted_s=now_s)))
        for request in requests:
            self._open[request.request_id] = request
            self._enter(request)
        self._hand_over()
        self._is_idle.clear()
        return generation

    def _checked(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        cache_salt: str | None,
        priority: int,
        deadline_s: float | None,
    ) -> AddRequest:
        """The message for one prompt, valid. Nothing is made of a request's numbers before they are checked."""
        max_tokens = resolve_max_tokens(sampling, len(prompt), self.limits)
        message = AddRequest(
            request_id=secrets.token_hex(8),
            prompt_token_ids=prompt,
            sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            eos_token_ids=self._eos_token_ids,
            cache_salt=cache_salt,
            priority=priority,
            deadline_s=deadline_s,
        )
        validate_request(message, self.limits)
        return message

    async def stats(self, timeout_s: float = 0.25) -> Stats:
        """Fresh numbers of the engine, or the last ones when a step keeps it busy. Counters never fall."""
        if self._child is not None and self.state is State.RUNNING:
            arrived = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(arrived)
            self._child.send(StatsRequest())
            await asyncio.wait([arrived], timeout=timeout_s)
        return _with_base(self._stats, self._stats_base)

    def _check_admission(self, num_prompts: int, priority: int) -> None:
        if self.is_draining or self.state is State.CLOSED:
            raise Unavailable("the server is shutting down and takes no more requests")
        if self.state is State.BROKEN:
            raise Unavailable("the engine is broken and could not be restarted; see the server's log")
        if priority != 0 and self._config.scheduling_policy != "priority":
            raise InvalidRequest(
                f"`priority` is {priority}, but this server serves first come, first served; "
                "leave it out, or start the server with `--scheduling-policy priority`",
                param="priority",
            )
        if self._is_full(num_prompts):
            raise Overloaded(
                f"{self.num_open} prompts are running or queued and {num_prompts} more were sent; at most "
                f"{self._capacity} fit (`--max-num-seqs` and `--max-num-queued`); retry later",
                retry_after_s=self._retry_after_s(num_prompts),
            )

    @property
    def _capacity(self) -> int:
        return self._config.max_num_seqs + self._config.max_num_queued

    def _is_full(self, num_prompts: int) -> bool:
        return self.num_open + num_prompts > self._capacity

    def _retry_after_s(self, num_prompts: int) -> int:
        """When there should be room, at the pace of the last ended requests; 1 to 60 seconds."""
        if len(self._ended_s) < 2:
            return 1
        pace_s = (time.monotonic() - self._ended_s[0]) / len(self._ended_s)
        num_too_many = self.num_open + num_prompts - self._capacity
        return min(60, max(1, round(pace_s * num_too_many)))

    def _enter(self, request: OpenRequest) -> None:
        """Put the request in the row for the engine; without one it waits for the next."""
        if self.state is State.RUNNING:
            self._by_engine_id[request.engine_id] = request
            self._gate.enter(request.engine_id)

    def _hand_over(self) -> None:
        """Give the engine as many requests as it takes."""
        if self._child is None:
            return
        for engine_id in self._gate.take():
            request = self._by_engine_id[engine_id]
            runs_alone = self._suspects.runs_alone(request.request_id)
            self._child.send(request.message(time.monotonic(), runs_alone=runs_alone))

    def _withdraw(self, request: OpenRequest) -> None:
        """Make the engine forget the request; its late frames then belong to nobody."""
        if self._by_engine_id.pop(request.engine_id, None) is None or self._child is None:
            return
        if self._gate.leave(request.engine_id):
            self._child.send(Cancel(request.engine_id))

    def _cancel(self, requests: Sequence[OpenRequest]) -> None:
        for request in requests:
            self._end(request, "abort")

    def _end(self, request: OpenRequest, reason: str) -> None:
        """Forget a request, once; later calls do nothing.

        The engine is told also after it finished, for a choice that a stop string ended goes on there.
        """
        if self._open.pop(request.request_id, None) is None:
            return
        self._withdraw(request)
        self._suspects.forget(request.request_id)
        now_s = time.monotonic()
        self._ended_s.append(now_s)
        if self._observer is not None:
            self._observer.request_ended(request, reason, now_s)
        if not self._open:
            self._is_idle.set()

    def _fail(self, request: OpenRequest, error: Exception) -> None:
        """A prompt failed, and with it all that its client sent together."""
        request.generation.fail(error)
        self._end(request, "error")
        request.generation.cancel()

    def _fail_all(self, error: Exception) -> None:
        for request in list(self._open.values()):
            self._fail(request, error)

    # --- frames -----------------------------------------------------------------------------------------------------

    async def _pump(self, child: EngineChild) -> EngineDied:
        """Handle frames until the engine dies; give its death."""
        try:
            while True:
                message = await child.receive()
                self._heard_s = time.monotonic()
                if isinstance(message, StepOut):
                    self._take_step(message)
                elif isinstance(message, Stats):
                    self._take_stats(message)
                else:
                    return EngineDied(f"the engine sent `{type(message).__name__}` while it was serving")
        except EngineDied as death:
            return death

    def _take_step(self, step: StepOut) -> None:
        for tokens in step.tokens:
            request = self._by_engine_id.get(tokens.request_id)
            if request is not None:
                self._take_tokens(request, tokens)
        for refused in step.refused:
            request = self._by_engine_id.get(refused.request_id)
            if request is not None:
                self._fail(request, error_from(refused.error, refused.message, refused.param))
        self._in_step = step.running or ()
        for engine_id in self._in_step:
            request = self._by_engine_id.get(engine_id)
            if request is not None and request.times.scheduled_s is None:
                request.times.scheduled_s = self._heard_s
            self._gate.begun(engine_id)
        self._hand_over()

    def _take_tokens(self, request: OpenRequest, tokens: TokensOut) -> None:
        if not 0 <= tokens.choice < len(request.outputs.choices):
            raise EngineDied(f"the engine sent tokens of choice {tokens.choice} of {request.sampling.n}")
        output = request.outputs.feed(tokens)
        if output is None:
            return
        if output.num_cached_tokens is not None:
            request.num_cached_tokens = output.num_cached_tokens
        self._observe_tokens(request, len(output.token_ids))
        if output.finish_reason == "error":
            self._fail(request, EngineError("the model produced numbers that are not finite for this request"))
            return
        request.generation.put(output)
        if request.outputs.is_finished:
            self._end(request, str(output.finish_reason))
        elif self._suspects.advanced(request.request_id, request.outputs.num_tokens):
            self._rejoin(request)

    def _observe_tokens(self, request: OpenRequest, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        times = request.times
        interval_s = None if times.last_token_s is None else self._heard_s - times.last_token_s
        times.last_token_s = self._heard_s
        if times.first_token_s is None:
            times.first_token_s = self._heard_s
        if self._observer is not None:
            self._observer.tokens_arrived(request, num_tokens, interval_s)

    def _rejoin(self, request: OpenRequest) -> None:
        """Cleared of suspicion: let it share steps again, from where it is."""
        self._withdraw(request)
        request.attempt += 1
        self._enter(request)

    def _take_stats(self, stats: Stats) -> None:
        self._stats = stats
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- engines come and go ----------------------------------------------------------------------------------------

    async def _load(self) -> EngineChild:
        """Start an engine and wait for its Ready. Whatever goes wrong, no process is left behind."""
        child = await EngineChild.start(self._config, self._command)
        try:
            while True:
                message = await child.receive()
                if isinstance(message, Phase) and self._on_phase is not None:
                    self._on_phase(message.name)
                elif isinstance(message, LoadFailed):
                    raise error_from(message.error, message.message)
                elif isinstance(message, Ready):
                    self._accept(message)
                    return child
        except BaseException:
            await child.reap()
            raise

    def _accept(self, ready: Ready) -> None:
        """Engines may follow each other only when they compute the same tokens."""
        if self._ready is not None and ready.fingerprint != self._ready.fingerprint:
            changed = f"the model changed from `{self._ready.fingerprint}` to `{ready.fingerprint}` while it was served"
            for request in [request for request in self._open.values() if request.outputs.has_begun]:
                self._fail(request, EngineError(changed))
            logger.warning("%s; requests that had begun have failed", changed)
        self._ready = ready
        self._started_s = self._heard_s = time.monotonic()

    async def _supervise(self, child: EngineChild) -> None:
        """Follow one engine after the other until the client closes or gives up."""
        try:
            while True:
                death = await self._pump(child)
                self._child = None
                self.state = State.RESTARTING
                await child.reap()
                self._take_death(death)
                child = await self._restart()
                self._resume(child)
        except KvartoError as error:
            self._break(error)
        except Exception as error:
            logger.exception("the engine's client failed")
            self._break(EngineError(f"the engine's client failed: {type(error).__name__}"))

    def _take_death(self, death: EngineDied) -> None:
        in_step = [self._by_engine_id[engine_id] for engine_id in self._in_step if engine_id in self._by_engine_id]
        logger.error("%s, in a step of %d requests; %d are open", death, len(in_step), self.num_open)
        culprits = self._suspects.died({request.request_id: request.outputs.num_tokens for request in in_step})
        self._in_step = ()
        self._by_engine_id.clear()
        self._gate.reset()
        self._stats_base = _with_base(self._stats, self._stats_base)
        self._stats = Stats()
        for request_id in culprits:
            num_deaths = self._suspects.strikes(request_id)
            self._fail(
                self._open[request_id],
                EngineDied(f"this request ended the engine process {num_deaths} times and is not tried again"),
            )

    async def _restart(self) -> EngineChild:
        """A fresh engine, later while engines keep dying. Raises the last error after several failed starts."""
        lived_s = time.monotonic() - self._started_s
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            await asyncio.sleep(self._backoff.died(lived_s))
            try:
                return await self._load()
            except KvartoError as error:
                logger.error("start %d of %d of a fresh engine failed: %s", attempt, MAX_FAILED_STARTS, error)
                last, lived_s = error, 0.0
        raise last

    def _resume(self, child: EngineChild) -> None:
        self._child = child
        self.state = State.RUNNING
        self.num_restarts += 1
        if self._observer is not None:
            self._observer.engine_restarted()
        logger.warning("a fresh engine took over %d requests", self.num_open)
        for request in self._open.values():
            request.attempt += 1
            self._enter(request)
        self._hand_over()

    def _break(self, error: KvartoError) -> None:
        self.state = State.BROKEN
        logger.critical("giving up on engines: %s", error)
        if self._child is not None:
            self._child.kill()
        self._fail_all(EngineDied(f"the engine is broken and could not be restarted: {error}"))

    async def _watch(self) -> None:
        """Kill an engine that is silent for too long.

        Two looks must find the same silence: if this process itself was stopped, the first look only wakes it up and
        the frames that waited are read before the second.
        """
        suspected_s: float | None = None
        while True:
            await asyncio.sleep(self._silence_limit_s / 4)
            is_silent = self.state is State.RUNNING and self.silent_s > self._silence_limit_s
            if is_silent and suspected_s == self._heard_s and self._child is not None:
                logger.error("the engine was silent for %.1f s and is replaced", self.silent_s)
                self._child.kill()
            suspected_s = self._heard_s if is_silent else None


_COUNTERS = (
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "num_preemptions",
    "num_steps",
    "num_prompt_tokens",
    "num_generation_tokens",
)


def _with_base(stats: Stats, base: Stats) -> Stats:
    """Counters of this engine and of all before it; gauges of this one."""
    return msgspec.structs.replace(stats, **{name: getattr(stats, name) + getattr(base, name) for name in _COUNTERS})
