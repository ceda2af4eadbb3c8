"""`kvarto.server.run` as a process of its own, on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvarto.engine.config import EngineConfig
from kvarto.server.config import ServerConfig

_MAIN = """
import sys, msgspec
from kvarto.core.errors import KvartoError
from kvarto.engine.config import EngineConfig
from kvarto.server import ServerConfig, run
server, engine = sys.argv[1:]
try:
    run(msgspec.json.decode(server, type=ServerConfig), msgspec.json.decode(engine, type=EngineConfig))
except KvartoError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@dataclass
class Serving:
    """A server process; `log` has what it said."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, limit_s: float = 120.0) -> str:
        """The first group of the pattern once it is said. AssertionError with the log when it is not."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            ended = self.process.poll() is not None
            if match := re.search(pattern, self.text):
                return match[1] if match.groups() else match[0]
            assert not ended, f"exit code {self.process.returncode}:\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"`{pattern}` was not said:\n{self.text}")

    @property
    def url(self) -> str:
        return self.wait_for(r"ready in .* (https?://\S+|unix:\S+)")

    def engine_pids(self) -> list[int]:
        """Processes of engines that this server started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if b"kvarto.engine.process" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def serving(folder: Path, engine: EngineConfig, server: ServerConfig | None = None) -> Iterator[Serving]:
    """Start it; whatever happens in the block, no process is left."""
    arguments = [msgspec.json.encode(config).decode() for config in (server or ServerConfig(port=0), engine)]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _MAIN, *arguments], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield Serving(process, log)
    finally:
        process.terminate()
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
