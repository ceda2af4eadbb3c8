"""Draws the figures of `kvarto bench memory`: what the budget holds, who runs, and hits over the pool's size."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvarto.core.units import GIB, format_bytes
from kvarto.planning.paging_study import Study

# Colours that stay apart for colour-blind eyes (Okabe and Ito); hatches say the same without colour.
_PARTS = {
    "used": ("#0072B2", ""),
    "cached": ("#56B4E9", ".."),
    "internal": ("#D55E00", "//"),
    "external": ("#E69F00", "xx"),
    "idle": ("#DDDDDD", ""),
}


def draw(study: Study, path: Path) -> None:
    """Write a figure in the format that the file's suffix names."""
    num_panels = 3 if study.hit_curve else 2
    height = 1.6 + 0.32 * len(study.rows)
    with mpl.rc_context({"svg.hashsalt": "kvarto", "font.size": 9}):
        figure = Figure(figsize=(5.2 * num_panels, height), layout="constrained")
        axes = figure.subplots(1, num_panels, squeeze=False)[0]
        _draw_shares(axes[0], study)
        _draw_running(axes[1], axes[0], study)
        if study.hit_curve:
            _draw_hits(axes[2], study)
        budget = format_bytes(study.settings.budget_bytes)
        figure.suptitle(f"{study.trace}: {study.num_requests:,} requests in {budget}")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_shares(axes: Axes, study: Study) -> None:
    names = [row.policy for row in study.rows]
    left = [0.0] * len(names)
    for part, (color, hatch) in _PARTS.items():
        widths = [100 * getattr(row, f"{part}_fraction") for row in study.rows]
        axes.barh(names, widths, left=left, color=color, hatch=hatch, edgecolor="white", label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the budget while requests wait, %")
    axes.legend(ncols=len(_PARTS), loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, columnspacing=1)


def _draw_running(axes: Axes, shares: Axes, study: Study) -> None:
    names = [row.policy for row in study.rows]
    bars = axes.barh(names, [row.mean_running for row in study.rows], color="#0072B2")
    labels = [_running_label(row.mean_running, row.num_refused) for row in study.rows]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.sharey(shares)
    axes.tick_params(labelleft=False)
    axes.margins(x=0.35)
    axes.set_xlabel("concurrent requests, mean")


def _running_label(mean_running: float, num_refused: int) -> str:
    return f"{mean_running:.0f}" + (f" ({num_refused:,} refused)" if num_refused else "")


def _draw_hits(axes: Axes, study: Study) -> None:
    sizes = [point.pool_bytes / GIB for point in study.hit_curve]
    hits = [100 * point.hit_fraction for point in study.hit_curve]
    axes.plot(sizes, hits, marker="o", color="#0072B2")
    axes.axhline(hits[-1], linestyle=":", color="#555555")
    axes.annotate(f"unbounded pool: {hits[-1]:.1f} %", (sizes[0], hits[-1]), xytext=(0, 4), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, max(hits) * 1.15 or 1)
    axes.set_xlabel("pool, GiB")
    axes.set_ylabel("prompt blocks found in the prefix cache, %")
