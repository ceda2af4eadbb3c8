"""One server as a process: started, waited for, weighed and stopped with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.client import is_answering
from benchmarks.peers.launch import Launch
from benchmarks.peers.process_tree import cpu_s, peak_rss_bytes
from kvarto.core.errors import EngineError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05
IDLE_WINDOW_S = 2.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Server:
    """A server that answers."""

    launch: Launch
    process: subprocess.Popen[bytes]
    start_s: float
    """From the start of the process to its first answer."""

    @property
    def peak_rss_bytes(self) -> int:
        """Of all its processes."""
        return peak_rss_bytes(self.process.pid)

    def idle_cores(self) -> float:
        """Cores that it uses while nobody asks."""
        before_s = cpu_s(self.process.pid)
        time.sleep(IDLE_WINDOW_S)
        return (cpu_s(self.process.pid) - before_s) / IDLE_WINDOW_S

    @contextmanager
    def paused(self) -> Iterator[None]:
        """None of its processes runs: for a server that is busy while it waits, when it is another one's turn."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)


@contextmanager
def running(launch: Launch, log_path: Path) -> Iterator[Server]:
    """Start the server and wait for its first token. What it prints goes to `log_path`.

    Raises EngineError with the end of the log when it ends, or is silent for `START_TIMEOUT_S`.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        start_s = time.perf_counter()
        process = subprocess.Popen(launch.command, env=os.environ | launch.environment, stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=log, process_group=0, preexec_fn=_end_with_parent)  # fmt: skip
    try:
        _wait(launch, process, log_path)
        yield Server(launch, process, time.perf_counter() - start_s)
    finally:
        _stop(process)


def _wait(launch: Launch, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline_s = time.perf_counter() + START_TIMEOUT_S
    while not asyncio.run(is_answering(launch)):
        if process.poll() is not None or time.perf_counter() > deadline_s:
            end = log_path.read_text(errors="replace")[-2_000:]
            raise EngineError(f"{launch.label} did not start (exit code {process.poll()}); `{log_path}` ends:\n{end}")
        time.sleep(POLL_S)


def _end_with_parent() -> None:
    """Runs in the child: a benchmark that is killed leaves no server behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The whole process group: it began with the process, so nobody else is in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            if number is signal.SIGTERM and not _group_lives(process.pid):
                return


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
