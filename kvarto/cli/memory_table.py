"""Prints the figures of `kvarto bench memory`, and how far the replay is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvarto.core.units import format_bytes
from kvarto.planning.paging_study import Study, StudyRow, StudySettings, run_study
from kvarto.planning.traces import Trace

_MEMORY_COLUMNS = ("", "used", "internal", "external", "cached", "idle", "waste", "formula")
_REQUEST_COLUMNS = ("", "running", "vs exact", "peak", "tables", "refused", "preempts", "hits")
_NOTE = (
    "used + internal + external + cached + idle = the budget, while requests waited for memory. waste: empty share of "
    "what requests held, over their whole lives; formula: what it must be. running: mean concurrent requests; "
    "vs exact: over the best that knows each true length. refused: longer than reservation or budget. hits: blocks "
    "found in the prefix cache."
)


def run_with_progress(trace: Trace, settings: StudySettings) -> Study:
    """`run_study`, with the policy that runs now and its seconds shown on a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying")
        return run_study(trace, settings, lambda name: progress.update(task, description=f"replaying: {name}"))


def print_study(study: Study) -> None:
    """Where the memory goes, who runs, and the hit rates of the prefix cache."""
    console = Console()
    settings = study.settings
    console.print(
        f"{study.trace}: {study.num_requests:,} requests, {study.rate_scale:.1f} times as fast as recorded; "
        f"{format_bytes(settings.budget_bytes)} for KV, {settings.token_bytes:,} B a token"
    )
    console.print(_table(study, _MEMORY_COLUMNS, _memory_cells))
    console.print(_table(study, _REQUEST_COLUMNS, _request_cells))
    if study.hit_curve:
        console.print(_hit_table(study))
    console.print(_NOTE, style="dim")


def _table(study: Study, columns: tuple[str, ...], cells: Callable[[StudyRow], tuple[str, ...]]) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row, following in zip_longest(study.rows, study.rows[1:]):
        is_last_of_kind = following is not None and following.kind != row.kind
        table.add_row(row.policy, *cells(row), end_section=is_last_of_kind)
    return table


def _memory_cells(row: StudyRow) -> tuple[str, ...]:
    fractions = (
        row.used_fraction, row.internal_fraction, row.external_fraction, row.cached_fraction, row.idle_fraction
    )  # fmt: skip
    formula = "" if row.expected_waste_fraction is None else f"{row.expected_waste_fraction:.2%}"
    return (*(f"{fraction:.1%}" for fraction in fractions), f"{row.waste_fraction:.2%}", formula)


def _request_cells(row: StudyRow) -> tuple[str, ...]:
    return (
        f"{row.mean_running:.1f}",
        f"{row.oracle_share:.0%}",
        f"{row.peak_running:,}",
        format_bytes(row.peak_table_bytes),
        f"{row.num_refused:,}",
        f"{row.num_preemptions:,}",
        "" if row.hit_fraction is None else f"{row.hit_fraction:.1%}",
    )


def _hit_table(study: Study) -> Table:
    table = Table("pool", "blocks", "prefix hits", title="Prefix cache, one request at a time", box=box.SIMPLE_HEAD)
    for point in study.hit_curve:
        table.add_row(format_bytes(point.pool_bytes), f"{point.num_blocks:,}", f"{point.hit_fraction:.1%}")
    return table
