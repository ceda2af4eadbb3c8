"""How many requests an engine is handed before it has begun with them: as many as its queue takes, never one more.

The engine refuses what its queue cannot hold. That must not happen to requests that were taken long ago and only move
to a fresh engine, so the client keeps the surplus itself, in order.
"""

from __future__ import annotations


class Gate:
    """Ids that wait here, and ids that were handed over and have not begun. A place is free again when one begins."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[str, None] = {}
        self._ahead: set[str] = set()

    def enter(self, engine_id: str) -> None:
        """A request wants to be handed over."""
        self._waiting[engine_id] = None

    def leave(self, engine_id: str) -> bool:
        """A request has ended, wherever it was. True when the engine knows of it."""
        self._ahead.discard(engine_id)
        if engine_id in self._waiting:
            del self._waiting[engine_id]
            return False
        return True

    def begun(self, engine_id: str) -> None:
        """The engine has begun with a request."""
        self._ahead.discard(engine_id)

    def take(self) -> list[str]:
        """Ids to hand over now, oldest first."""
        free = self._limit - len(self._ahead)
        if free <= 0 or not self._waiting:
            return []
        taken = list(self._waiting)[:free] if free < len(self._waiting) else list(self._waiting)
        for engine_id in taken:
            del self._waiting[engine_id]
        self._ahead.update(taken)
        return taken

    def reset(self) -> None:
        """The engine is gone; everybody enters again."""
        self._waiting.clear()
        self._ahead.clear()
