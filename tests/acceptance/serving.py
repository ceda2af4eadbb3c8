"""A real `kvarto` server process for the tests of the whole: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
import psutil

from kvarto.engine.config import EngineConfig
from kvarto.server.config import ServerConfig

_MAIN = """
import sys, msgspec
from kvarto.engine.config import EngineConfig
from kvarto.server import run
from kvarto.server.config import ServerConfig
server, engine = sys.argv[1:3]
run(msgspec.json.decode(server, type=ServerConfig), msgspec.json.decode(engine, type=EngineConfig))
"""


class Served:
    """A server that is ready."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = psutil.Process(process.pid)
        self.url = url
        self.log = log

    @property
    def processes(self) -> list[psutil.Process]:
        """The server, its engine, and whatever else it started."""
        return [self.process, *self.process.children(recursive=True)]

    @property
    def engine(self) -> psutil.Process | None:
        """The engine process; None while there is none."""
        for child in self.process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "kvarto.engine.process" in child.cmdline():
                    return child
        return None

    def metric(self, name: str, **labels: str) -> float:
        """One sample of `/metrics`."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        for line in text.splitlines():
            if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no {name} {labels} in:\n{text}")


def peak_bytes(processes: Sequence[psutil.Process]) -> int:
    """Largest resident set of each process so far (VmHWM), added up. Shared libraries count in each of them."""
    total = 0
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            total += int(match[1]) * 1024 if match else 0
    return total


@contextlib.contextmanager
def served(engine: EngineConfig, server: ServerConfig | None = None, *, start_limit_s: float = 120) -> Iterator[Served]:
    """Run a server on a free port until the block ends. Raises AssertionError with its log when it does not start."""
    server = msgspec.structs.replace(server or ServerConfig(), port=0)
    arguments = [msgspec.json.encode(config).decode() for config in (server, engine)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _MAIN, *arguments], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            yield Served(process, _wait_for_url(process, log, start_limit_s), log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        match = re.search(r"ready in .* (https?://\S+)", log.read_text(errors="replace"))
        if match:
            return match[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start (exit code {process.poll()}):\n{log.read_text(errors='replace')}")


def kill(process: psutil.Process | None) -> bool:
    """SIGKILL; False when it was not there."""
    if process is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
        return True
    return False
