"""Scheduler: which tokens of which choices go into the next step. No phases: a step is a list of chunks.

Each step: drawn tokens first (one each), then prompts in order within what is left of the token budget, then new
choices from the queue while slots and pages allow. Under page pressure the last in order gives way and is recomputed
later, so the first in order always runs on. What this knows of the cache is open, grow, fork, commit and close.

Laws, see `check`: a slot has one owner; whoever runs is in order; the first in order is preempted by nobody.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarto.core.buffers import StepLimits
from kvarto.core.errors import ContextLengthExceeded, OutOfPages, Overloaded, TransferFailed
from kvarto.engine.admission import AdmissionGate
from kvarto.engine.chunk import Chunk
from kvarto.engine.crews import Crews
from kvarto.engine.lookup import guess_next
from kvarto.engine.request import Choice, Request, Status
from kvarto.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache
    from kvarto.cache.sequence import Sequence

MAX_MISSES = 16
"""Tries of a choice that has the pool to itself and still finds no page, before it ends with an error."""

MAX_FAILURES = 3
"""Failed steps in a row, the last ones alone, after which a choice is to blame: devices also fail for a moment."""


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
    ) -> None:
        """`has_copies` says whether copies are in flight, whose end may free pages. `num_lookup_tokens`: see
        `EngineConfig.prompt_lookup_num_tokens`.
        """
        self.requests: dict[str, Request] = {}
        """Requests that have not ended, by id."""
        self.num_preemptions = 0
        self.num_guessed_tokens = 0
        self.num_right_guesses = 0
        self._num_lookup_tokens = num_lookup_tokens
        self._cache = cache
        self._limits = limits
        self._max_num_queued = max_num_queued
        self._has_copies = has_copies
        self._num_unadmitted = 0
        self._waiting = WaitingQueue()
        self._running: list[Choice] = []
        self._free_slots = list(range(limits.max_seqs - 1, -1, -1))
        self._crews = Crews()
        self._gate = AdmissionGate(cache, limits.max_tokens)
        self._suspects: deque[Choice] = deque()
        self._plan: dict[Choice, Chunk] = {}
        self._decodes: list[Chunk] = []
        """The last plan, while the next one can only be the same a token later: see `_repeat`."""
        self._tokens_left = 0
        self._prompt_rows_left = 0
        self._is_pressed = False
        self._starved: list[Choice] = []

    # ---- what comes from outside -------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Choices with a slot."""
        return self._limits.max_seqs - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Choices without a slot, those that wait for their leader included."""
        return len(self._waiting) + sum(len(request.held) for request in self.requests.values() if request.held)

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded, and ContextLengthExceeded for what the pool can never hold."""
        num_tokens = request.num_prompt_tokens + request.max_tokens
        most = self._cache.max_tokens(self._limits.max_tokens)
        if num_tokens > most:
            raise ContextLengthExceeded(
                f"{request.num_prompt_tokens} prompt tokens and `max_tokens` {request.max_tokens} make {num_tokens}; "
                f"all pages together hold {most} tokens of one sequence; lower `max_tokens`, shorten the prompt or "
                "raise `--device-memory`",
                param="max_tokens",
            )
        if self._num_unadmitted >= self._max_num_queued:
            raise Overloaded(
                f"{self._num_unadmitted} requests wait and the queue holds {self._max_num_queued}; retry later or "
                "raise `--max-num-queued`"
            )
        self._decodes = []
        self.requests[request.request_id] = request
        self._num_unadmitted += 1
        self._crews.add(request)
        request.held = [choice for choice in request.choices if not choice.output]
        for choice in request.choices:
            if choice.output:
                self._waiting.push(choice)
        self._promote(request)

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
        if self._decodes and self._repeat():
            return self._decodes
        self._decodes = []
        self._plan = {}
        self._tokens_left = self._limits.max_tokens
        self._prompt_rows_left = self._limits.max_samples - self._limits.max_seqs
        self._is_pressed = False
        if self._schedule_suspect():
            return list(self._plan.values())
        crew = self._crews.next(self._running, self._waiting.head)
        self._schedule_running(crew)
        self._admit(crew)
        chunks = list(self._plan.values())
        if self._is_settled(chunks):
            self._decodes = chunks
        return chunks

    def _is_settled(self, chunks: list[Chunk]) -> bool:
        """All that run draw a token each, and until one of them ends or a request comes that will not change: nobody
        waits, or only for a slot.
        """
        return (
            not self._num_lookup_tokens
            and len(chunks) == len(self._running)
            and not self._is_pressed
            and not self._crews.is_mixed
            and (not self._free_slots or not len(self._waiting))
            and all(chunk.is_decode for chunk in chunks)
        )

    def _repeat(self) -> bool:
        """Move the last plan on by a token. False where a page is missing or a copy has to be waited for."""
        first = self._decodes[0]
        if first.choice.num_computed_tokens != first.start + 1:  # the last plan did not run
            return False
        for chunk in self._decodes:
            sequence = _sequence(chunk.choice)
            num_tokens = chunk.start + 2
            if num_tokens > sequence.num_writable_tokens:
                try:
                    self._cache.grow(sequence, num_tokens)
                except OutOfPages:
                    return False
                if sequence.copies:
                    return False
        for chunk in self._decodes:
            chunk.start += 1
        return True

    def take_starved(self) -> list[Choice]:
        """Choices that had the pool to themselves and found no page, again and again; for the loop to end."""
        starved, self._starved = self._starved, []
        return starved

    def _schedule_running(self, crew: Request | None) -> None:
        """Drawn tokens first: they are one each and there is room for all, so no prompt can hold them up."""
        prompts = []
        for choice in tuple(self._running):
            if self._crews.is_mixed and not self._crews.belongs(choice, crew):
                continue
            if choice.is_decoding:
                self._schedule_chunk(choice)
            else:
                prompts.append(choice)
        for choice in prompts:
            self._schedule_chunk(choice)

    def _schedule_chunk(self, choice: Choice) -> None:
        """Put as much of the choice into the step as fits; nothing when it has to give way or wait."""
        if choice.status is not Status.RUNNING or self._tokens_left == 0:
            return
        length, num_prompt_rows = self._fitting(choice)
        if length == 0 or not self._grow(choice, choice.num_computed_tokens + length) or not self._is_ready(choice):
            return
        choice.num_misses = 0
        draws = choice.num_computed_tokens + length == choice.num_tokens
        forks = self._seat_forks(choice) if draws and choice.request.held and not choice.output else []
        guess = self._guess(choice) if self._num_lookup_tokens and choice.is_decoding else ()
        length += len(guess)
        self._plan[choice] = Chunk(choice, choice.num_computed_tokens, length, draws, forks, num_prompt_rows, guess)
        self._tokens_left -= length
        self._prompt_rows_left -= num_prompt_rows + len(guess)

    def _guess(self, choice: Choice) -> tuple[int, ...]:
        """Tokens to verify beside the one that is drawn: as many as there are rows, pages and tokens to come, none at
        another's cost. None where what is drawn depends on more than the logits of its row.
        """
        request, sequence = choice.request, _sequence(choice)
        if choice.seen is not None or len(choice.output) < request.sampling.min_tokens or not choice.pause.is_over():
            return ()
        num_missing = request.num_prompt_tokens + request.max_tokens - choice.num_tokens
        # One token of the step is the drawn one's own, and the last to come needs no successor.
        count = min(self._num_lookup_tokens, self._prompt_rows_left, self._tokens_left - 1, num_missing - 1)
        guess = guess_next(sequence.tokens, choice.output[-1], count) if count > 0 else ()
        if guess:
            try:
                self._cache.grow(sequence, choice.num_tokens + len(guess))
            except OutOfPages:
                return ()
        return guess

    def _fitting(self, choice: Choice) -> tuple[int, int]:
        """Tokens, and prompt rows among them, that fit into what is left of the step."""
        length = min(choice.num_tokens - choice.num_computed_tokens, self._tokens_left)
        request = choice.request
        if request.collector is not choice:
            return length, 0
        # The prompt's last row draws and asks nothing, so it needs no row of the prompt's share.
        last = request.num_prompt_tokens - 1
        num_rows = min(choice.num_computed_tokens + length, last) - choice.num_computed_tokens
        if num_rows <= self._prompt_rows_left:
            return length, num_rows
        return self._prompt_rows_left, self._prompt_rows_left

    def _grow(self, choice: Choice, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, taken from whoever is later in order if need be."""
        while True:
            try:
                self._cache.grow(_sequence(choice), num_tokens)
                return True
            except OutOfPages:
                last = self._running[-1]
                if last is not choice:
                    self._preempt(last)
                elif len(self._running) > 1:
                    self._preempt(choice)
                    return False
                else:
                    self._count_miss(choice)
                    return False

    def _count_miss(self, choice: Choice) -> None:
        """Nobody is left to give way. Copies in flight may still return pages; otherwise patience is limited."""
        if self._has_copies():
            return
        choice.num_misses += 1
        if choice.num_misses >= MAX_MISSES:
            self._starved.append(choice)

    def _is_ready(self, choice: Choice) -> bool:
        try:
            return self._cache.is_ready(_sequence(choice))
        except TransferFailed:
            choice.distrusts_cache = True
            self._requeue(choice)
            return False

    def _seat_forks(self, leader: Choice) -> list[Choice]:
        """Slots for as many of the choices that wait for `leader` as there are."""
        held = leader.request.held
        count = min(len(held), len(self._free_slots))
        forks, leader.request.held = held[:count], held[count:]
        for choice in forks:
            self._take_slot(choice)
        return forks

    # ---- admission ---------------------------------------------------------------------------------------------

    def _admit(self, crew: Request | None) -> None:
        """Take choices from the queue, in order: whoever comes first and cannot run yet keeps the others waiting."""
        while self._tokens_left and not self._is_pressed and (choice := self._waiting.head) is not None:
            if self._crews.is_mixed and not self._crews.belongs(choice, crew):
                return
            if not (self._free_slots and self._try_admit(choice)) and not self._preempt_for(choice):
                return

    def _try_admit(self, choice: Choice) -> bool:
        """Open a sequence on what the prefix cache has, and run when the rest will fit beside those that run."""
        if not self._gate.may_try(choice, self._running):
            return False
        sequence = self._open(choice)
        if sequence is None:
            return False
        if self._running and not self._has_room(choice, sequence):
            self._cache.close(sequence)
            return False
        self._waiting.remove(choice, Status.RUNNING)
        self._take_slot(choice)
        choice.sequence = sequence
        choice.num_computed_tokens = sequence.num_computed_tokens
        insort(self._running, choice, key=_order)
        self._note_admission(choice, sequence)
        self._schedule_chunk(choice)
        return True

    def _has_room(self, choice: Choice, sequence: Sequence) -> bool:
        """Beside those that run, now and for a while. Takes the pages of the first chunk, so that nobody is admitted
        on pages that count as available but cannot be had yet, because a copy still reads them.
        """
        if not self._gate.admits(choice, sequence, self._running):
            return False
        num_cached = sequence.num_computed_tokens
        try:
            self._cache.grow(sequence, min(choice.num_tokens, num_cached + self._tokens_left))
            return True
        except OutOfPages:
            self._gate.refuse(choice, missing=1)
            return False

    def _open(self, choice: Choice) -> Sequence | None:
        request = choice.request
        use_prefix = not choice.distrusts_cache and request.collector is not choice
        try:
            return self._cache.open(choice.known_tokens, salt=request.salt, use_prefix=use_prefix)
        except OutOfPages:
            if not self._running:
                self._count_miss(choice)
            return None

    def _note_admission(self, choice: Choice, sequence: Sequence) -> None:
        request = choice.request
        if request.collector is choice:
            request.prompt_logprobs.clear()
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = min(sequence.num_cached_tokens, request.num_prompt_tokens)
            self._num_unadmitted -= 1

    def _preempt_for(self, choice: Choice) -> bool:
        """Make room for a choice of a better priority than the last one that runs."""
        if not self._running or self._running[-1].order[0] <= choice.order[0]:
            return False
        self._requeue(self._running[-1])
        self.num_preemptions += 1
        return True

    # ---- giving way --------------------------------------------------------------------------------------------

    def _preempt(self, choice: Choice) -> None:
        """Take all pages of a choice; it waits at its old place and recomputes. Nobody is admitted in this step."""
        self._is_pressed = True
        self.num_preemptions += 1
        choice.num_preemptions += 1
        self._requeue(choice)
        # Its own pages are no reason to try it again: what counts as available may be held up by a copy for a while.
        self._gate.refuse(choice, missing=1)

    def _requeue(self, choice: Choice) -> None:
        self._unplan(choice)
        self._stop_running(choice)
        self._waiting.push(choice)

    def _unplan(self, choice: Choice) -> None:
        """Take the choice, and those that would fork from it, out of the step that is being made."""
        chunk = self._plan.pop(choice, None)
        if chunk is not None:
            self._tokens_left += chunk.length
            self._prompt_rows_left += chunk.num_prompt_rows + len(chunk.guess)
            self._unseat_forks(chunk)

    def _unseat_forks(self, chunk: Chunk) -> None:
        for fork in chunk.forks:
            self._free_slots.append(fork.slot)
            fork.status = Status.HELD
        request = chunk.choice.request
        request.held = sorted([*chunk.forks, *request.held], key=_order)
        chunk.forks = []

    def _take_slot(self, choice: Choice) -> None:
        choice.slot = self._free_slots.pop()
        choice.status = Status.RUNNING
        choice.prepare()

    def _stop_running(self, choice: Choice) -> None:
        """Give back slot and pages."""
        self._free_slots.append(choice.slot)
        choice.num_computed_tokens = 0
        if choice.sequence is not None:  # a fork that ends with its first token has none
            del self._running[bisect_left(self._running, choice.order, key=_order)]
            self._cache.close(choice.sequence)
            choice.sequence = None
        self._gate.note_room()

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
        self._cache.commit(_sequence(choice), token_ids)
        choice.num_computed_tokens = stop
        if chunk.draws and chunk.length > 1:
            self._gate.note_room()  # with a window, a prompt claims more than what follows it

    def start_fork(self, leader: Choice, fork: Choice) -> None:
        """Let `fork` go on from the prompt's pages of `leader`."""
        self._decodes = []
        fork.sequence = self._cache.fork(_sequence(leader))
        fork.num_computed_tokens = leader.num_computed_tokens
        insort(self._running, fork, key=_order)

    def release_held(self, request: Request) -> None:
        """After the leader's first token: the choices for which there was no slot get a leader of their own."""
        if not any(map(_may_lead, request.choices)):  # else a leader that ended with that token had its successor
            self._promote(request)

    def finish(self, choice: Choice) -> None:
        """A choice ends, in any state: its slot and pages are free from now on, its request ends with the last one."""
        self._decodes = []
        request = choice.request
        if choice.status is Status.RUNNING:
            self._stop_running(choice)
        elif choice.status is Status.WAITING:
            self._waiting.remove(choice, Status.FINISHED)
        else:
            request.held.remove(choice)
        choice.status = Status.FINISHED
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._forget(request)
        elif request.held and not any(_may_lead(other) for other in request.choices):
            self._promote(request)

    def fail(self, chunks: list[Chunk]) -> Choice | None:
        """The step failed in the backend and nothing of it counts. All on board are tried again, each alone and on
        fewer tokens. Returns the choice that failed once too often, still running, for the loop to end.
        """
        self._decodes = []
        for chunk in chunks:
            self._unseat_forks(chunk)
            chunk.choice.num_failures += 1
        if len(chunks) == 1 and chunks[0].choice.num_failures >= MAX_FAILURES:
            return chunks[0].choice
        self._suspects.extend(chunk.choice for chunk in chunks)
        return None

    def _schedule_suspect(self) -> bool:
        """After a failed step: one of those on board, alone. False when none is left to try."""
        while self._suspects:
            choice = self._suspects[0]
            if choice.status is Status.RUNNING and choice.num_failures:
                self._tokens_left = max(1, min(self._tokens_left, choice.num_tokens - choice.num_computed_tokens) // 2)
                self._schedule_chunk(choice)
                if choice.status is Status.RUNNING:
                    return True
            self._suspects.popleft()
        return False

    def _promote(self, request: Request) -> None:
        """Queue the first held choice; the others wait for it to compute the prompt."""
        if request.held:
            leader, *request.held = request.held
            if request.collector is not None:
                request.collector = leader
            self._waiting.push(leader)

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._crews.remove(request)
        if not request.was_admitted:
            self._num_unadmitted -= 1

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        self._waiting.check()
        assert self._running == sorted(self._running, key=_order), "running choices are out of order"
        slots = [choice.slot for choice in self._running] + self._free_slots
        assert sorted(slots) == list(range(self._limits.max_seqs)), f"slots {sorted(slots)} are not each owned once"
        choices = [choice for request in self.requests.values() for choice in request.choices]
        unfinished = [choice for choice in choices if choice.status is not Status.FINISHED]
        held = sum(len(request.held) for request in self.requests.values())
        assert len(unfinished) == len(self._running) + len(self._waiting) + held, "a choice is nowhere, or twice"
        for request in self.requests.values():
            assert not request.held or any(map(_may_lead, request.choices)), f"{request.request_id} waits for nobody"


def _order(choice: Choice) -> tuple[int, int, int]:
    return choice.order


def _sequence(choice: Choice) -> Sequence:
    assert choice.sequence is not None, f"choice {choice.order} runs without a sequence"
    return choice.sequence


def _may_lead(choice: Choice) -> bool:
    return not choice.output and choice.status in (Status.WAITING, Status.RUNNING)
