"""Transfers: asynchronous copies of pages. Deadlines, cancelling and reporting are those of all tasks (`tasks.py`).

`state` says what the target is worth, `is_settled` that no thread touches the two pages any more. Pages belong to
whoever submitted: `on_settled` is the place to unpin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarto.core.clock import Clock
from kvarto.memory.executors import Executor
from kvarto.memory.tasks import Task, Tasks, TaskState

TransferState = TaskState

CopyPage = Callable[[int, int], None]
"""Copies a whole page: (source, target)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer(Task):
    """One copy of a page. Only `Transfers` changes it."""

    source: int
    target: int

    @property
    def what(self) -> str:
        """For messages."""
        return f"copy of page {self.source} to {self.target}"


class Transfers(Tasks[Transfer]):
    """Copies pages in the order asked for. Thread-safe, though one caller is expected to poll."""

    noun = "copies"

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
        super().__init__(
            lambda transfer: copy(transfer.source, transfer.target),
            clock,
            deadline_s=deadline_s,
            executor=executor,
            inject_fault=inject_fault,
        )

    def submit(self, source: int, target: int, on_settled: Callable[[Transfer], None] | None = None) -> Transfer:
        """Queue a copy of page `source` into page `target`; the caller keeps both pinned until it is reported."""
        transfer = Transfer(deadline_s=self._deadline(), on_settled=on_settled, source=source, target=target)
        return self._submit(transfer)
