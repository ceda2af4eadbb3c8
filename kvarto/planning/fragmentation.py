"""How much of a budget holds KV, and how much is lost, when a trace is replayed under one way to allocate.

Time is counted in steps: every running request gains one token per step, whatever its prompt; requests start in order
of arrival and the first that does not fit makes the others wait. In its step t = 0 … G - 1 a request holds
P + t tokens (P prompt, G output tokens; the last token's KV is never written). When a request can't grow, the one that
started last gives everything back and waits at the head, to be computed again.

At each step, in bytes:    budget = used + internal + external + cached + idle

    used      tokens                                  internal  held by a request, with no token in it
    external  free, enough for the next request, but not in one piece
    cached    prompts of the past                     idle      free, and too little for the next, or nothing waits

Sources: Kwon et al., PagedAttention, SOSP 2023, section 4 names the kinds of waste.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvarto.planning.allocation_policies import AllocationPolicy
from kvarto.planning.traces import Trace


@dataclass(slots=True)
class Tally:
    """Sums over steps. Bytes are byte-steps."""

    num_steps: int = 0
    running: int = 0
    used_bytes: int = 0
    internal_bytes: int = 0
    external_bytes: int = 0
    cached_bytes: int = 0

    def fraction(self, byte_steps: int, budget_bytes: int) -> float:
        """Share of the budget, on average over the steps."""
        return byte_steps / (budget_bytes * self.num_steps) if self.num_steps else 0.0


@dataclass(slots=True)
class ReplayResult:
    """What a replay saw. `crowded` counts only the steps in which a request waited for memory."""

    name: str
    num_served: int = 0
    num_refused: int = 0
    """Could never run: longer than the reserved length, or than the budget."""
    whole: Tally = field(default_factory=Tally)
    crowded: Tally = field(default_factory=Tally)
    peak_running: int = 0
    peak_table_bytes: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Tokens whose KV was computed a second time."""

    @property
    def mean_running(self) -> float:
        """Concurrent requests while others waited for memory; over the whole replay when nobody ever did."""
        tally = self.crowded if self.crowded.num_steps else self.whole
        return tally.running / tally.num_steps if tally.num_steps else 0.0

    @property
    def waste_fraction(self) -> float:
        """Share of the held bytes without a token, over every request's whole life."""
        held = self.whole.used_bytes + self.whole.internal_bytes
        return self.whole.internal_bytes / held if held else 0.0


def expected_waste_fraction(trace: Trace, page_size: int) -> float:
    """What `waste_fraction` must be for pages: unused slots of last pages over held slots, in closed form."""
    first = trace.num_prompt_tokens
    last = first + trace.num_output_tokens  # half-open
    wasted = int((_unused_slots(last, page_size) - _unused_slots(first, page_size)).sum())
    used = int(((last * (last - 1) - first * (first - 1)) // 2).sum())
    return wasted / (wasted + used)


def _unused_slots(stop: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """Sum over n in [0, stop) of the slots that n tokens leave unused in their last page."""
    cycles, rest = np.divmod(np.maximum(stop - 1, 0), page_size)
    partial = rest * (2 * page_size - rest - 1) // 2
    return np.asarray(cycles * (page_size * (page_size - 1) // 2) + partial)


def saturating_rate_scale(trace: Trace, budget_bytes: int, token_bytes: int, step_s: float, load: float = 2.0) -> float:
    """How much faster than recorded requests must come to ask for `load` times the budget, without any waste."""
    tokens = trace.num_output_tokens * (2 * trace.num_prompt_tokens + trace.num_output_tokens - 1) // 2
    byte_steps = int(tokens.sum()) * token_bytes
    available = budget_bytes * max(trace.duration_s, step_s) / step_s
    return float(load * available / byte_steps)


class Replay:
    """One trace under one policy. `arrival_step` says in which step each request comes."""

    def __init__(self, trace: Trace, policy: AllocationPolicy, budget_bytes: int, token_bytes: int,
                 arrival_step: NDArray[np.int64]) -> None:  # fmt: skip
        self._policy = policy
        self._budget_bytes = budget_bytes
        self._token_bytes = token_bytes
        self._arrival_step = arrival_step
        self._max_tokens = trace.num_prompt_tokens + trace.num_output_tokens - 1
        self._num_tokens = trace.num_prompt_tokens.copy()
        self._room_tokens = np.zeros(len(trace), dtype=np.int64)
        self._running = np.empty(0, dtype=np.int64)
        """In order of their start."""
        self._waiting: deque[int] = deque()
        self._num_arrived = 0
        self._preempted: set[int] = set()
        self._step = 0
        self._is_head_blocked = False
        self.result = ReplayResult(policy.name)

    def run(self) -> ReplayResult:
        """Replay to the end."""
        while self._num_arrived < len(self._arrival_step) or self._waiting or len(self._running):
            self._arrive()
            self._admit()
            self._advance(self._quiet_steps())
            self._finish()
            self._grow()
        return self.result

    def _arrive(self) -> None:
        if not len(self._running) and not self._waiting:
            self._step = max(self._step, int(self._arrival_step[self._num_arrived]))
        arrived = int(np.searchsorted(self._arrival_step, self._step, side="right"))
        for request in range(self._num_arrived, arrived):
            if self._policy.can_serve(request, int(self._max_tokens[request])):
                self._waiting.append(request)
            else:
                self.result.num_refused += 1
        self._num_arrived = arrived

    def _admit(self) -> None:
        started: list[int] = []
        while self._waiting and not self._is_head_blocked:
            request = self._waiting[0]
            is_alone = not len(self._running) and not started
            num_tokens, max_tokens = int(self._num_tokens[request]), int(self._max_tokens[request])
            room = self._policy.admit(request, num_tokens, max_tokens, is_alone=is_alone)
            if room is None:
                assert not is_alone, "a request that can be served did not fit into an empty budget"
                self._is_head_blocked = True
                break
            self._room_tokens[request] = room
            started.append(self._waiting.popleft())
            if request in self._preempted:
                self.result.num_recomputed_tokens += num_tokens
        if started:
            self._running = np.concatenate([self._running, np.array(started, dtype=np.int64)])
            self.result.peak_running = max(self.result.peak_running, len(self._running))

    def _quiet_steps(self) -> int:
        """Steps until a request ends, needs room, or comes and could start; none of them changes who holds what."""
        if not len(self._running):
            return 0
        num_tokens = self._num_tokens[self._running]
        last = np.minimum(self._room_tokens[self._running], self._max_tokens[self._running])
        steps = int((last - num_tokens).min()) + 1
        if not self._is_head_blocked and self._num_arrived < len(self._arrival_step):
            steps = min(steps, int(self._arrival_step[self._num_arrived]) - self._step)
        return steps

    def _advance(self, num_steps: int) -> None:
        count = len(self._running)
        if not num_steps:
            return
        held_tokens = num_steps * int(self._num_tokens[self._running].sum()) + count * num_steps * (num_steps - 1) // 2
        self._tally(self.result.whole, num_steps, held_tokens)
        if self._is_head_blocked:
            self._tally(self.result.crowded, num_steps, held_tokens)
        self.result.peak_table_bytes = max(self.result.peak_table_bytes, self._policy.table_bytes)
        self._num_tokens[self._running] += num_steps
        self._step += num_steps

    def _tally(self, tally: Tally, num_steps: int, token_steps: int) -> None:
        used = token_steps * self._token_bytes - self._policy.saved_bytes * num_steps
        tally.num_steps += num_steps
        tally.running += len(self._running) * num_steps
        tally.used_bytes += used
        tally.internal_bytes += self._policy.held_bytes * num_steps - used
        tally.cached_bytes += self._policy.cached_bytes * num_steps
        if self._is_head_blocked:
            head = self._waiting[0]
            if self._policy.is_fragmented_for(head, int(self._num_tokens[head]), int(self._max_tokens[head])):
                tally.external_bytes += self._policy.free_bytes * num_steps

    def _finish(self) -> None:
        is_done = self._num_tokens[self._running] > self._max_tokens[self._running]
        for request in self._running[is_done].tolist():
            self._policy.release(request)
        self._running = self._running[~is_done]
        if is_done.any():
            self.result.num_served += int(is_done.sum())
            self._is_head_blocked = False

    def _grow(self) -> None:
        """Room for the next token of each that is full; whoever started last makes way."""
        while True:
            full = self._running[self._num_tokens[self._running] > self._room_tokens[self._running]]
            if not len(full):
                return
            grown = full[: self._policy.grow(full.tolist())]
            self._room_tokens[grown] += self._policy.growth_tokens
            if len(grown) < len(full):
                self._preempt(int(self._running[-1]))

    def _preempt(self, request: int) -> None:
        self._policy.release(request)
        self._running = self._running[:-1]
        self._waiting.appendleft(request)
        self._preempted.add(request)
        self.result.num_preemptions += 1
        self._is_head_blocked = False
