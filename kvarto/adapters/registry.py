"""Registry: which adapter a name means. Names point to versions; requests hold versions, never names.

    load(name, path) ──> opening ── headers are sound ──> current ── replaced, unloaded ──> old ── last request ──> gone
                            └── refused; the version before stays current

A version is what its files were when they were opened. When they change on disk, `refresh` makes a new version of the
same name: requests that hold the old one finish on it, new ones get the new one. Its content digest is computed when
it is first wanted, in a worker thread like everything that touches files; equal digests are one adapter to the tiers
below, whatever their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import Path

from kvarto.adapters.host_tier import load_error
from kvarto.adapters.source import FoundAdapter, Source
from kvarto.core.errors import KvartoError
from kvarto.memory.calls import Call, Calls
from kvarto.memory.tasks import TaskState


class VersionState(Enum):
    """How far a version is known."""

    LISTED = "listed"
    """Its name and path."""
    OPENING = "opening"
    OPEN = "open"
    """Its headers, and so its sizes."""
    FAILED = "failed"
    """It could not be opened. Wanting it again tries again."""


class AdapterVersion:
    """One adapter as its files were at one moment. Only the registry changes it."""

    __slots__ = ("_digest_call", "digest", "error", "found", "is_current", "name", "num_requests", "path", "state")

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.state = VersionState.LISTED
        self.found: FoundAdapter | None = None
        """From OPEN on."""
        self.digest: bytes | None = None
        """Once it was computed."""
        self.error: KvartoError | None = None
        """Why the last try to open or read it failed."""
        self.num_requests = 0
        self.is_current = True
        self._digest_call: Call | None = None

    @property
    def num_pages(self) -> int:
        """Pages that it takes; 0 while its headers were not read."""
        return 0 if self.found is None else self.found.num_pages

    def __repr__(self) -> str:
        return f"<{self.name} at {self.path}, {self.state.value}>"


Answer = Callable[[AdapterVersion, KvartoError | None], None]
"""Hears the version that is current, or the one that was refused and why."""


class Registry:
    """Names and versions. One thread calls it; `on_gone` hears of versions that nobody can reach any more."""

    def __init__(self, source: Source, calls: Calls, on_gone: Callable[[AdapterVersion], None]) -> None:
        self.num_changes = 0
        """Of what names mean; rises with each."""
        self._source = source
        self._calls = calls
        self._on_gone = on_gone
        self._current: dict[str, AdapterVersion] = {}
        self._old: dict[AdapterVersion, None] = {}

    def __iter__(self) -> Iterator[AdapterVersion]:
        """Current versions, in the order of their names' registration."""
        return iter(self._current.values())

    def __len__(self) -> int:
        return len(self._current)

    @property
    def versions(self) -> list[AdapterVersion]:
        """Current ones, and old ones that requests still hold."""
        return [*self._current.values(), *self._old]

    def find(self, name: str) -> AdapterVersion | None:
        """What the name means now."""
        return self._current.get(name)

    # ---- names -------------------------------------------------------------------------------------------------

    def list_name(self, name: str, path: Path) -> AdapterVersion:
        """Register without looking at the files; they are opened when the adapter is first wanted."""
        version = AdapterVersion(name, path)
        self._make_current(version)
        return version

    def load(self, name: str, path: Path, answer: Answer) -> None:
        """Open the files, and let the name mean what was found. Files that are those of the current version change
        nothing; when they are refused, what the name meant before stays.
        """
        candidate = AdapterVersion(name, path)
        candidate.is_current = False
        self._open(candidate, partial(self._finish_load, answer))

    def unload(self, name: str) -> AdapterVersion | None:
        """The name means nothing any more; requests that hold its version finish. None for an unknown name."""
        version = self._current.pop(name, None)
        if version is not None:
            self.num_changes += 1
            self._retire(version)
        return version

    def refresh(self, name: str) -> None:
        """Look whether the files behind a name are still those that were opened; if not, they are a new version."""
        version = self._current.get(name)
        if version is not None and version.state is VersionState.OPEN:
            self.load(name, version.path, lambda version, error: None)

    # ---- requests ----------------------------------------------------------------------------------------------

    def hold(self, version: AdapterVersion) -> None:
        """A request uses this version until `release`."""
        version.num_requests += 1

    def release(self, version: AdapterVersion) -> None:
        """Undo one `hold`."""
        version.num_requests -= 1
        assert version.num_requests >= 0, f"{version} was released more often than held"
        if not version.num_requests and not version.is_current:
            self._old.pop(version, None)
            self._on_gone(version)

    # ---- files -------------------------------------------------------------------------------------------------

    def identify(self, version: AdapterVersion) -> bool:
        """Open the version and compute its digest, in the background. True once both are known.

        Each try that fails sets `version.error`, which the caller reports and clears; then the next call tries again.
        """
        if version.digest is not None:
            return True
        if version.error is not None:
            return False
        if version.state in (VersionState.LISTED, VersionState.FAILED):
            self._open(version, lambda version, error: None)
        elif version.state is VersionState.OPEN and version._digest_call is None:
            assert version.found is not None
            work = partial(self._source.digest, version.found)
            settled = partial(self._finish_digest, version)
            version._digest_call = self._calls.submit(f"the digest of `{version.name}`", work, settled)
        return False

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        for name, version in self._current.items():
            assert version.name == name, f"`{name}` means {version}"
            assert version.is_current, f"{version} is current and does not know"
        for version in self._old:
            assert not version.is_current, f"{version} is old and does not know"
            assert version.num_requests, f"{version} is old, kept, and nobody holds it"

    def _open(self, version: AdapterVersion, answer: Answer) -> None:
        version.state = VersionState.OPENING
        version.error = None
        work = partial(self._source.find, version.path)
        self._calls.submit(f"opening `{version.name}`", work, partial(self._finish_open, version, answer))

    def _finish_open(self, version: AdapterVersion, answer: Answer, call: Call) -> None:
        if call.state is TaskState.DONE:
            version.found = call.result
            version.state = VersionState.OPEN
        else:
            version.error = load_error(call)
            version.state = VersionState.FAILED
        answer(version, version.error)

    def _finish_digest(self, version: AdapterVersion, call: Call) -> None:
        version._digest_call = None
        if call.state is TaskState.DONE:
            version.digest = call.result
        else:
            version.error = load_error(call)

    def _finish_load(self, answer: Answer, candidate: AdapterVersion, error: KvartoError | None) -> None:
        if error is not None:
            answer(candidate, error)
            return
        current = self._current.get(candidate.name)
        if current is not None and _same_files(current, candidate):
            answer(current, None)
            return
        self._make_current(candidate)
        answer(candidate, None)

    def _make_current(self, version: AdapterVersion) -> None:
        before = self._current.get(version.name)
        version.is_current = True
        self.num_changes += 1
        self._current[version.name] = version
        if before is not None:
            self._retire(before)

    def _retire(self, version: AdapterVersion) -> None:
        version.is_current = False
        if version.num_requests:
            self._old[version] = None
        else:
            self._on_gone(version)


def _same_files(current: AdapterVersion, candidate: AdapterVersion) -> bool:
    if current.found is None or candidate.found is None:
        return False
    return current.path == candidate.path and current.found.identity == candidate.found.identity
