"""Who is taken at the door: never more prompts of one adapter than its share, whatever others do."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvarto.core.clock import VirtualClock
from kvarto.core.errors import InvalidRequest, Overloaded
from kvarto.engine.adapter_quota import QUOTA_CODE, AdapterQuota
from kvarto.engine.load_pace import LoadPace
from kvarto.engine.pace import Pace


def test_each_adapter_has_its_share_and_the_base_has_none() -> None:
    rng = random.Random(4)
    quota, limit, num_open, num_refused = AdapterQuota(5), 5, Counter[str | None](), 0
    for now_s in range(3000):
        name = rng.choice(("a", "b", "c", None))
        if num_open[name] and rng.random() < 0.45:
            quota.remove(name, float(now_s))
            num_open[name] -= 1
            continue
        count = rng.randrange(1, 4)
        fits = name is None or num_open[name] + count <= limit
        if not fits:
            num_refused += 1
            with pytest.raises(Overloaded) as refused:
                quota.check(name, count, float(now_s))
            assert (refused.value.param, refused.value.code) == ("model", QUOTA_CODE)
            assert 1 <= refused.value.retry_after_s <= 60
            continue
        quota.check(name, count, float(now_s))
        for _ in range(count):
            quota.add(name)
        num_open[name] += count
    assert num_refused > 100


def test_more_than_ever_fits_is_no_question_of_time_and_no_limit_is_none() -> None:
    with pytest.raises(InvalidRequest, match="at most 2"):
        AdapterQuota(2).check("a", 3, 0.0)
    unbounded = AdapterQuota(0)
    for _ in range(1000):
        unbounded.check("a", 50, 0.0)
        unbounded.add("a")


def test_when_to_retry_follows_the_pace_of_that_adapter() -> None:
    quota = AdapterQuota(10)
    for _ in range(10):
        quota.add("slow")
    for second in (0, 8, 16, 24):
        quota.remove("slow", float(second))
        quota.add("slow")
    with pytest.raises(Overloaded) as refused:
        quota.check("slow", 2, 32.0)
    assert refused.value.retry_after_s == 2 * 8


def test_a_pace_rises_while_nothing_ends_and_says_nothing_before_the_second_end() -> None:
    pace = Pace()
    assert pace.seconds_each(5.0) is None
    assert pace.retry_after_s(9, 5.0) == 1
    for second in range(1, 101):
        pace.note_end(float(second))
    assert pace.seconds_each(101.0) == 1.0
    assert pace.seconds_each(164.0) == pytest.approx(127 / 64)
    assert pace.retry_after_s(1000, 101.0) == 60


def test_only_time_in_which_somebody_waits_counts() -> None:
    clock = VirtualClock()
    pace = LoadPace(clock)
    num_loads = 0
    for _ in range(20):
        pace.note(is_waiting=True, num_loads=num_loads)
        clock.advance(0.5)
        num_loads += 1
        pace.note(is_waiting=False, num_loads=num_loads)
        clock.advance(100.0)
    assert pace.wait_s(0) == 0.0, "the first in the line waits for nobody"
    assert pace.wait_s(8) == pytest.approx(8 * 0.5 * 19 / 20)
    pace.note(is_waiting=True, num_loads=num_loads)
    clock.advance(100.0)
    pace.note(is_waiting=True, num_loads=num_loads)
    assert pace.wait_s(1) > 5.0, "a line that stands makes it longer"


def test_nothing_is_said_of_a_line_that_was_not_seen_to_move() -> None:
    clock = VirtualClock()
    pace = LoadPace(clock)
    pace.note(is_waiting=True, num_loads=0)
    clock.advance(1000.0)
    pace.note(is_waiting=True, num_loads=3)
    assert pace.wait_s(100) == 0.0
