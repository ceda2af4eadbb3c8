"""Draws what `--json` wrote: bars for the table, lines for the sweeps. PNG and SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import COLUMNS
from kvarto.core.errors import BadFile, UsageError

SWEEPS = {"at": "requests at once", "ctx": "tokens of context"}
"""Prefix of a sweep's columns, and what its axis says."""
FORMATS = ("png", "svg")


def draw(paths: Sequence[Path], folder: Path) -> list[Path]:
    """One picture for the table and one per sweep, of all files together. Raises UsageError without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError("`plot` needs matplotlib; install it with: pip install 'kvarto[bench]'") from error
    pyplot.switch_backend("agg")
    medians = merged_medians([_read(path) for path in paths])
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (("columns", _bars(pyplot, medians)), *((p, _lines(pyplot, medians, p)) for p in SWEEPS)):
        if figure is not None:
            for suffix in FORMATS:
                written.append(folder / f"peers_{name}.{suffix}")
                figure.savefig(written[-1], bbox_inches="tight", dpi=150)
    return written


def merged_medians(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians by server and column. A server that met several others keeps its best meeting: noise only slows."""
    merged: dict[str, dict[str, float]] = {}
    for result in results:
        for row in (row for meeting in result["meetings"] for row in meeting):
            known = merged.setdefault(row["label"], {})
            for column, value in row["medians"].items():
                known[column] = max(value, known.get(column, 0.0))
    return merged


def sweep_points(medians: Mapping[str, float], prefix: str) -> tuple[list[int], list[float]]:
    """The columns `at1`, `at2`, … of one server as x and y."""
    points = sorted(
        (int(name.removeprefix(prefix)), value)
        for name, value in medians.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    )
    return [x for x, _ in points], [y for _, y in points]


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BadFile(f"`{path}` can't be drawn: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != "peers":
        raise BadFile(f"`{path}` was not written by `python -m benchmarks.peers run --json`")
    return result


def _bars(pyplot: Any, medians: Mapping[str, Mapping[str, float]]) -> Any:
    """A panel per column of the table, in its order; a bar per server that was measured in it."""
    columns = [column for column in COLUMNS if any(column.name in row for row in medians.values())]
    if not columns:
        return None
    figure, panels = pyplot.subplots(1, len(columns), figsize=(3 * len(columns), 0.4 * len(medians) + 1), sharey=True,
                                     squeeze=False)  # fmt: skip
    for panel, column in zip(panels[0], columns, strict=True):
        figures = [medians[label].get(column.name, math.nan) for label in medians]
        bars = panel.barh(list(medians), figures)
        panel.bar_label(bars, ["" if math.isnan(figure) else f"{figure:.0f}" for figure in figures], padding=2)
        panel.set_title(f"{column.title}, tok/s", fontsize="medium")
        panel.margins(x=0.25)
    panels[0][0].invert_yaxis()  # for all of them: they share the axis
    return figure


def _lines(pyplot: Any, medians: Mapping[str, Mapping[str, float]], prefix: str) -> Any:
    """A line per server."""
    lines = {label: sweep_points(row, prefix) for label, row in medians.items()}
    if not any(xs for xs, _ in lines.values()):
        return None
    figure, panel = pyplot.subplots(figsize=(7, 4))
    for label, (xs, ys) in lines.items():
        panel.plot(xs, ys, marker="o", label=label)
    panel.set_xscale("log", base=2)
    panel.set_xlabel(SWEEPS[prefix])
    panel.set_ylabel("tokens/s")
    panel.set_ylim(bottom=0)
    panel.legend()
    panel.grid(alpha=0.3)
    return figure
