"""Files of adapters: inside the folders that the operator named, of bounded size, and the same when read again.

Nothing stays open: ten thousand adapters may be registered. A file is opened once to be checked and once to be read,
and refused if it is not the one that was checked (device, inode, size and times).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvarto.core.errors import AdapterError, BadAdapter, BadFile, UnsupportedAdapter, UnsupportedModel
from kvarto.models.raw_file import FileIdentity, RawFile


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Bounds on what a stranger's file may ask for."""

    max_rank: int = 512
    """The largest rank served; real adapters have up to 256."""
    max_file_bytes: int = 16 << 30
    """Rank 512 on all linears of a model of 70 billion parameters takes 12 GiB."""
    max_tensors: int = 32_768
    """Two per module; 200 layers of 16 modules have 6,400."""
    max_header_bytes: int = 8 << 20
    """256 bytes per tensor."""
    max_config_bytes: int = 4 << 20
    """A rank of its own for each of 10,000 modules takes 1 MiB."""


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file that was checked, to be read later."""

    path: Path
    """Resolved: no link is left in it."""
    identity: FileIdentity

    @contextmanager
    def opened(self) -> Iterator[RawFile]:
        """The same file again. Raises BadAdapter where it has changed or gone."""
        with adapter_errors(), opened_file(self.path) as file:
            self._check(file)
            yield file
            self._check(file)  # nobody wrote meanwhile

    def _check(self, file: RawFile) -> None:
        if file.identity != self.identity:
            raise BadAdapter(f"`{self.path}` has changed since it was checked; load the adapter again")

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Bytes at a place. Raises BadAdapter."""
        with self.opened() as file:
            return file.read(offset, size_bytes)


@contextmanager
def opened_file(path: Path) -> Iterator[RawFile]:
    """Open, and close."""
    file = RawFile(path)
    try:
        yield file
    finally:
        file.close()


@contextmanager
def adapter_errors() -> Iterator[None]:
    """What readers of models and the file system raise becomes an AdapterError."""
    try:
        yield
    except AdapterError:
        raise
    except BadFile as error:
        raise BadAdapter(str(error)) from error
    except UnsupportedModel as error:
        raise UnsupportedAdapter(str(error)) from error
    except OSError as error:
        raise BadAdapter(f"the adapter's files cannot be read: {error}") from error


def confined(path: Path, roots: Sequence[Path]) -> Path:
    """The path without links. Raises BadAdapter where it does not exist, or lies outside all `roots`."""
    try:
        resolved = os.path.realpath(path, strict=True)
        inside = any(_is_below(resolved, os.path.realpath(root, strict=True)) for root in roots)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
        why = error.strerror if isinstance(error, OSError) else "it is no path, or its links go round"
        raise BadAdapter(f"`{path}` cannot be opened: {why}") from error
    if not inside:
        raise BadAdapter(
            f"`{path}` leads to `{resolved}`, outside of {', '.join(f'`{root}`' for root in roots)}; "
            "copy the adapter there, or name its folder"
        )
    return Path(resolved)


@contextmanager
def opened_inside(
    folder: Path, name: str, roots: Sequence[Path], max_bytes: int
) -> Iterator[tuple[RawFile, PinnedFile]]:
    """Open and measure a file of a folder that was `confined`. Raises BadAdapter, also where it changes meanwhile.

    The file lies where its path says, or inside of the roots if that is a link. That somebody made a link of it while
    we looked shows in its inode; that a folder above became one, the caller finds out with `still_confined`.
    """
    path = folder / name
    resolved = confined(path, roots) if stat.S_ISLNK(os.lstat(path).st_mode) else path
    with opened_file(resolved) as file:
        pinned = PinnedFile(resolved, file.identity)
        found = os.lstat(resolved)
        is_same = (found.st_dev, found.st_ino) == pinned.identity[:2]
        if not is_same or (resolved is not path and confined(path, roots) != resolved):
            raise moved(path)
        if file.size_bytes > max_bytes:
            raise BadAdapter(f"`{path}` has {file.size_bytes} bytes; at most {max_bytes} are read")
        yield file, pinned
        if file.identity != pinned.identity:
            raise BadAdapter(f"`{path}` changed while it was read; load the adapter again")


def still_confined(path: Path, resolved: Path) -> None:
    """Raises BadAdapter where a path leads elsewhere by now than it did, by `confined`."""
    if os.path.realpath(path) != os.fspath(resolved):
        raise moved(path)


def moved(path: Path) -> BadAdapter:
    """What is raised where files are not what they were a moment ago."""
    return BadAdapter(f"`{path}` moved while it was opened; load the adapter again")


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root if root.endswith(os.sep) else root + os.sep)
