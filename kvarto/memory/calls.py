"""Calls: functions that other threads call, such as reads of files and copies from host memory into pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvarto.core.clock import Clock
from kvarto.memory.executors import Executor
from kvarto.memory.tasks import Task, Tasks


@dataclass(slots=True, eq=False, kw_only=True)
class Call(Task):
    """One call. Only `Calls` changes it."""

    function: Callable[[], Any] | None = field(repr=False)
    """Dropped once it has been called: what it refers to may be large."""
    name: str
    result: Any = field(default=None, repr=False)
    """What it returned, once the state is done."""

    @property
    def what(self) -> str:
        """For messages."""
        return self.name


class Calls(Tasks[Call]):
    """Calls functions in the order asked for. Thread-safe, though one caller is expected to poll."""

    noun = "calls"

    def __init__(
        self,
        clock: Clock,
        *,
        deadline_s: float = 60.0,
        executor: Executor | None = None,
        inject_fault: Callable[[Call], None] | None = None,
    ) -> None:
        """`deadline_s` counts from submission. `inject_fault` runs before each call and may raise; for tests."""
        super().__init__(_call, clock, deadline_s=deadline_s, executor=executor, inject_fault=inject_fault)

    def submit(self, name: str, function: Callable[[], Any], on_settled: Callable[[Call], None] | None = None) -> Call:
        """Queue a call of `function`, whose result and error the task will carry."""
        call = Call(deadline_s=self._deadline(), on_settled=on_settled, function=function, name=name)
        return self._submit(call)


def _call(call: Call) -> None:
    assert call.function is not None, f"{call.name} is called twice"
    try:
        call.result = call.function()
    finally:
        call.function = None
