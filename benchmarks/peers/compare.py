"""Measures servers: the baseline and one peer at a time, column by column, A B A B."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.peers.client import send_all
from benchmarks.peers.figures import Answer
from benchmarks.peers.folders import Folders
from benchmarks.peers.launch import Launch
from benchmarks.peers.process_tree import CoreUse
from benchmarks.peers.prompts import PromptMaker
from benchmarks.peers.server_process import Server, running
from benchmarks.peers.workload import Column

WARM_UP_TOKENS = (512, 200, 64)
"""Prompts sent before anything is timed, all at once: kernels are compiled and buffers touched.
The last one is asked of each adapter too, which brings it into memory."""
IDLE_CORES = 0.02
"""A server that uses more of them while nobody asks is stopped while another one is measured."""
SETTLE_WINDOWS = 8
"""Of watching whether a server that has just answered for the first time still does what belongs to its start, as ours
does, which backs its memory: it would slow what is measured first."""


@dataclass(slots=True)
class Row:
    """What was measured of one server."""

    label: str
    version: str
    command: str
    start_s: float
    idle_cores: float
    """Busy while nobody asks."""
    peak_rss_bytes: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)
    """By column, one figure per repetition."""
    foreign_cores: dict[str, list[float]] = field(default_factory=dict)
    """Beside each figure: cores that processes outside the benchmark used meanwhile."""

    def median(self, column: str) -> float:
        """Of the repetitions."""
        return statistics.median(self.values[column])

    @property
    def most_foreign_cores(self) -> float:
        """Of all its measurements."""
        return max((cores for several in self.foreign_cores.values() for cores in several), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, medians included."""
        return asdict(self) | {"medians": {name: self.median(name) for name in self.values}}


@dataclass(frozen=True, slots=True)
class Meeting:
    """The baseline and one other, measured in turn; `rows` has one when there is no other."""

    rows: tuple[Row, ...]

    def ratio(self, column: str) -> float:
        """Baseline ÷ the other."""
        return self.rows[0].median(column) / self.rows[1].median(column)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How to measure."""

    folders: Folders
    maker: PromptMaker
    columns: tuple[Column, ...]
    num_repetitions: int
    say: Callable[[str], None]

    def meet(self, launches: Sequence[Launch]) -> Meeting:
        """Start the servers, measure every column in turn, and stop them."""
        with ExitStack() as stack:
            servers = [stack.enter_context(running(launch, self._log_path(launch))) for launch in launches]
            for server in servers:
                self._warm_up(server)
            rows = tuple(_row(server) for server in servers)
            for column in self.columns:
                self._measure(column, servers, rows)
            for server, row in zip(servers, rows, strict=True):
                row.peak_rss_bytes = server.peak_rss_bytes
        return Meeting(rows)

    def _measure(self, column: Column, servers: Sequence[Server], rows: Sequence[Row]) -> None:
        for _ in range(self.num_repetitions):
            salt = secrets.token_hex(8)  # the same for all of this round, and never seen before
            for server, row in zip(servers, rows, strict=True):
                with ExitStack() as stack:
                    for other, its_row in zip(servers, rows, strict=True):
                        if other is not server and its_row.idle_cores > IDLE_CORES:
                            stack.enter_context(other.paused())
                    use = CoreUse.start()
                    figure = column.figure(self._send(server, column, salt))
                    foreign_cores = use.foreign_cores()
                row.values.setdefault(column.name, []).append(figure)
                row.foreign_cores.setdefault(column.name, []).append(foreign_cores)
                self.say(f"{row.label:40} {column.name:8} {figure:10.1f} tok/s, others use {foreign_cores:.2f} cores")

    def _send(self, server: Server, column: Column, salt: str) -> list[Answer]:
        prompts = column.prompts(self.maker, salt)
        return uvloop.run(send_all(server.launch, prompts, column.concurrency))

    def _warm_up(self, server: Server) -> None:
        salt = secrets.token_hex(8)
        prompts = [self.maker.one(f"{salt}/{length}", length, 8) for length in WARM_UP_TOKENS]
        prompts += [replace(prompts[-1], adapter=name) for name in server.launch.adapters]
        uvloop.run(send_all(server.launch, prompts, len(prompts)))
        for _ in range(SETTLE_WINDOWS):
            if server.idle_cores() <= IDLE_CORES:
                break

    def _log_path(self, launch: Launch) -> Path:
        return self.folders.root / "logs" / f"{launch.port}.log"


def _row(server: Server) -> Row:
    launch = server.launch
    return Row(launch.label, launch.version, " ".join(launch.command), server.start_s, server.idle_cores())
