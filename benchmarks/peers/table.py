"""The table, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.peers.compare import Meeting, Row
from benchmarks.peers.figures import spread_fraction
from benchmarks.peers.workload import Column


def table(meetings: Sequence[Meeting], columns: Sequence[Column]) -> str:
    """A row per server and, below each pair, the ratio baseline ÷ peer; figures are medians in tokens/s.

    `busy idle` counts cores that a server uses while nobody asks; `others`, the cores that foreign processes used in
    the worst of its measurements: on a machine that is not quiet, the figures say little.
    """
    head = ["server", *(column.title for column in columns), "peak RSS", "start", "busy idle", "others"]
    lines = [head]
    for meeting in meetings:
        lines += [_cells(row, columns) for row in meeting.rows]
        if len(meeting.rows) == 2:
            lines.append(["  ratio", *(f"{meeting.ratio(column.name):.2f}×" for column in columns), "", "", "", ""])
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    return "\n".join(_line(line, widths) for line in lines)


def commands(meetings: Sequence[Meeting]) -> str:
    """Versions and flags of each server, once."""
    rows = {row.label: row for meeting in meetings for row in meeting.rows}
    return "\n".join(f"{row.label}: {row.version}\n    {row.command}" for row in rows.values())


def _cells(row: Row, columns: Sequence[Column]) -> list[str]:
    figures = [_figure(row.values[column.name]) for column in columns]
    memory, start = f"{row.peak_rss_bytes / 1e9:.2f} GB", f"{row.start_s:.1f} s"
    return [row.label, *figures, memory, start, f"{row.idle_cores:.2f}", f"{row.most_foreign_cores:.2f}"]


def _figure(values: Sequence[float]) -> str:
    apart = f" ±{50 * spread_fraction(values):.0f} %" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{apart}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.ljust(width) if index == 0 else cell.rjust(width)
                      for index, (cell, width) in enumerate(zip(cells, widths, strict=True)))  # fmt: skip
    return "  ".join((first, *others)).rstrip()
