"""Transfers: asynchronous copies of pages. Each has a deadline, each may be cancelled, and each is reported once.

               submit           begins              copy ends
    (nothing) ───────> queued ─────────> running ──────────────> done
                         │                  │ └── the copy raises ──> failed
                         ├── cancel ────────┴───────────────────> cancelled      state: what its target is worth
                         └── deadline ──────┴───────────────────> failed

`state` says what the target is worth, and is final once it is not queued or running. `is_settled` says that no thread
touches the two pages any more: a copy that is cancelled while it runs is worthless at once, but its pages must stay
pinned until the copy has let go of them. Pages belong to whoever submitted: `poll` reports each settled transfer
exactly once, in the thread that calls it, and calls its `on_settled`; that is the place to unpin.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvarto.core.clock import Clock
from kvarto.core.errors import TransferFailed
from kvarto.memory.executors import Executor, ThreadExecutor

CopyPage = Callable[[int, int], None]
"""Copies a whole page: (source, target)."""


class TransferState(StrEnum):
    """See the drawing above."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy of a page. Only `Transfers` changes it."""

    source: int
    target: int
    deadline_s: float
    """On the clock of its `Transfers`."""
    on_settled: Callable[[Transfer], None] | None = field(default=None, repr=False)
    state: TransferState = TransferState.QUEUED
    error: str | None = None
    """Why it is not done; None while it may still be, and when it is."""
    is_settled: bool = False
    """No thread touches its pages any more."""

    @property
    def is_final(self) -> bool:
        """The state will not change."""
        return self.state not in (TransferState.QUEUED, TransferState.RUNNING)

    def require_done(self) -> None:
        """Raise TransferFailed unless the target holds the source's bytes."""
        if self.state is not TransferState.DONE:
            raise TransferFailed(f"copy of page {self.source} to {self.target} is {self.state}: {self.error or 'wait'}")


class Transfers:
    """Copies pages in the order asked for. Thread-safe, though one caller is expected to poll."""

    def __init__(
        self,
        copy: CopyPage,
        clock: Clock,
        *,
        deadline_s: float = 30.0,
        executor: Executor | None = None,
        inject_fault: Callable[[Transfer], None] | None = None,
    ) -> None:
        """`deadline_s` counts from submission. `inject_fault` runs before each copy and may raise; for tests."""
        self._copy = copy
        self._clock = clock
        self._deadline_s = deadline_s
        self._executor = executor if executor is not None else ThreadExecutor()
        self._inject_fault = inject_fault
        self._lock = threading.Lock()
        self._in_flight: dict[Transfer, None] = {}  # not settled yet, oldest first
        self._settled: deque[Transfer] = deque()  # not reported yet
        self._is_closed = False

    @property
    def num_in_flight(self) -> int:
        """Transfers whose pages a thread may still touch."""
        return len(self._in_flight)

    @property
    def num_unreported(self) -> int:
        """Transfers that `poll` has not reported, settled or not: their pages are still pinned by their owners."""
        with self._lock:
            return len(self._in_flight) + len(self._settled)

    def submit(self, source: int, target: int, on_settled: Callable[[Transfer], None] | None = None) -> Transfer:
        """Queue a copy of page `source` into page `target`; the caller keeps both pinned until it is reported."""
        transfer = Transfer(source, target, self._clock.now() + self._deadline_s, on_settled)
        with self._lock:
            if self._is_closed:
                raise TransferFailed(f"copy of page {source} to {target} was asked for after close")
            self._in_flight[transfer] = None
        self._executor.start(_Copy(self, transfer))
        return transfer

    def poll(self) -> list[Transfer]:
        """Report transfers that settled since the last call, oldest first: each once, after calling `on_settled`."""
        reported = []
        while (transfer := self._take_settled()) is not None:
            reported.append(transfer)
            if transfer.on_settled is not None:
                transfer.on_settled(transfer)
        return reported

    def wait(self, transfer: Transfer) -> None:
        """Block until the copy is done. Raises TransferFailed when it failed, was cancelled, or its deadline passed.

        `poll` still has to report it.
        """
        left_s = transfer.deadline_s - self._clock.now()
        self._executor.wait(lambda: transfer.is_final, max(0.0, left_s))
        with self._lock:
            self._expire(transfer)
        transfer.require_done()

    def cancel(self, transfer: Transfer) -> None:
        """Make the transfer worthless. Legal in every state; a transfer that is final stays what it is."""
        with self._lock:
            self._conclude(transfer, TransferState.CANCELLED, "it was cancelled")

    def sweep(self) -> int:
        """Fail transfers whose deadline has passed, and say how many. For every step, with new work or without."""
        now = self._clock.now()
        with self._lock:
            overdue = [t for t in self._in_flight if not t.is_final and t.deadline_s <= now]
            for transfer in overdue:
                self._expire(transfer)
        return len(overdue)

    def close(self) -> None:
        """Cancel what is queued, wait for the copy that runs, stop the thread, and report. Raises TransferFailed
        when a copy hangs beyond the deadline: its pages must not be reused, and the arena not be closed.
        """
        with self._lock:
            self._is_closed = True
            for transfer in list(self._in_flight):
                if transfer.state is TransferState.QUEUED:
                    self._conclude(transfer, TransferState.CANCELLED, "the transfers were closed")
        has_ended = self._executor.close(self._deadline_s)
        self.poll()
        if not has_ended:
            raise TransferFailed(f"{self.num_in_flight} copies still run {self._deadline_s} s after close")

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        with self._lock:
            for transfer in self._in_flight:
                assert not transfer.is_settled, f"{transfer} is settled and in flight"
                assert transfer.state is not TransferState.DONE, f"{transfer} is done and in flight"
            for transfer in self._settled:
                assert transfer.is_settled, f"{transfer} is to be reported before it is settled"
                assert transfer.is_final, f"{transfer} is settled in a state that may change"

    def begin(self, transfer: Transfer) -> bool:
        """Claim a transfer for copying; called by the executor."""
        with self._lock:
            if transfer.state is not TransferState.QUEUED:
                return False
            transfer.state = TransferState.RUNNING
            return True

    def finish(self, transfer: Transfer) -> None:
        """Copy and settle; called by the executor after `begin`."""
        error = self._run(transfer)
        with self._lock:
            if not transfer.is_final:  # else a cancel or the deadline came first, and stands
                transfer.state = TransferState.DONE if error is None else TransferState.FAILED
                transfer.error = error
            self._settle(transfer)

    def _run(self, transfer: Transfer) -> str | None:
        """The copy itself; returns what went wrong. A backend may raise anything, and no copy may kill the thread."""
        try:
            if self._inject_fault is not None:
                self._inject_fault(transfer)
            self._copy(transfer.source, transfer.target)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _expire(self, transfer: Transfer) -> None:
        self._conclude(transfer, TransferState.FAILED, f"its deadline of {self._deadline_s} s has passed")

    def _conclude(self, transfer: Transfer, state: TransferState, error: str) -> None:
        """End a transfer that is not done, under the lock. A running copy settles only when it returns."""
        if transfer.is_final:
            return
        has_begun = transfer.state is TransferState.RUNNING
        transfer.state = state
        transfer.error = error
        if not has_begun:
            self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        transfer.is_settled = True
        del self._in_flight[transfer]
        self._settled.append(transfer)

    def _take_settled(self) -> Transfer | None:
        with self._lock:
            return self._settled.popleft() if self._settled else None


@dataclass(frozen=True, slots=True)
class _Copy:
    """A transfer as the executor sees it."""

    transfers: Transfers
    transfer: Transfer

    def begin(self) -> bool:
        return self.transfers.begin(self.transfer)

    def finish(self) -> None:
        self.transfers.finish(self.transfer)
