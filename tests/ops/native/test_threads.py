"""The team of threads: every item is taken once, and a barrier lets nobody through too early."""

from __future__ import annotations

import os
import threading

import pytest

from kvarto.core import _native


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_items", [0, 1, 7, 1000])
def test_every_item_is_taken_once_and_seen_after_the_barrier(num_threads: int, num_items: int) -> None:
    assert _native.ops.try_team(num_threads, num_runs=20, num_phases=30, num_items=num_items, pause_us=0) == 0


@pytest.mark.parametrize("num_threads", [2, 5])
def test_workers_that_fell_asleep_wake_up(num_threads: int) -> None:
    # Ten times what a waiting worker spins.
    assert _native.ops.try_team(num_threads, num_runs=3, num_phases=40, num_items=5, pause_us=200) == 0


def test_threads_go_with_their_team() -> None:
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        _native.ops.try_team(6, num_runs=1, num_phases=1, num_items=1, pause_us=0)
    assert len(os.listdir("/proc/self/task")) == before


def test_the_interpreter_runs_meanwhile() -> None:
    counted = 0
    done = threading.Event()

    def work() -> None:
        _native.ops.try_team(1, num_runs=1, num_phases=100, num_items=1, pause_us=1000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        counted += 1
    thread.join()
    assert counted >= 10
