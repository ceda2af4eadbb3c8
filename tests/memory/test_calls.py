"""Calls: what threads return or raise comes back once, with a deadline; several threads work at the same time."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

import pytest

from kvarto.core.clock import MonotonicClock, VirtualClock
from kvarto.core.errors import BadAdapter, TransferFailed
from kvarto.memory.calls import Call, Calls
from kvarto.memory.executors import ThreadExecutor, VirtualExecutor
from kvarto.memory.tasks import TaskState


def test_a_result_and_an_error_come_back_once_each() -> None:
    calls = Calls(MonotonicClock(), executor=ThreadExecutor(num_threads=2))
    heard: list[Call] = []

    def fail() -> None:
        raise BadAdapter("broken")

    good, bad = calls.submit("good", lambda: 7, heard.append), calls.submit("bad", fail, heard.append)
    calls.wait(good)
    with pytest.raises(TransferFailed, match="bad is failed: BadAdapter: broken"):
        calls.wait(bad)
    calls.close()
    assert sorted(call.name for call in heard) == ["bad", "good"]
    assert (good.state, good.result, good.raised) == (TaskState.DONE, 7, None)
    assert (bad.state, type(bad.raised), bad.error) == (TaskState.FAILED, BadAdapter, "BadAdapter: broken")


def test_two_threads_work_at_the_same_time() -> None:
    calls = Calls(MonotonicClock(), deadline_s=20, executor=ThreadExecutor(num_threads=2))
    both = threading.Barrier(2)
    first, second = calls.submit("first", both.wait), calls.submit("second", both.wait)
    calls.wait(first)
    calls.wait(second)
    assert {first.state, second.state} == {TaskState.DONE}, "one thread waited for the other in vain"
    calls.close()


def test_one_that_outlives_its_deadline_fails_at_once_and_settles_when_it_returns() -> None:
    clock = VirtualClock()
    executor = VirtualExecutor(clock, lambda: 5.0)
    calls = Calls(clock, deadline_s=1.0, executor=executor)
    settled: list[Call] = []
    call = calls.submit("slow", lambda: 1, settled.append)
    assert calls.num_in_time == 1
    clock.advance(2.0)
    assert calls.sweep() == 1
    calls.poll()
    assert call.state is TaskState.FAILED
    assert not settled, "a thread still works on it"
    assert (calls.num_in_flight, calls.num_in_time) == (1, 0)
    clock.advance(4.0)
    executor.run_due()
    calls.poll()
    assert settled == [call]
    calls.check()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is of processes elsewhere")
def test_a_nice_thread_stands_behind_and_no_other_does() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    for nice, expected in ((0, before), (3, min(19, before + 3)), (100, 19)):
        calls = Calls(MonotonicClock(), executor=ThreadExecutor(niceness=nice))
        call = calls.submit("niceness", niceness)
        calls.wait(call)
        calls.close()
        assert call.result == expected
    assert niceness() == before


@pytest.mark.parametrize("num_threads", [1, 3])
def test_everything_submitted_is_called_exactly_once(num_threads: int) -> None:
    calls = Calls(MonotonicClock(), executor=ThreadExecutor(num_threads=num_threads))
    lock, seen = threading.Lock(), list[int]()

    def note(number: int) -> None:
        with lock:
            seen.append(number)

    all_calls = [calls.submit("note", partial(note, number)) for number in range(200)]
    for call in all_calls:
        calls.wait(call)
    calls.close()
    assert sorted(seen) == list(range(200))
    assert num_threads > 1 or seen == sorted(seen)
