"""Opens a trace that a flag names."""

from __future__ import annotations

from pathlib import Path

from kvarto.core.errors import BadFile, UsageError
from kvarto.planning.traces import Trace, read_trace


def open_trace(path: Path) -> Trace:
    """Read it. Raises UsageError when there is no such file, BadFile when it is not a trace."""
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(path.name, lines)
    except OSError as error:
        raise UsageError(f"can't read `--trace {path}`: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadFile(f"`{path}` is not text: {error}") from error
