"""AdapterWatch: what came, changed and went in the folders of adapters. Looks now and then, in a worker thread.

A folder whose files changed is opened as a new version of its name; while that is refused, because somebody still
writes there, the version before stays, and the next change is looked at again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvarto.adapters.registry import AdapterVersion, Registry
from kvarto.adapters.source import Stamp, look_into
from kvarto.core.clock import Clock
from kvarto.core.errors import KvartoError
from kvarto.engine.adapter_settings import is_name
from kvarto.memory.calls import Call, Calls
from kvarto.memory.tasks import TaskState

LOOK_EVERY_S = 2.0
log = logging.getLogger(__name__)

_Seen = dict[str, tuple[str, Stamp]]


@dataclass(frozen=True, slots=True)
class _Changes:
    """What is other than it was when last looked at."""

    found: _Seen
    gone: tuple[str, ...]


class AdapterWatch:
    """Keeps the names of folders as the folders are."""

    def __init__(self, folders: Sequence[Path], registry: Registry, calls: Calls, clock: Clock) -> None:
        self._folders = tuple(folders)
        self._registry = registry
        self._calls = calls
        self._clock = clock
        self._seen: _Seen = {}
        self._looked_s = clock.now()
        self._call: Call | None = None

    def begin(self) -> None:
        """Register what is there now. Raises BadAdapter where a folder cannot be listed."""
        self._apply(self._look())

    def sweep(self) -> None:
        """Look again when it is time. For every round."""
        if self._folders and self._call is None and self._clock.now() - self._looked_s >= LOOK_EVERY_S:
            self._call = self._calls.submit("a look into `--adapter-dir`", self._look, self._take)

    def _look(self) -> _Changes:
        """In a worker thread; what was seen changes only when this has ended."""
        seen, found = self._seen, look_into(self._folders)
        changed = {name: each for name, each in found.items() if seen.get(name) != each}
        return _Changes(changed, tuple(name for name in seen if name not in found))

    def _take(self, call: Call) -> None:
        self._call = None
        self._looked_s = self._clock.now()
        if call.state is TaskState.DONE:
            self._apply(call.result)
        else:
            log.warning("%s failed: %s", call.name, call.error)

    def _apply(self, changes: _Changes) -> None:
        for name, (path, stamp) in changes.found.items():
            if name in self._seen:
                self._seen[name] = path, stamp
                self._registry.load(name, Path(path), _log)
            elif self._registry.find(name) is None and is_name(name):
                self._registry.list_name(name, Path(path))
                self._seen[name] = path, stamp
        for name in changes.gone:
            path, _ = self._seen.pop(name)
            version = self._registry.find(name)
            if version is not None and version.path == Path(path):
                self._registry.unload(name)


def _log(version: AdapterVersion, error: KvartoError | None) -> None:
    if error is not None:
        log.warning("`%s` changed and stays as it was: %s", version.name, error)
