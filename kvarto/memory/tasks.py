"""Tasks: work for other threads. Each has a deadline, each may be cancelled, and each is reported once.

               submit           begins              work ends
    (nothing) ───────> queued ─────────> running ──────────────> done
                         │                  │ └── the work raises ──> failed
                         ├── cancel ────────┴───────────────────> cancelled      state: what its effect is worth
                         └── deadline ──────┴───────────────────> failed

`state` says what the effect is worth, and is final once it is not queued or running. `is_settled` says that no thread
touches what the task works on any more: one that is cancelled while it runs is worthless at once, but what it works on
must stay until it has let go. That belongs to whoever submitted: `poll` reports each settled task exactly once, in the
thread that calls it, and calls its `on_settled`; that is the place to take things back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvarto.core.clock import Clock
from kvarto.core.errors import TransferFailed
from kvarto.memory.executors import Executor, ThreadExecutor


class TaskState(StrEnum):
    """See the drawing above."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """One piece of work. Only its `Tasks` changes it."""

    deadline_s: float
    """On the clock of its `Tasks`."""
    on_settled: Callable[[Any], None] | None = field(default=None, repr=False)
    state: TaskState = TaskState.QUEUED
    error: str | None = None
    """Why it is not done; None while it may still be, and when it is."""
    raised: Exception | None = field(default=None, repr=False)
    """What the work raised, where that is why it failed."""
    is_settled: bool = False
    """No thread touches what it works on any more."""

    @property
    def is_final(self) -> bool:
        """The state will not change."""
        return self.state not in (TaskState.QUEUED, TaskState.RUNNING)

    @property
    def what(self) -> str:
        """For messages."""
        return "a task"

    def require_done(self) -> None:
        """Raise TransferFailed unless the work was done."""
        if self.state is not TaskState.DONE:
            raise TransferFailed(f"{self.what} is {self.state}: {self.error or 'wait'}")


AnyTask = TypeVar("AnyTask", bound=Task)


class Tasks(Generic[AnyTask]):
    """Works in the order asked for. Thread-safe, though one caller is expected to poll."""

    noun = "tasks"

    def __init__(
        self,
        perform: Callable[[AnyTask], None],
        clock: Clock,
        *,
        deadline_s: float = 30.0,
        executor: Executor | None = None,
        inject_fault: Callable[[AnyTask], None] | None = None,
    ) -> None:
        """`deadline_s` counts from submission. `inject_fault` runs before each task and may raise; for tests."""
        self._perform = perform
        self._clock = clock
        self._deadline_s = deadline_s
        self._executor = executor if executor is not None else ThreadExecutor()
        self._inject_fault = inject_fault
        self._lock = threading.Lock()
        self._in_flight: dict[AnyTask, None] = {}  # not settled yet, oldest first
        self._settled: deque[AnyTask] = deque()  # not reported yet
        self._is_closed = False

    @property
    def num_in_flight(self) -> int:
        """Tasks that a thread may still work on."""
        return len(self._in_flight)

    @property
    def num_unreported(self) -> int:
        """Tasks that `poll` has not reported, settled or not: what they work on is still kept for them."""
        with self._lock:
            return len(self._in_flight) + len(self._settled)

    @property
    def num_in_time(self) -> int:
        """Tasks that a thread may still work on, and whose deadline has not passed: of others nobody knows the end."""
        now = self._clock.now()
        with self._lock:
            return sum(task.deadline_s > now for task in self._in_flight)

    def poll(self) -> list[AnyTask]:
        """Report tasks that settled since the last call, oldest first: each once, after calling `on_settled`."""
        reported = []
        while (task := self._take_settled()) is not None:
            reported.append(task)
            if task.on_settled is not None:
                task.on_settled(task)
        return reported

    def wait(self, task: AnyTask) -> None:
        """Block until it is done. Raises TransferFailed when it failed, was cancelled, or its deadline passed.

        `poll` still has to report it.
        """
        left_s = task.deadline_s - self._clock.now()
        self._executor.wait(lambda: task.is_final, max(0.0, left_s))
        with self._lock:
            self._expire(task)
        task.require_done()

    def cancel(self, task: AnyTask) -> None:
        """Make the task worthless. Legal in every state; one that is final stays what it is."""
        with self._lock:
            self._conclude(task, TaskState.CANCELLED, "it was cancelled")

    def sweep(self) -> int:
        """Fail tasks whose deadline has passed, and say how many. For every step, with new work or without."""
        now = self._clock.now()
        with self._lock:
            overdue = [t for t in self._in_flight if not t.is_final and t.deadline_s <= now]
            for task in overdue:
                self._expire(task)
        return len(overdue)

    def close(self) -> None:
        """Cancel what is queued, wait for what runs, stop the threads, and report. Raises TransferFailed when one
        hangs beyond the deadline: what it works on must not be reused, and the arena not be closed.
        """
        with self._lock:
            self._is_closed = True
            for task in list(self._in_flight):
                if task.state is TaskState.QUEUED:
                    self._conclude(task, TaskState.CANCELLED, "the engine was closed")
        has_ended = self._executor.close(self._deadline_s)
        self.poll()
        if not has_ended:
            raise TransferFailed(f"{self.num_in_flight} {self.noun} still run {self._deadline_s} s after close")

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        with self._lock:
            for task in self._in_flight:
                assert not task.is_settled, f"{task} is settled and in flight"
                assert task.state is not TaskState.DONE, f"{task} is done and in flight"
            for task in self._settled:
                assert task.is_settled, f"{task} is to be reported before it is settled"
                assert task.is_final, f"{task} is settled in a state that may change"

    def begin(self, task: AnyTask) -> bool:
        """Claim a task; called by the executor."""
        with self._lock:
            if task.state is not TaskState.QUEUED:
                return False
            task.state = TaskState.RUNNING
            return True

    def finish(self, task: AnyTask) -> None:
        """Work and settle; called by the executor after `begin`."""
        error = self._run(task)
        with self._lock:
            if not task.is_final:  # else a cancel or the deadline came first, and stands
                task.state = TaskState.DONE if error is None else TaskState.FAILED
                task.raised = error
                task.error = None if error is None else f"{type(error).__name__}: {error}"
            self._settle(task)

    def _submit(self, task: AnyTask) -> AnyTask:
        with self._lock:
            if self._is_closed:
                raise TransferFailed(f"{task.what} was asked for after close")
            self._in_flight[task] = None
        self._executor.start(_Job(self, task))
        return task

    def _deadline(self) -> float:
        return self._clock.now() + self._deadline_s

    def _run(self, task: AnyTask) -> Exception | None:
        """The work itself; returns what went wrong. It may raise anything, and must not kill the thread."""
        try:
            if self._inject_fault is not None:
                self._inject_fault(task)
            self._perform(task)
        except Exception as error:
            return error
        return None

    def _expire(self, task: AnyTask) -> None:
        self._conclude(task, TaskState.FAILED, f"its deadline of {self._deadline_s} s has passed")

    def _conclude(self, task: AnyTask, state: TaskState, error: str) -> None:
        """End a task that is not done, under the lock. A running one settles only when it returns."""
        if task.is_final:
            return
        has_begun = task.state is TaskState.RUNNING
        task.state = state
        task.error = error
        if not has_begun:
            self._settle(task)

    def _settle(self, task: AnyTask) -> None:
        task.is_settled = True
        del self._in_flight[task]
        self._settled.append(task)

    def _take_settled(self) -> AnyTask | None:
        with self._lock:
            return self._settled.popleft() if self._settled else None


@dataclass(frozen=True, slots=True)
class _Job(Generic[AnyTask]):
    """A task as the executor sees it."""

    tasks: Tasks[AnyTask]
    task: AnyTask

    def begin(self) -> bool:
        return self.tasks.begin(self.task)

    def finish(self) -> None:
        self.tasks.finish(self.task)
