"""Registry: which adapter a name means. Names point to versions; requests hold versions, never names.

    load(name, path) ──> opening ── headers are sound ──> current ── replaced, unloaded ──> old ── last request ──> gone
                            └── refused; the version before stays current

A version is what its files were when they were opened. When they change on disk, `refresh` makes a new version of the
same name: requests that hold the old one finish on it, new ones get the new one. Its content digest is known when its
files were read for the first time (`learn`); equal digests are one adapter to the tiers below, whatever their names.
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

    __slots__ = ("digest", "error", "found", "is_current", "name", "num_requests", "path", "state")

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.state = VersionState.LISTED
        self.found: FoundAdapter | None = None
        """From OPEN on."""
        self.digest: bytes | None = None
        """Once its files were read."""
        self.error: KvartoError | None = None
        """Why the last try to open it failed."""
        self.num_requests = 0
        self.is_current = True

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
        self._by_digest: dict[bytes, dict[AdapterVersion, None]] = {}
        """Current and old versions whose content is known."""

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

    def versions_of(self, digest: bytes) -> list[AdapterVersion]:
        """Current and old ones of this content, as far as their content is known."""
        return list(self._by_digest.get(digest, ()))

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
            self._leave(version)

    # ---- files -------------------------------------------------------------------------------------------------

    def open(self, version: AdapterVersion) -> bool:
        """Open the version's files, in the background. True once its headers are known.

        Each try that fails sets `version.error`, which the caller reports and clears; then the next call tries again.
        """
        if version.error is None and version.state in (VersionState.LISTED, VersionState.FAILED):
            self._open(version, lambda version, error: None)
        return version.error is None and version.state is VersionState.OPEN

    def learn(self, version: AdapterVersion, digest: bytes) -> None:
        """Its files were read, and this is what they hold."""
        assert version.digest in (None, digest), f"{version} has two contents"
        version.digest = digest
        if version.is_current or version in self._old:
            self._by_digest.setdefault(digest, {})[version] = None

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        for name, version in self._current.items():
            assert version.name == name, f"`{name}` means {version}"
            assert version.is_current, f"{version} is current and does not know"
        for version in self._old:
            assert not version.is_current, f"{version} is old and does not know"
            assert version.num_requests, f"{version} is old, kept, and nobody holds it"
        known = {version for version in self.versions if version.digest is not None}
        filed = [(digest, version) for digest, versions in self._by_digest.items() for version in versions]
        assert len(filed) == len(known), "a version is filed twice, or not at all"
        assert known == {version for _, version in filed}, "a version is filed that is gone"
        assert all(version.digest == digest for digest, version in filed), "a version is filed under another content"

    def _open(self, version: AdapterVersion, answer: Answer) -> None:
        version.state = VersionState.OPENING
        version.error = None
        work = partial(self._source.find, version.path)
        self._calls.submit(f"opening `{version.name}`", work, partial(self._finish_open, version, answer))

    def _finish_open(self, version: AdapterVersion, answer: Answer, call: Call) -> None:
        if call.state is TaskState.DONE:
            version.found = call.result
            version.state = VersionState.OPEN
            if call.result.digest is not None:
                self.learn(version, call.result.digest)
        else:
            version.error = load_error(call)
            version.state = VersionState.FAILED
        answer(version, version.error)

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
        if version.digest is not None:
            self.learn(version, version.digest)
        if before is not None:
            self._retire(before)

    def _retire(self, version: AdapterVersion) -> None:
        version.is_current = False
        if version.num_requests:
            self._old[version] = None
        else:
            self._leave(version)

    def _leave(self, version: AdapterVersion) -> None:
        """Nobody can reach it any more."""
        if version.digest is not None:
            same = self._by_digest[version.digest]
            del same[version]
            if not same:
                del self._by_digest[version.digest]
        self._on_gone(version)


def _same_files(current: AdapterVersion, candidate: AdapterVersion) -> bool:
    if current.found is None or candidate.found is None:
        return False
    return current.path == candidate.path and current.found.identity == candidate.found.identity
