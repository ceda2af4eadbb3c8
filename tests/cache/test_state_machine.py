"""Hypothesis drives the world: any order of events that it can think of, judged after each.

`KVARTO_MACHINE_STEPS` is the least number of steps; the heavy run takes 50,000.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.cache.world import Choice, Scene, World

STEPS_PER_EXAMPLE = 50
MAX_CHOICES = 6
num_steps_run = 0

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=70)


class CacheMachine(RuleBasedStateMachine):
    """Prompts are cuts of earlier ones, so that prefixes meet."""

    @initialize(
        page_size=st.sampled_from([8, 16, 32, 64]),
        windows=st.sampled_from([(None,), (None, 24), (40,), (None, None), (1, 20, None)]),
        num_columns=st.integers(2, 24),
        fault_rate=st.sampled_from([0.0, 0.0, 0.3]),
        floors=st.sampled_from([(0, 0), (4, 0), (0, 2)]),
        seed=st.integers(0, 1 << 20),
    )
    def start(
        self,
        page_size: int,
        windows: tuple[int | None, ...],
        num_columns: int,
        fault_rate: float,
        floors: tuple[int, int],
        seed: int,
    ) -> None:
        self.world = World(
            Scene(
                page_size=page_size,
                windows=windows,
                num_pages=num_columns * len(windows),
                fault_rate=fault_rate,
                has_adapters=True,
                kv_floor=floors[0],
                adapter_floor=floors[1],
            ),
            seed,
        )
        self.prompts: list[list[int]] = [[0] * 70, [0, 1] * 35]

    def _choice(self, data: st.DataObject) -> Choice:
        return self.world.choices[data.draw(st.integers(0, len(self.world.choices) - 1), label="choice")]

    @precondition(lambda self: len(self.world.choices) < MAX_CHOICES)
    @rule(
        data=st.data(),
        cut=st.integers(0, 70),
        end=tokens,
        salt=st.sampled_from([None, None, "", "a"]),
        adapter=st.sampled_from([b"", b"x", b"y"]),
        start=st.one_of(st.just(0), st.integers(0, 100)),
    )
    def open(self, data: st.DataObject, cut: int, end: list[int], salt: str | None, adapter: bytes, start: int) -> None:
        base = self.prompts[data.draw(st.integers(0, len(self.prompts) - 1), label="prompt")]
        prompt = base[:cut] + end
        self.prompts.append(prompt)
        self.world.open(prompt, salt, adapter, start=min(start, len(prompt) - 1))

    @precondition(lambda self: self.world.choices)
    @rule(data=st.data(), num_tokens=st.one_of(st.just(1), st.integers(1, 80)))
    def advance(self, data: st.DataObject, num_tokens: int) -> None:
        choice = self._choice(data)
        if choice.num_computed < 300:
            self.world.advance(choice, num_tokens)

    @precondition(lambda self: self.world.choices)
    @rule(data=st.data())
    def compute_the_prompt(self, data: st.DataObject) -> None:
        choice = self._choice(data)
        self.world.advance(choice, max(1, len(choice.tokens) - choice.num_computed))

    @precondition(lambda self: 0 < len(self.world.choices) < MAX_CHOICES)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.world.fork(self._choice(data))

    @precondition(lambda self: self.world.choices)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(self._choice(data))

    @precondition(lambda self: self.world.choices)
    @rule(data=st.data(), use_prefix=st.booleans())
    def preempt(self, data: st.DataObject, use_prefix: bool) -> None:
        self.world.preempt(self._choice(data), use_prefix)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(name=st.sampled_from("abc"), num_pages=st.integers(1, 4))
    def use_adapter(self, name: str, num_pages: int) -> None:
        self.world.use_adapter(name, num_pages)

    def _names(self, *, used: bool) -> list[str]:
        """Of adapters that no choice computes with."""
        adapters = self.world.adapters
        names = [name for name in adapters.loaded if (adapters.num_users[name] > 0) is used]
        return sorted(name for name in names if not used or name in "abc")

    @precondition(lambda self: self._names(used=True))
    @rule(data=st.data())
    def release_adapter(self, data: st.DataObject) -> None:
        self.world.release_adapter(data.draw(st.sampled_from(self._names(used=True))))

    @precondition(lambda self: self._names(used=False))
    @rule(data=st.data())
    def drop_adapter(self, data: st.DataObject) -> None:
        self.world.drop_adapter(data.draw(st.sampled_from(self._names(used=False))))

    @invariant()
    def laws_hold(self) -> None:
        global num_steps_run
        num_steps_run += 1
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


def run_machine(num_steps: int) -> None:
    """Examples until `num_steps` steps were run; hypothesis shrinks what fails."""
    global num_steps_run
    num_steps_run = 0
    while num_steps_run < num_steps:
        run_state_machine_as_test(
            CacheMachine,
            settings=settings(
                max_examples=max(10, (num_steps - num_steps_run) // STEPS_PER_EXAMPLE),
                stateful_step_count=STEPS_PER_EXAMPLE,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )


def test_any_order_of_events() -> None:
    run_machine(int(os.environ.get("KVARTO_MACHINE_STEPS", "1500")))


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_any_order_of_many_events() -> None:
    run_machine(50_000)
