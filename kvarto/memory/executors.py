"""Who runs copies and reads: threads, or a simulator's virtual time. Knows neither pages nor what a copy means.

A job is begun (it may turn out to be cancelled) and then finished. Between the two it is running: the thread passes
through at once, virtual time can stop there, so that a simulation reaches every state without a thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvarto.core.clock import VirtualClock


class Job(Protocol):
    """One copy."""

    def begin(self) -> bool:
        """Claim it; False when there is nothing to do any more."""
        ...

    def finish(self) -> None:
        """Copy and settle; raises nothing."""
        ...


class Executor(Protocol):
    """Runs jobs in the order in which they were given."""

    def start(self, job: Job) -> None:
        """Take a job; returns at once."""
        ...

    def wait(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Block until `is_met`, which only finished jobs change, or for `timeout_s`. Returns `is_met()`."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Finish what was taken and stop. False when that takes longer than `timeout_s`."""
        ...


class ThreadExecutor:
    """A few threads, started as jobs come. With one thread, a job begins when the one before it has ended."""

    def __init__(self, name: str = "kvarto-copies", num_threads: int = 1, niceness: int = 0) -> None:
        """`niceness`: how far these threads stand behind others of the process for a core, 0 to 19; on Linux."""
        self._name = name
        self._niceness = niceness
        self._num_threads = num_threads
        self._jobs: deque[Job] = deque()
        lock = threading.Lock()
        self._has_jobs = threading.Condition(lock)
        """One thread wakes for a job; another that woke in vain would take the interpreter's lock from who computes."""
        self._has_ended = threading.Condition(lock)
        self._is_closing = False
        self._threads: list[threading.Thread] = []
        self._num_idle = 0

    def start(self, job: Job) -> None:
        """Queue a job."""
        with self._has_jobs:
            assert not self._is_closing, "a job was started after close"
            self._jobs.append(job)
            if len(self._threads) < self._num_threads and self._num_idle < len(self._jobs):
                # A daemon: a copy that hangs must not keep a dying process alive.
                self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
                self._threads[-1].start()
            self._has_jobs.notify()

    def wait(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until a job's end makes `is_met` true."""
        with self._has_ended:
            return self._has_ended.wait_for(is_met, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let the queue run out and join the threads."""
        with self._has_jobs:
            self._is_closing = True
            self._has_jobs.notify_all()
        ends_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":
            _stand_behind(self._niceness)
        while (job := self._next()) is not None:
            if job.begin():
                job.finish()
            del job  # its pages' owner may be gone while this thread sleeps
            with self._has_ended:
                self._has_ended.notify_all()

    def _next(self) -> Job | None:
        with self._has_jobs:
            self._num_idle += 1
            self._has_jobs.wait_for(lambda: self._jobs or self._is_closing)
            self._num_idle -= 1
            return self._jobs.popleft() if self._jobs else None


def _stand_behind(niceness: int) -> None:
    """This thread alone; Linux knows niceness by thread. More than there was is always allowed."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))


class VirtualExecutor:
    """Runs jobs on a clock that the simulator moves: one at a time, each taking `duration_s()`. No thread.

    The simulator calls `run_due` after it moved the clock; `wait` moves the clock itself.
    """

    def __init__(self, clock: VirtualClock, duration_s: Callable[[], float]) -> None:
        self._clock = clock
        self._duration_s = duration_s
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._ends_at = clock.now()

    @property
    def next_event_s(self) -> float | None:
        """When the running job ends; None when none runs."""
        return self._ends_at if self._running is not None else None

    def start(self, job: Job) -> None:
        """Queue a job; it begins at once when nothing runs."""
        self._jobs.append(job)
        self._begin_next(self._clock.now())

    def run_due(self) -> None:
        """Finish what ends by now, and begin what follows."""
        while self._running is not None and self._ends_at <= self._clock.now():
            job, self._running = self._running, None
            job.finish()
            self._begin_next(self._ends_at)

    def wait(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Move the clock from end to end until `is_met`, at most by `timeout_s`."""
        deadline = self._clock.now() + timeout_s
        self.run_due()
        while not is_met() and self._running is not None and self._ends_at <= deadline:
            self._clock.advance(max(0.0, self._ends_at - self._clock.now()))
            self.run_due()
        if not is_met():
            self._clock.advance(max(0.0, deadline - self._clock.now()))
        return is_met()

    def close(self, timeout_s: float) -> bool:
        """Finish everything that ends within `timeout_s`."""
        return self.wait(lambda: self._running is None, timeout_s)

    def _begin_next(self, start_s: float) -> None:
        while self._running is None and self._jobs:
            job = self._jobs.popleft()
            if job.begin():
                self._running = job
                self._ends_at = start_s + self._duration_s()
