"""A container for tests: one limit, one ledger, one set of fake cards, and the processes that run in it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarto.cluster.limiter_ledger import LimiterAccount, read_account
from tests.cluster.fakes.board import MIB, Board

HERE = Path(__file__).parent
LIMITER = HERE.parents[2] / "native/limiter"
FAKES = HERE.parent / "fakes"
OUT_OF_MEMORY = 2
C_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-pthread", "-Wall", "-Wextra", "-Werror",
           "-Wno-builtin-declaration-mismatch")  # fmt: skip


def wide_swap() -> tuple[str, ...]:
    """The flag for a 16-byte compare-and-swap where the compiler wants one."""
    return ("-mcx16",) if os.uname().machine == "x86_64" else ()


@dataclass(frozen=True, slots=True)
class Build:
    """Where the limiter, the fakes and the test programs were built."""

    folder: Path

    @property
    def limiter(self) -> Path:
        return self.folder / "libkvarto-limiter.so"


def build(folder: Path) -> Build:
    """Everything that the tests run; quick when nothing changed. Several test processes may ask at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_limiter(folder, "-O2 -g -Werror")
        _run("make", "-s", "-j2", "-C", str(FAKES), f"BUILD={folder}", "CFLAGS=-O2 -g -Werror")
        compile_c(folder / "libways.so", HERE / "ways.c", "-shared", "-fPIC", f"-L{folder}", "-lcuda")
    return Build(folder)


def make_limiter(folder: Path, flags: str) -> Path:
    """The library alone, with these compiler flags."""
    _run("make", "-s", "-j2", "-C", str(LIMITER), f"BUILD={folder}", f"CFLAGS={flags}")
    return folder / "libkvarto-limiter.so"


def compile_c(target: Path, *arguments: str | Path) -> Path:
    """Compile unless the target is newer than every source and header around it. Several may ask at once."""
    sources = [*HERE.glob("*.[ch]"), *FAKES.glob("*.h"), *LIMITER.glob("*.[ch]")]
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime for source in sources):
            _run("cc", *C_FLAGS, *wide_swap(), "-o", str(target), *map(str, arguments))
    return target


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Guest:
    """A process in the container; every command of `guest.py` is a method here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._ask(name, arguments)

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the guest ended with {self.process.wait()} in `{name}`"
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Container:
    """Fake cards, a limit and a ledger in a folder of their own."""

    def __init__(self, built: Build, folder: Path, limit: str, **board: int) -> None:
        self.built = built
        self.folder = folder
        self.board = Board(folder / "board", **board)
        self.ledger = folder / "ledger"
        self._guests: list[Guest] = []
        self.env = {
            "PATH": os.environ["PATH"],
            "LD_PRELOAD": str(built.limiter),
            "LD_LIBRARY_PATH": str(built.folder),
            "GUEST_WAYS": str(built.folder / "libways.so"),
            "KVARTO_FAKE_BOARD": str(self.board.path),
            "KVARTO_GPU_MEMORY_LEDGER": str(self.ledger),
            "KVARTO_GPU_MEMORY_LIMIT": limit,
            "KVARTO_GPU_CONTEXT_SIZE": "0",
        }

    def guest(self, *, prefix: tuple[str, ...] = (), **env: str | None) -> Guest:
        """Start a process; `env` changes or, with None, removes variables of the container's."""
        merged = {name: value for name, value in {**self.env, **env}.items() if value is not None}
        process = subprocess.Popen(
            [*prefix, sys.executable, "-S", "-E", str(HERE / "guest.py")],
            env=merged, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._guests.append(Guest(process))
        return self._guests[-1]

    def opened(self, **env: str | None) -> Guest:
        """A process with a context."""
        guest = self.guest(**env)
        assert guest.open() == 0
        return guest

    def account(self) -> LimiterAccount:
        return read_account(self.ledger)

    def counted(self, device: int = 0) -> int:
        """Bytes in use by the ledger."""
        return self.account().devices[device].used_bytes

    def held(self, device: int = 0) -> int:
        """Bytes in use by the card."""
        return int(self.board.truth(device).used_bytes)

    def close(self) -> None:
        for guest in self._guests:
            if guest.process.poll() is None:
                guest.end()
            for pipe in (guest.process.stdin, guest.process.stdout, guest.process.stderr):
                if pipe is not None:
                    pipe.close()


@contextmanager
def container(built: Build, folder: Path, limit: str = f"{256 * MIB}", **board: int) -> Iterator[Container]:
    """A container, and the end of all its processes."""
    made = Container(built, folder, limit, **board)
    try:
        yield made
    finally:
        made.close()
