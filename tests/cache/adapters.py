"""A second owner of pages, as adapters will be: loads, uses, lets go, and forgets when the arbiter asks."""

from __future__ import annotations

import numpy as np

from kvarto.core.errors import OutOfPages
from kvarto.core.ids import OwnerId
from kvarto.memory.arbiter import Arbiter, Unit
from kvarto.memory.page_pool import PagePool

ADAPTERS = OwnerId(1)


class FakeAdapters:
    """Named things of a few pages each. A thing is a unit of the arbiter while it is loaded."""

    def __init__(self, pool: PagePool, arbiter: Arbiter, *, floor_pages: int = 0, owner: OwnerId = ADAPTERS) -> None:
        self._pool = pool
        self._arbiter = arbiter
        self._owner = owner
        self.loaded: dict[str, Unit] = {}
        self.num_users: dict[str, int] = {}
        self.evicted: list[str] = []
        arbiter.register(owner, self, floor_pages=floor_pages)

    def load(self, name: str, num_pages: int, reload_cost_s: float = 1.0, depends_on: Unit | None = None) -> bool:
        """Load or use `name`; False when there is no room."""
        if name not in self.loaded:
            try:
                if num_pages > self._pool.num_free:
                    self._arbiter.reclaim(num_pages - self._pool.num_free, self._owner)
                pages = self._pool.allocate(num_pages, self._owner)
            except OutOfPages:
                return False
            self._pool.cache(pages.tolist())
            self.loaded[name] = Unit(self._owner, tuple(pages.tolist()), reload_cost_s, depends_on)
        elif not self.num_users[name]:
            self._pool.share(self.pages(name))
        self._arbiter.use(self.loaded[name])
        self.num_users[name] = self.num_users.get(name, 0) + 1
        return True

    def release(self, name: str) -> None:
        """One user less."""
        self.num_users[name] -= 1
        if not self.num_users[name]:
            self._pool.free(self.pages(name))
            self._arbiter.offer(self.loaded[name])

    def drop(self, name: str) -> None:
        """Forget what nobody uses and nothing depends on."""
        assert not self.num_users[name], f"`{name}` is dropped while it is used"
        self._pool.uncache(self.pages(name))
        self._arbiter.forget(self.loaded.pop(name))

    def pages(self, name: str) -> np.ndarray:
        return np.array(self.loaded[name].pages, dtype=np.int32)

    def evict(self, unit: Unit) -> None:
        name = next(name for name, each in self.loaded.items() if each is unit)
        assert not self.num_users[name], f"`{name}` was evicted while it is used"
        assert not unit.num_dependents, f"`{name}` was evicted before what depends on it"
        del self.loaded[name]
        self.num_users[name] = 0
        self.evicted.append(name)
