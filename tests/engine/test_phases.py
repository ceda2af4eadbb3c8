"""Phases and their progress: told now and then, never too often, and never more than the whole."""

from __future__ import annotations

import threading

import pytest

from kvarto.core.clock import MonotonicClock
from kvarto.engine.phases import PROGRESS_EVERY_S, ByteCount, Phases


class StepClock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def now(self) -> float:
        return self.now_s


def test_progress_is_told_now_and_then() -> None:
    clock, told = StepClock(), list[float]()
    count = ByteCount(1000, clock, told.append)
    for _ in range(10):
        count.add(50)
        clock.now_s += PROGRESS_EVERY_S * 0.4
    assert told == [0.2, 0.35, 0.5]
    clock.now_s += 1.0
    count.add(700)  # more than was announced
    assert told[-1] == 1.0


def test_nothing_to_load_is_no_progress() -> None:
    told: list[float] = []
    clock = StepClock()
    count = ByteCount(0, clock, told.append)
    clock.now_s += 1.0
    count.add(0)
    assert told == []


def test_threads_lose_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarto.engine.phases.PROGRESS_EVERY_S", 0.0)
    told: list[float] = []
    count = ByteCount(8 * 500 * 3, MonotonicClock(), told.append)
    threads = [threading.Thread(target=lambda: [count.add(3) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == sorted(told), "it never goes back"
    assert told[-1] == 1.0


def test_a_phase_that_raises_is_not_recorded() -> None:
    clock, begun = StepClock(), list[str]()
    phases = Phases(clock, begun.append)
    with phases.phase("read"):
        clock.now_s += 2.0
    with pytest.raises(ValueError), phases.phase("load"):
        raise ValueError
    assert begun == ["read", "load"]
    assert phases.finished == (("read", 2.0),)
