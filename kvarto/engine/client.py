"""EngineClient: the server's side of the engine. It submits prompts, and hides that engines die.

The client keeps every request's prompt and the tokens already received. When the engine process dies, or says nothing
for too long, a fresh one is started (`supervisor.py`) and every running request is handed to it from where it was:
because tokens do not depend on the batch, its reader sees a pause and nothing else. Requests in the step that died are
suspects (`suspects.py`); the one that proves to kill engines fails alone.

Everything runs in one asyncio loop; nothing here blocks. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from kvarto.core.errors import EngineDied, EngineError, InvalidRequest, KvartoError, Overloaded, Unavailable
from kvarto.core.sampling import SamplingParams
from kvarto.engine.adapter_feed import AdapterFeed
from kvarto.engine.adapter_quota import AdapterQuota
from kvarto.engine.carried_errors import error_of
from kvarto.engine.child import ENGINE_COMMAND, EngineKilled
from kvarto.engine.config import EngineConfig, with_secret
from kvarto.engine.detokenizer import TokenBytes
from kvarto.engine.gate import Gate
from kvarto.engine.generation import Generation
from kvarto.engine.messages import (
    AddRequest,
    Cancel,
    Ready,
    Stats,
    StatsRequest,
    StepOut,
    TokensOut,
)
from kvarto.engine.open_request import Observer, OpenRequest, RequestTimes
from kvarto.engine.outputs import ChoiceOutput, RequestOutputs
from kvarto.engine.pace import Pace
from kvarto.engine.stats_feed import StatsFeed
from kvarto.engine.supervisor import Loading, Said, State, Supervisor
from kvarto.engine.suspects import Suspects
from kvarto.engine.validate import ModelLimits, resolve_max_tokens, validate_request

logger = logging.getLogger("kvarto.engine")

MAX_OUTPUTS = 4096
"""Prompts times choices of one submission."""
ENDED_WITH_ERROR = (
    "the engine could not compute this request: the model's numbers were not finite, or its steps failed also when "
    "they held nothing else; see the server's log"
)


class EngineClient:
    """The requests, which outlive engines. `start` first; `close` at the end."""

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
        self.is_draining = False
        self.num_restarts = 0
        self._config = config = with_secret(config)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._observer = observer
        self._engine = Supervisor(config, self, command=command, silence_limit_s=silence_limit_s, on_phase=on_phase)
        self._seeds: random.Random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._open: dict[str, OpenRequest] = {}
        self._by_engine_id: dict[str, OpenRequest] = {}
        self._in_step: tuple[str, ...] = ()
        self.adapters = AdapterFeed(self._engine.send)
        self._gate = Gate(config.max_num_queued)
        self._suspects = Suspects()
        self._stats = StatsFeed()
        self._pace = Pace()
        self._quota = AdapterQuota(config.max_requests_per_adapter)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self, loading: Loading | None = None) -> Ready:
        """Start an engine, or take the one that loads already, and wait until it serves. Raises what the engine could
        not do, as its own KvartoError.
        """
        ready = await self._engine.start(loading)
        self.adapters.names = frozenset(ready.adapters)
        return ready

    async def drain(self) -> None:
        """Take no more requests, and return when those that run have ended."""
        self.is_draining = True
        await self._is_idle.wait()

    async def close(self) -> None:
        """End the engine; requests that still run fail with Unavailable."""
        self._engine.state = State.CLOSED  # nothing is admitted from here on
        self._fail_all(Unavailable("the server is shutting down"))
        await self._engine.close()

    @property
    def state(self) -> State:
        """Of the engine."""
        return self._engine.state

    @property
    def ready(self) -> Ready:
        """What the engine said about itself when it was loaded."""
        return self._engine.ready

    @property
    def limits(self) -> ModelLimits:
        """What requests are checked against."""
        return ModelLimits(vocab_size=self.ready.vocab_size, max_model_len=self.ready.max_model_len)

    @property
    def num_open(self) -> int:
        """Prompts that are queued or running."""
        return len(self._open)

    @property
    def engine_pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return self._engine.pid

    @property
    def is_alive(self) -> bool:
        """Does the engine make progress, or will another one soon? Liveness, for an orchestrator."""
        return self._engine.is_alive

    @property
    def can_admit(self) -> bool:
        """Would a request be taken and run now? Readiness, for a load balancer."""
        return self.state is State.RUNNING and not self.is_draining and self.is_alive and not self._is_full(1)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Queue prompts, all or none, each with `sampling.n` choices. Raises RequestError before anything is queued.

        A name that no adapter has is refused by the engine, as are adapters that cannot be loaded.
        """
        try:
            self._check_admission(len(prompts), priority, adapter)
        except Overloaded as error:
            self._observe_refusal(error)
            raise
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
        common = AddRequest(
            request_id="",
            prompt_token_ids=(),
            sampling=sampling,
            eos_token_ids=self._eos_token_ids,
            cache_salt=cache_salt,
            priority=priority,
            deadline_s=deadline_s,
            adapter=adapter,
        )
        messages = [self._checked(common, tuple(prompt)) for prompt in prompts]
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
            self._quota.add(adapter)
            self._enter(request)
        self._is_idle.clear()
        self._hand_over()
        return generation

    def _checked(self, common: AddRequest, prompt: tuple[int, ...]) -> AddRequest:
        """The message for one prompt, valid. Nothing is made of a request's numbers before they are checked."""
        max_tokens = resolve_max_tokens(common.sampling, len(prompt), self.limits)
        message = msgspec.structs.replace(
            common,
            request_id=secrets.token_hex(8),
            prompt_token_ids=prompt,
            sampling=msgspec.structs.replace(common.sampling, max_tokens=max_tokens),
        )
        validate_request(message, self.limits)
        return message

    async def stats(self, timeout_s: float = 0.25) -> Stats:
        """Fresh numbers of the engine, or the last ones when a step keeps it busy. Counters never fall."""
        if self.state is not State.RUNNING:
            return self._stats.total
        return await self._stats.fresh(lambda: self._engine.send(StatsRequest()), timeout_s)

    def _check_admission(self, num_prompts: int, priority: int, adapter: str | None) -> None:
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
        if not 1 <= num_prompts <= self._capacity:
            raise InvalidRequest(
                f"{num_prompts} prompts in one request; at least 1, and at most {self._capacity} fit at all "
                "(`--max-num-seqs` and `--max-num-queued`); send several requests",
                param="prompt",
            )
        now_s = time.monotonic()
        if self._is_full(num_prompts):
            num_too_many = self.num_open + num_prompts - self._capacity
            raise Overloaded(
                f"{self.num_open} prompts are running or queued and {num_prompts} more were sent; at most "
                f"{self._capacity} fit (`--max-num-seqs` and `--max-num-queued`); retry later",
                retry_after_s=self._pace.retry_after_s(num_too_many, now_s),
            )
        self._quota.check(adapter, num_prompts, now_s)

    @property
    def _capacity(self) -> int:
        return self._config.max_num_seqs + self._config.max_num_queued

    def _is_full(self, num_prompts: int) -> bool:
        return self.num_open + num_prompts > self._capacity

    def _observe_refusal(self, error: Overloaded) -> None:
        if self._observer is not None:
            self._observer.request_refused(error.code or "")

    def _enter(self, request: OpenRequest) -> None:
        """Put the request in the row for the engine; without one it waits for the next."""
        if self.state is State.RUNNING:
            self._by_engine_id[request.engine_id] = request
            self._gate.enter(request.engine_id)

    def _hand_over(self) -> None:
        """Give the engine as many requests as it takes."""
        if self.state is not State.RUNNING:
            return
        for engine_id in self._gate.take():
            request = self._by_engine_id.get(engine_id)
            if request is None:  # another prompt of its submission, taken before it, was more than a frame holds
                continue
            runs_alone = self._suspects.runs_alone(request.request_id)
            try:
                self._engine.send(request.message(time.monotonic(), runs_alone=runs_alone))
            except EngineError as error:
                self._fail(request, error)

    def _withdraw(self, request: OpenRequest, *, has_ended: bool = False) -> None:
        """Make the engine forget the request, if it has not ended there; late frames then belong to nobody."""
        if self._by_engine_id.pop(request.engine_id, None) is None:
            return
        if self._gate.leave(request.engine_id) and not has_ended:
            self._engine.send(Cancel(request.engine_id))

    def _cancel(self, requests: Sequence[OpenRequest]) -> None:
        for request in requests:
            self._end(request, "abort")

    def _end(self, request: OpenRequest, reason: str, *, has_ended: bool = False) -> None:
        """Forget a request, once; later calls do nothing. `has_ended`: the engine knows, and need not wake for it."""
        if self._open.pop(request.request_id, None) is None:
            return
        self._withdraw(request, has_ended=has_ended)
        self._suspects.forget(request.request_id)
        now_s = time.monotonic()
        self._pace.note_end(now_s)
        self._quota.remove(request.first.adapter, now_s)
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

    # --- told by the supervisor ---------------------------------------------------------------------------------------

    def take(self, message: Said) -> None:
        """The engine said something."""
        if isinstance(message, StepOut):
            self._take_step(message)
        elif isinstance(message, Stats):
            self._stats.take(message)
        else:
            self.adapters.take(message)

    def engine_died(self, death: EngineDied) -> None:
        """Find out who did it; all others wait for the next engine."""
        in_step = [self._by_engine_id[engine_id] for engine_id in self._in_step if engine_id in self._by_engine_id]
        logger.error("%s, in a step of %d requests; %d are open", death, len(in_step), self.num_open)
        num_tokens = {request.request_id: request.outputs.num_tokens for request in in_step}
        culprits = self._suspects.died(num_tokens, was_killed=isinstance(death, EngineKilled))
        self._in_step = ()
        self._by_engine_id.clear()
        self._gate.reset()
        self._stats.engine_died()
        for request in [request for request in in_step if request.request_id in culprits]:
            num_deaths = self._suspects.strikes(request.request_id)
            error = f"this request ended the engine process {num_deaths} times and is not tried again"
            self._fail(request, EngineDied(error))

    def engine_took_over(self, before: Ready, now: Ready) -> None:
        """Hand every request to the fresh engine, if it computes the same tokens as the one before."""
        self.num_restarts += 1
        if self._observer is not None:
            self._observer.engine_restarted()
        if before.fingerprint != now.fingerprint:
            self._fail_begun(f"the engine changed from `{before.fingerprint}` to `{now.fingerprint}`")
        self.adapters.engine_took_over(now.adapters)
        logger.warning("a fresh engine took over %d requests", self.num_open)
        for request in self._open.values():
            request.attempt += 1
            self._enter(request)
        self._hand_over()

    def gave_up(self, error: KvartoError) -> None:
        """There will be no other engine."""
        self._fail_all(EngineDied(f"the engine is broken and could not be restarted: {error}"))

    def _fail_begun(self, why: str) -> None:
        """What has begun cannot go on without a seam."""
        for request in [request for request in self._open.values() if request.outputs.has_begun]:
            self._fail(request, EngineError(f"{why} in the midst of this request"))

    # --- frames -----------------------------------------------------------------------------------------------------

    def _take_step(self, step: StepOut) -> None:
        if len(step.going_on) != len(step.next_token_ids):
            raise EngineDied(f"the engine sent {len(step.next_token_ids)} tokens of {len(step.going_on)} requests")
        news: list[Generation] = []
        try:
            self._take_outputs(step, news)
        finally:
            for generation in news:
                generation.announce()
        for refused in step.refused:
            request = self._by_engine_id.get(refused.request_id)
            if request is not None:
                error = error_of(refused)
                if isinstance(error, Overloaded):
                    self._observe_refusal(error)
                self._fail(request, error)
        self._take_running(step.running or ())
        self._hand_over()

    def _take_running(self, engine_ids: tuple[str, ...]) -> None:
        """These are in the step that begins now, often the same as in the one before."""
        if engine_ids == self._in_step:
            return
        self._in_step = engine_ids
        for engine_id in engine_ids:
            request = self._by_engine_id.get(engine_id)
            if request is not None and request.times.scheduled_s is None:
                request.times.scheduled_s = self._engine.heard_s
            self._gate.begun(engine_id)

    def _take_outputs(self, step: StepOut, news: list[Generation]) -> None:
        """Generations that have something to announce are added to `news`."""
        for engine_id, token_id in zip(step.going_on, step.next_token_ids, strict=True):
            request = self._by_engine_id.get(engine_id)
            if request is not None and (output := request.outputs.feed_next(token_id)) is not None:
                self._take_output(request, output, news)
        for tokens in step.tokens:
            request = self._by_engine_id.get(tokens.request_id)
            if request is not None:
                self._take_tokens(request, tokens, news)

    def _take_tokens(self, request: OpenRequest, tokens: TokensOut, news: list[Generation]) -> None:
        if not 0 <= tokens.choice < len(request.outputs.choices):
            raise EngineDied(f"the engine sent tokens of choice {tokens.choice} of {request.sampling.n}")
        if tokens.adapter_digest is not None:
            request.adapter_digest = tokens.adapter_digest
        output = request.outputs.feed(tokens)
        if output is None:
            return
        if output.num_cached_tokens is not None:
            request.num_cached_tokens = output.num_cached_tokens
        self._take_output(request, output, news, has_ended=tokens.finish_reason is not None)

    def _take_output(
        self, request: OpenRequest, output: ChoiceOutput, news: list[Generation], *, has_ended: bool = False
    ) -> None:
        """Pass on an output; `has_ended`: the engine knows that its choice has, as it was told of all before it."""
        self._observe_tokens(request, len(output.token_ids))
        if output.finish_reason == "error":
            self._fail(request, EngineError(ENDED_WITH_ERROR))
            return
        if request.generation.put(output):
            news.append(request.generation)
        if output.finish_reason is not None:
            if request.outputs.is_finished:
                self._end(request, output.finish_reason, has_ended=has_ended)
                return
            if not has_ended:  # a stop string, which only we know
                self._engine.send(Cancel(request.engine_id, output.choice))
        if self._suspects and self._suspects.advanced(request.request_id, request.outputs.num_tokens):
            self._rejoin(request)

    def _observe_tokens(self, request: OpenRequest, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        times, now_s = request.times, self._engine.heard_s
        interval_s = None if times.last_token_s is None else now_s - times.last_token_s
        times.last_token_s = now_s
        if times.first_token_s is None:
            times.first_token_s = now_s
        if self._observer is not None:
            self._observer.tokens_arrived(request, num_tokens, interval_s)

    def _rejoin(self, request: OpenRequest) -> None:
        """Cleared of suspicion: let it share steps again, from where it is."""
        self._withdraw(request)
        request.attempt += 1
        self._enter(request)
