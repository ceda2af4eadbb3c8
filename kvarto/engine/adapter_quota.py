"""AdapterQuota: how many requests of one adapter may be here at once, so that one flood does not fill the queue.

Counted at the door, where a request can be refused before anything was done for it. Adapters are told apart by name.
"""

from __future__ import annotations

from collections import Counter

from kvarto.core.errors import InvalidRequest, Overloaded
from kvarto.engine.pace import Pace

QUOTA_CODE = "adapter_queue_full"
_FLAG = "`--max-requests-per-adapter`"


class AdapterQuota:
    """Prompts that are queued or run, by adapter; the bare base has no bound of its own."""

    def __init__(self, limit: int) -> None:
        """`limit`: prompts of one adapter; 0: any number."""
        self._limit = limit
        self._num_open: Counter[str] = Counter()
        self._paces: dict[str, Pace] = {}
        """Of adapters that have prompts here."""

    def check(self, adapter: str | None, num_prompts: int, now_s: float) -> None:
        """Raises Overloaded, or InvalidRequest for more prompts than ever fit."""
        if adapter is None or not self._limit:
            return
        if num_prompts > self._limit:
            raise InvalidRequest(
                f"{num_prompts} prompts of one adapter in one request; at most {self._limit} fit ({_FLAG}); "
                "send several",
                param="prompt",
            )
        num_too_many = self._num_open[adapter] + num_prompts - self._limit
        if num_too_many > 0:
            raise Overloaded(
                f"{self._num_open[adapter]} prompts of `{adapter[:200]}` are running or queued and {num_prompts} more "
                f"were sent; at most {self._limit} fit ({_FLAG}); retry later",
                param="model",
                code=QUOTA_CODE,
                retry_after_s=self._paces[adapter].retry_after_s(num_too_many, now_s) if adapter in self._paces else 1,
            )

    def add(self, adapter: str | None) -> None:
        """A prompt was taken."""
        if adapter is not None:
            self._num_open[adapter] += 1
            self._paces.setdefault(adapter, Pace())

    def remove(self, adapter: str | None, now_s: float) -> None:
        """It ended."""
        if adapter is None:
            return
        self._num_open[adapter] -= 1
        self._paces[adapter].note_end(now_s)
        if not self._num_open[adapter]:
            del self._num_open[adapter], self._paces[adapter]
