"""Draws what many adapters cost beside one and beside none."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from kvarto.cli.load.adapters import AdapterStudy

_COLORS = ("#999999", "#56B4E9", "#0072B2", "#D55E00")


def draw(study: AdapterStudy, path: Path) -> None:
    """Write a figure in the format that the file's suffix names."""
    kinds = list(study.loads)
    panels = {
        "output tokens/s": [figures.output_tokens_per_s for figures in study.loads.values()],
        "mean time to first token, ms": [figures.mean_ttft_ms for figures in study.loads.values()],
        "p99 between tokens, ms": [figures.p99_interval_ms for figures in study.loads.values()],
        "distinct adapters per step": [figures.adapters_per_step for figures in study.loads.values()],
    }
    with mpl.rc_context({"svg.hashsalt": "kvarto", "font.size": 9}):
        figure = Figure(figsize=(4.2 * len(panels), 2.4), layout="constrained")
        for axes, (label, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            bars = axes.barh(kinds, values, color=_COLORS)
            axes.bar_label(bars, [_short(value) for value in values], padding=3, fontsize=8)
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.set_xlabel(label)
        settings = study.settings
        ranks = ", ".join(map(str, settings.ranks))
        figure.suptitle(f"{settings.num_adapters:,} adapters of ranks {ranks}, {study.num_distinct} asked for")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
