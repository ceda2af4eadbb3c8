"""Shows a load run: how far it is, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvarto.cli.load.report import PERCENTILES, LoadReport
from kvarto.cli.load.run import Answer


@contextmanager
def progress(num_requests: int) -> Iterator[Callable[[Answer], None]]:
    """A bar on a terminal's standard error; call what it yields for each answer."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answers", total=num_requests)
        yield lambda answer: bar.advance(task)


def print_report(report: LoadReport) -> None:
    """Rates, then times in milliseconds, then errors by how often they came."""
    console = Console()
    console.print(
        f"{report.num_requests - report.num_failed:,} of {report.num_requests:,} requests answered in "
        f"{report.duration_s:.2f} s: {report.requests_per_s:.2f} requests/s, "
        f"{report.prompt_tokens_per_s:,.1f} prompt tokens/s ({report.num_cached_tokens:,} of "
        f"{report.num_prompt_tokens:,} cached), {report.output_tokens_per_s:,.1f} output tokens/s",
        soft_wrap=True,
    )
    console.print(_times(report))
    for error, how_often in report.errors.items():
        console.print(f"{how_often:,} × {error}", style="red", soft_wrap=True, markup=False)


def _times(report: LoadReport) -> Table:
    table = Table("ms", "mean", *(f"p{p}" for p in PERCENTILES), box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {
        "time to first token": report.time_to_first_token,
        "inter-token latency": report.inter_token_latency,
        "time per output token": report.time_per_output_token,
        "end to end": report.end_to_end,
    }
    for name, spread in rows.items():
        if spread is not None:
            values = (spread.mean_ms, *spread.percentiles_ms.values())
            table.add_row(name, *(f"{value:,.1f}" for value in values))
    return table
