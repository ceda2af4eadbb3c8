"""Files of adapters: inside the folders that the operator named, of bounded size, and the same when read again.

Nothing stays open: ten thousand adapters may be registered. A file is opened for each read, and refused if it is not
the one that was checked (device, inode, size and times).
"""

from __future__ import annotations

import os
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
        resolved = path.resolve(strict=True)
        inside = any(resolved.is_relative_to(root.resolve(strict=True)) for root in roots)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
        why = error.strerror if isinstance(error, OSError) else "it is no path, or its links go round"
        raise BadAdapter(f"`{path}` cannot be opened: {why}") from error
    if not inside:
        raise BadAdapter(
            f"`{path}` leads to `{resolved}`, outside of {', '.join(f'`{root}`' for root in roots)}; "
            "copy the adapter there, or name its folder"
        )
    return resolved


def pin(path: Path, roots: Sequence[Path], max_bytes: int) -> PinnedFile:
    """Resolve, confine, open and measure. Raises BadAdapter."""
    resolved = confined(path, roots)
    with adapter_errors(), opened_file(resolved) as file:
        identity = file.identity
        # Where a folder became a link while we looked, the path leads elsewhere by now, or to another file.
        found = os.stat(resolved)
        if path.resolve() != resolved or (found.st_dev, found.st_ino) != identity[:2]:
            raise BadAdapter(f"`{path}` moved while it was opened; load the adapter again")
    if identity.size_bytes > max_bytes:
        raise BadAdapter(f"`{path}` has {identity.size_bytes} bytes; at most {max_bytes} are read")
    return PinnedFile(resolved, identity)
