"""VirtualTokens: who was served how much, so that one adapter's flood does not starve the others.

Each adapter that has requests has a counter of tokens that were computed for it; the bare base is one of them. The one
with the least is next. Whoever comes back after a while without requests starts at the least counter of those that are
there, so nobody saves up. Source: virtual token counters (Sheng et al., arXiv:2401.00588).
"""

from __future__ import annotations

from kvarto.engine.request import Request

OUTPUT_WEIGHT = 2
"""A drawn token costs a pass over all weights that it shares with few; prompt tokens share theirs with many."""

Tenant = str | None
"""Name of an adapter; None: the base."""


def tenant_of(request: Request) -> Tenant:
    """Whose counter a request is on."""
    return None if request.adapter is None else request.adapter.name


class VirtualTokens:
    """Counters of tenants that have requests now."""

    def __init__(self) -> None:
        self._counters: dict[Tenant, int] = {}
        self._num_requests: dict[Tenant, int] = {}

    def __len__(self) -> int:
        return len(self._counters)

    def add(self, request: Request) -> None:
        """A request was queued."""
        tenant = tenant_of(request)
        if tenant not in self._counters:
            self._counters[tenant] = min(self._counters.values(), default=0)
            self._num_requests[tenant] = 0
        self._num_requests[tenant] += 1

    def remove(self, request: Request) -> None:
        """It ended. A tenant without requests is forgotten: its debt could only be waived by waiting."""
        tenant = tenant_of(request)
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._counters[tenant], self._num_requests[tenant]

    def serve(self, request: Request, num_tokens: int, num_drawn: int) -> None:
        """So many tokens were computed for a request, and so many drawn."""
        self._counters[tenant_of(request)] += num_tokens + OUTPUT_WEIGHT * num_drawn

    def served(self, request: Request) -> int:
        """The counter of its tenant."""
        return self._counters[tenant_of(request)]
