"""NextInQueue: which of those that wait is tried next, where there are adapters. Without them it is the head.

    the first of each adapter, among the head's priority
      ├── fair: counters within SLACK_TOKENS of the least         (`virtual_tokens`)
      ├── within the bound on distinct adapters of a step
      └── first at home in the batch (`affinity`), else the least served, else the first in order

The head may be passed over MAX_PASSED times; then it is its turn, whatever else would be cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.engine.affinity import first_at_home, tenants_of
from kvarto.engine.request import Choice, Request
from kvarto.engine.virtual_tokens import VirtualTokens, tenant_of
from kvarto.engine.waiting import WaitingQueue

MAX_PASSED = 16
"""Times that the head may be passed over."""
SLACK_TOKENS = 4096
"""How far an adapter may run ahead of the least served because it is in the batch: some tens of answers."""


class NextInQueue:
    """The order of admission. `is_on` only where adapters are served."""

    def __init__(self, *, is_on: bool, max_adapters: int = 0, prefers_home: bool = True) -> None:
        """`max_adapters`: distinct ones that may run at once; 0: any number. Without `prefers_home` it does not matter
        which run already.
        """
        self.tokens = VirtualTokens()
        self._is_on = is_on
        self._prefers_home = prefers_home
        self._max_adapters = max_adapters
        self._passed: Choice | None = None
        self._num_passed = 0

    def add(self, request: Request) -> None:
        """A request was queued."""
        if self._is_on:
            self.tokens.add(request)

    def remove(self, request: Request) -> None:
        """It ended."""
        if self._is_on:
            self.tokens.remove(request)

    def serve(self, request: Request, num_tokens: int, num_drawn: int) -> None:
        """Tokens were computed for it."""
        if self._is_on:
            self.tokens.serve(request, num_tokens, num_drawn)

    def pick(self, waiting: WaitingQueue, running: Sequence[Choice]) -> Choice | None:
        """Whom to try now; None where nobody may run."""
        head = waiting.head
        if head is None or not self._is_on:
            return head
        if head is not self._passed:
            self._passed, self._num_passed = head, 0
        at_home = tenants_of(running)
        if self._num_passed >= MAX_PASSED:
            return head if self._may_join(head, at_home) else None
        firsts = waiting.firsts(lambda choice: (choice.order[0], tenant_of(choice.request)))
        equals = [choice for choice in firsts if choice.order[0] == head.order[0]]
        return self._best([choice for choice in equals if self._may_join(choice, at_home)], at_home)

    def note_admitted(self, choice: Choice) -> None:
        """The choice that was picked runs: whoever stood before it was passed over."""
        if self._is_on and self._passed is not None and choice is not self._passed:
            self._num_passed += 1

    def _best(self, candidates: list[Choice], at_home: set[str | None]) -> Choice | None:
        if not candidates:
            return None
        served = [self.tokens.served(choice.request) for choice in candidates]
        least = min(served)
        fair = [c for c, tokens in zip(candidates, served, strict=True) if tokens <= least + SLACK_TOKENS]
        at_home_first = first_at_home(fair, at_home) if self._prefers_home else None
        return at_home_first or candidates[served.index(least)]

    def _may_join(self, choice: Choice, at_home: set[str | None]) -> bool:
        """Within the bound on distinct adapters; the base is none."""
        return not self._max_adapters or tenant_of(choice.request) in at_home or len(at_home) <= self._max_adapters
