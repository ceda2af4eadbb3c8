"""Numbers of the engine as its client hears them: counters that never fall, although engines come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvarto.engine.messages import Stats

_COUNTERS = (
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "num_preemptions",
    "num_steps",
    "num_prompt_tokens",
    "num_generation_tokens",
    "num_guessed_tokens",
    "num_right_guesses",
    "num_adapter_loads",
    "num_adapter_evictions",
    "num_adapter_hits",
    "num_adapter_failures",
    "num_adapter_steps",
    "num_adapters_in_steps",
    "adapter_step_bytes",
    "adapter_load_seconds",
)


class StatsFeed:
    """The last numbers, and everybody who waits for fresh ones."""

    def __init__(self) -> None:
        self._last = Stats()
        self._before = Stats()
        self._waiters: list[asyncio.Future[None]] = []

    def take(self, stats: Stats) -> None:
        """Fresh numbers came."""
        self._last = stats
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def engine_died(self) -> None:
        """What its counters said stays counted."""
        self._before = self.total
        self._last = Stats()

    @property
    def total(self) -> Stats:
        """Gauges of this engine; counters of this one and of all before it."""
        sums = {name: getattr(self._last, name) + getattr(self._before, name) for name in _COUNTERS}
        return msgspec.structs.replace(self._last, **sums)

    async def fresh(self, ask: Callable[[], None], timeout_s: float) -> Stats:
        """Numbers from after now, or the last ones when a step keeps the engine busy for longer."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(arrived)
        ask()
        await asyncio.wait([arrived], timeout=timeout_s)
        return self.total
