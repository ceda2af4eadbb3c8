"""A file that we did not write, read at exact places. Short reads and lies about its length are errors.

Reads copy (`pread`) instead of mapping: a file that shrinks under us raises instead of killing the process, and the
pages can be dropped from the page cache at once.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from kvarto.core.errors import BadFile


class FileIdentity(NamedTuple):
    """What changes whenever the bytes of a file do, short of somebody setting back clocks."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class RawFile:
    """Read-only bytes of known length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_regular(path)
        self.size_bytes = self.identity.size_bytes

    @property
    def identity(self) -> FileIdentity:
        """Of the open file, now."""
        found = os.fstat(self._fd)
        return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def fileno(self) -> int:
        """Its descriptor, for native code; open until `close`."""
        return self._fd

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Exactly `size_bytes` bytes at `offset`. Raises BadFile where the file ends before."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise BadFile(
                f"`{self.path}`: bytes {offset} to {offset + size_bytes} asked, the file has {self.size_bytes}; "
                "it is truncated, download it again"
            )
        parts: list[bytes] = []
        while size_bytes > 0:
            part = os.pread(self._fd, size_bytes, offset)
            if not part:
                raise BadFile(f"`{self.path}` shrank while it was read; stop what writes to it and start again")
            parts.append(part)
            offset += len(part)
            size_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def forget(self, offset: int, size_bytes: int) -> None:
        """Let the kernel drop these bytes from its page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_regular(path: Path) -> int:
    # O_NONBLOCK: opening a pipe or a device must not hang before we can refuse it.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BadFile(f"`{path}` cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadFile(f"`{path}` is not a regular file; give a model folder or a `.gguf` file")
    return fd
