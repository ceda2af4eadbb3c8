"""A server of our own for one command: a child process that listens on a Unix socket in a private folder.

`kvarto chat MODEL` talks to it exactly as it would to any other server. What the child says while it loads goes to
our standard error; it ends with us, also when we are killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvarto.core.errors import EngineError, UsageError

_USAGE = 2
"""Exit code of a server whose flags, model or budget can't work; ours is then the same."""
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@contextmanager
def local_server(flags: Sequence[str]) -> Iterator[str]:
    """Start `kvarto serve` with these flags; its URL, once it listens. Raises EngineError when it ends before that."""
    with tempfile.TemporaryDirectory(prefix="kvarto-") as folder:
        path = Path(folder, "server.sock")
        command = [sys.executable, "-m", "kvarto", "serve", *flags, "--uds", str(path)]
        # A session of its own: Ctrl-C cancels an answer here instead of stopping the server.
        child = subprocess.Popen(command, stdout=2, start_new_session=True, preexec_fn=_end_with_parent)
        try:
            _wait_for(path, child)
            yield f"unix:{path}"
        finally:
            _stop(child)


def _wait_for(path: Path, child: subprocess.Popen[bytes]) -> None:
    """The socket appears when the model is loaded."""
    while not path.exists():
        if child.poll() is not None:
            kind = UsageError if child.returncode == _USAGE else EngineError
            raise kind(f"the model could not be served (exit code {child.returncode}); see above")
        time.sleep(POLL_S)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        os._exit(1)  # the parent was gone before we asked
