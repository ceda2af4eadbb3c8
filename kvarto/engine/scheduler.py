"""Scheduler: which tokens of which choices go into the next step. No phases: a step is a list of chunks.

Each step: drawn tokens first (one each), then prompts in order within what is left of the token budget, then new
choices from the queue while slots and pages allow. What this knows of the cache is open, grow, fork, commit and close.
Each part of the decision has a file of its own:

    roster          where each choice is: held, waiting, running, finished
    step_plan       the chunks of the step, and what is left of its limits
    chunker         how much of a choice goes into it, with forks and guesses
    page_pressure   who gives way when pages are short
    admitter        who comes in from the queue; `admission` is its arithmetic, `crews` says who may share a step
    repeated_step   the last step a token later, where nothing else can come
    retries         those of a step that failed, alone
    next_in_queue   whom to try first, where adapters differ: `virtual_tokens` and `affinity`
    parking         those whose adapter is not on the device, and who holds one that is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarto.core.buffers import StepLimits
from kvarto.core.errors import AdapterRefused, ContextLengthExceeded, KvartoError, Overloaded, RequestError
from kvarto.engine.admission import AdmissionGate
from kvarto.engine.admitter import Admitter
from kvarto.engine.chunk import Chunk
from kvarto.engine.chunker import Chunker
from kvarto.engine.crews import Crews
from kvarto.engine.next_in_queue import NextInQueue
from kvarto.engine.pace import bounded_retry_s
from kvarto.engine.page_pressure import PagePressure
from kvarto.engine.parking import Parking
from kvarto.engine.repeated_step import RepeatedStep
from kvarto.engine.request import Choice, Request, Status, sequence_of
from kvarto.engine.retries import Retries
from kvarto.engine.roster import Roster
from kvarto.engine.step_plan import StepPlan

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache

WAIT_CODE = "adapter_wait_too_long"


class Scheduler:
    """Requests from queue to end. One thread; `schedule` and one of `settle` or `fail` take turns."""

    def __init__(
        self,
        cache: KVCache,
        limits: StepLimits,
        *,
        max_num_queued: int,
        has_copies: Callable[[], bool],
        num_lookup_tokens: int = 0,
        parking: Parking | None = None,
        max_adapters: int = 0,
        max_adapter_wait_s: float = 0.0,
        adapter_affinity: bool = True,
    ) -> None:
        """`has_copies` says whether copies are in flight, whose end may free pages. `num_lookup_tokens`: see
        `EngineConfig.prompt_lookup_num_tokens`. `parking`: where there are adapters; at most `max_adapters` distinct
        ones run at once, 0 for any number, and a request for which `max_adapter_wait_s` would not suffice is refused;
        with `adapter_affinity` those go first that run already.
        """
        self.num_guessed_tokens = 0
        self.num_right_guesses = 0
        self._num_lookup_tokens = num_lookup_tokens
        self._cache = cache
        self._limits = limits
        self._max_num_queued = max_num_queued
        self._max_adapter_wait_s = max_adapter_wait_s
        self._crews = Crews()
        self._queue = NextInQueue(is_on=parking is not None, max_adapters=max_adapters, prefers_home=adapter_affinity)
        self._gate = AdmissionGate(cache, limits.max_tokens)
        self._parking = parking = Parking() if parking is None else parking
        parking.refusal = self._refusal
        self._roster = roster = Roster(cache, limits.max_seqs, self._gate, parking)
        self._plan = plan = StepPlan(limits)
        self._pressure = pressure = PagePressure(cache, roster, plan, self._gate, has_copies=has_copies)
        self._chunker = Chunker(cache, roster, plan, pressure, num_lookup_tokens=num_lookup_tokens)
        self._admitter = Admitter(
            cache, roster, plan, self._gate, pressure, self._chunker, self._crews, parking, self._queue
        )
        self._repeated = RepeatedStep(cache)
        self._retries = Retries(plan, self._chunker)

    # ---- what comes from outside -------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Request]:
        """Requests that have not ended, by id."""
        return self._roster.requests

    @property
    def num_running(self) -> int:
        """Choices with a slot."""
        return self._roster.num_running

    @property
    def num_waiting(self) -> int:
        """Choices without a slot, those that wait for their leader included."""
        return self._roster.num_waiting

    @property
    def num_preemptions(self) -> int:
        """Times that a choice gave way, since start."""
        return self._pressure.num_preemptions

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded, and ContextLengthExceeded for what the pool can never hold."""
        if (refusal := self._refusal(request)) is not None:
            raise refusal
        if (overload := self._overload(request)) is not None:
            raise overload
        self._repeated.forget()
        self._crews.add(request)
        self._queue.add(request)
        self._roster.add(request)

    def _overload(self, request: Request) -> Overloaded | None:
        """Why there is no room for this request now: in the queue, or in the line for its adapter."""
        if self._roster.num_unadmitted >= self._max_num_queued:
            return Overloaded(
                f"{self._roster.num_unadmitted} requests wait and the queue holds {self._max_num_queued}; retry later "
                "or raise `--max-num-queued`"
            )
        if request.adapter is None or request.is_taken or not self._max_adapter_wait_s:
            return None
        wait_s = self._parking.wait_s(request.adapter)
        if wait_s <= self._max_adapter_wait_s:
            return None
        return Overloaded(
            f"`{request.adapter.name}` is not on the device, and at the pace of those before it comes to its turn in "
            f"{wait_s:.0f} s; at most {self._max_adapter_wait_s:g} s may pass (`--max-adapter-wait-s`); retry later",
            param="model",
            code=WAIT_CODE,
            retry_after_s=bounded_retry_s(wait_s - self._max_adapter_wait_s),
        )

    def _refusal(self, request: Request) -> RequestError | None:
        """Why the pool can never hold this request, beside its adapter as far as its size is known."""
        num_pages = 0 if request.adapter is None else request.adapter.num_pages
        most_pages = self._cache.num_pages - self._parking.kv_floor_pages
        if request.adapter is not None and num_pages > most_pages:
            return AdapterRefused(
                f"`{request.adapter.name}` takes {num_pages} pages, and adapters can have {most_pages} of "
                f"{self._cache.num_pages}; raise `--device-memory` or lower `--kv-floor-memory`",
                param="model",
            )
        return self._length_refusal(request, max(num_pages, self._parking.adapter_floor_pages))

    def _length_refusal(self, request: Request, num_other_pages: int) -> RequestError | None:
        num_tokens = request.num_prompt_tokens + request.max_tokens
        if self._cache.fits(num_tokens, self._limits.max_tokens, num_other_pages):
            return None
        most = self._cache.max_tokens(self._limits.max_tokens, num_other_pages)
        beside = f" beside {num_other_pages} that adapters keep" if num_other_pages else ""
        return ContextLengthExceeded(
            f"{request.num_prompt_tokens} prompt tokens and `max_tokens` {request.max_tokens} make {num_tokens}; "
            f"all pages together{beside} hold {most} tokens of one sequence; lower `max_tokens`, shorten the prompt or "
            "raise `--device-memory`",
            param="max_tokens",
        )

    def take_failed(self) -> list[tuple[Request, KvartoError]]:
        """Requests whose adapter cannot be had, and why; for the loop to end."""
        return self._parking.take_failed()

    def end_request(self, request: Request) -> list[Choice]:
        """End what still runs or waits of a request, in any state. Returns the choices that this ended."""
        ended = [choice for choice in reversed(request.choices) if choice.status is not Status.FINISHED]
        for choice in ended:  # held ones first, so that no new leader is made
            self.finish(choice)
        return ended[::-1]

    # ---- deciding ----------------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """The next step; empty when nothing can run now. Each chunk's pages are there and its copies have arrived.

        The list of a step that repeats the last one a token later is the same object.
        """
        self._advance_adapters()
        if repeated := self._repeated.next():
            return repeated
        self._repeated.forget()
        self._plan.begin()
        self._pressure.begin()
        if self._retries.put_next():
            return self._plan.chunks
        crew = self._crews.next(self._roster.running, self._roster.waiting.head)
        self._schedule_running(crew)
        self._admitter.admit(crew)
        chunks = self._plan.chunks
        if self._is_settled(chunks):
            self._repeated.keep(chunks)
        return chunks

    def _advance_adapters(self) -> None:
        self._parking.advance()
        if (first := self._parking.barrier) is not None:
            while self._roster.park_last(behind=first):
                pass
        if ready := self._parking.take_pages(self._gate, self._roster.running, self._roster.waiting.head):
            self._repeated.forget()
            self._roster.unpark(ready)

    def take_starved(self) -> list[Choice]:
        """Choices that had the pool to themselves and found no page, again and again; for the loop to end."""
        return self._pressure.take_starved()

    def _schedule_running(self, crew: Request | None) -> None:
        """Drawn tokens first: they are one each and there is room for all, so no prompt can hold them up."""
        prompts = []
        for choice in tuple(self._roster.running):
            if self._crews.is_mixed and not self._crews.belongs(choice, crew):
                continue
            if choice.is_decoding:
                self._chunker.put(choice)
            else:
                prompts.append(choice)
        for choice in prompts:
            self._chunker.put(choice)

    def _is_settled(self, chunks: list[Chunk]) -> bool:
        """All that run draw a token each, and until one of them ends or a request comes that will not change: nobody
        waits, or only for a slot.
        """
        return (
            not self._num_lookup_tokens
            and len(chunks) == len(self._roster.running)
            and not self._pressure.is_on
            and not self._crews.is_mixed
            and (not self._roster.has_free_slot or not len(self._roster.waiting))
            and all(chunk.is_decode for chunk in chunks)
        )

    # ---- after a step ------------------------------------------------------------------------------------------

    def settle(self, chunk: Chunk, num_right: int = 0) -> None:
        """The chunk was computed: its tokens have their KV in pages. Of a guess the first `num_right` tokens count, and
        the choice has appended them; the rows behind them will be written anew.
        """
        choice, stop = chunk.choice, chunk.start + chunk.length - len(chunk.guess) + num_right
        choice.num_failures = 0
        if chunk.guess:
            self.num_guessed_tokens += len(chunk.guess)
            self.num_right_guesses += num_right
            choice.pause.learn(num_right)
        is_decode = chunk.length == 1 and choice.is_decoding
        token_ids = choice.output[-1:] if is_decode else choice.tokens(chunk.start, stop).tolist()
        self._cache.commit(sequence_of(choice), token_ids)
        choice.num_computed_tokens = stop
        self._queue.serve(choice.request, len(token_ids), chunk.num_drawn_rows)
        if chunk.draws and chunk.length > 1:
            self._gate.note_room()  # with a window, a prompt claims more than what follows it

    def start_fork(self, leader: Choice, fork: Choice) -> None:
        """Let `fork` go on from the prompt's pages of `leader`."""
        self._repeated.forget()
        self._roster.start_fork(leader, fork)

    def release_held(self, request: Request) -> None:
        """After the leader's first token: the choices for which there was no slot get a leader of their own, unless a
        leader that ended with that token had its successor.
        """
        self._roster.release_held(request)

    def finish(self, choice: Choice) -> None:
        """A choice ends, in any state: its slot and pages are free from now on, its request ends with the last one."""
        self._repeated.forget()
        if self._roster.finish(choice):
            self._crews.remove(choice.request)
            self._queue.remove(choice.request)

    def fail(self, chunks: list[Chunk]) -> Choice | None:
        """The step failed in the backend and nothing of it counts. All on board are tried again, each alone and on
        fewer tokens. Returns the choice that failed once too often, still running, for the loop to end.
        """
        self._repeated.forget()
        for chunk in chunks:
            self._roster.unseat_forks(chunk)
        return self._retries.fail(chunks)

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        self._roster.check()
