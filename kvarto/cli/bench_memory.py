"""`kvarto bench memory`: how does paging reduce fragmentation? Figures from a trace of real requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvarto.cli.flags import check_output, count, size
from kvarto.cli.memory_table import print_study, run_with_progress
from kvarto.cli.trace_file import open_trace
from kvarto.core.errors import UsageError
from kvarto.core.units import parse_count
from kvarto.planning.paging_study import StudySettings

_DEFAULTS = StudySettings()


def bench_memory(
    *,
    trace: Annotated[Path, Parameter(name=["--trace", "--trace-file"])],
    budget: Annotated[int, Parameter(converter=size)] = _DEFAULTS.budget_bytes,
    token_bytes: Annotated[int, Parameter(converter=size)] = _DEFAULTS.token_bytes,
    step_ms: float = _DEFAULTS.step_s * 1000,
    rate_scale: float | None = None,
    reserved_lengths: str = "2K,4K,8K,16K",
    page_sizes: str = "8,16,32,64,128",
    num_requests: Annotated[int | None, Parameter(converter=count)] = None,
    plot: Path | None = None,
    json_path: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Replay a trace against one budget under reservations, exact contiguous ranges, pages and shared pages.

    Parameters
    ----------
    trace
        Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`) or Mooncake's JSON lines (`timestamp`, `input_length`,
        `output_length`, `hash_ids`).
    budget
        Bytes for KV.
    token_bytes
        Bytes of KV per token; the default is SmolLM2-135M-Instruct's in 16 bits.
    step_ms
        Milliseconds of trace time that a step takes; each running request gains one token per step.
    rate_scale
        How much faster than recorded requests come; without it, twice what the budget could hold without waste.
    reserved_lengths
        Tokens that a contiguous reservation is made for.
    page_sizes
        Tokens per page.
    num_requests
        Only the first ones of the trace.
    plot
        Draw to this file: `.png` or `.svg`; without a suffix, to both.
    json_path
        Write all figures to this file.
    """
    settings = StudySettings(
        budget_bytes=int(_positive("--budget", budget)),
        token_bytes=int(_positive("--token-bytes", token_bytes)),
        step_s=_positive("--step-ms", step_ms) / 1000,
        rate_scale=rate_scale if rate_scale is None else _positive("--rate-scale", rate_scale),
        reserved_lengths=_counts("--reserved-lengths", reserved_lengths),
        page_sizes=_counts("--page-sizes", page_sizes),
    )
    if num_requests is not None:
        _positive("--num-requests", num_requests)
    check_output("--json", json_path)
    formats = _plot_formats(plot)
    for path in formats:
        check_output("--plot", path)
    requests = open_trace(trace).head(num_requests)
    study = run_with_progress(requests, settings)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(study.as_dict())) + b"\n")
    for path in formats:
        from kvarto.cli.memory_plot import draw

        draw(study, path)
    print_study(study)


def _positive(flag: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"`{flag} {value:g}`: must be more than 0")
    return value


def _counts(flag: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(parse_count(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"`{flag} {text}`: {error}") from error
    if any(value < 1 for value in values):
        raise UsageError(f"`{flag} {text}`: each is 1 or more")
    return values


def _plot_formats(plot: Path | None) -> list[Path]:
    """Where to draw; refused before the replay rather than after it."""
    if plot is None:
        return []
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("`--plot` needs matplotlib; install it with: pip install 'kvarto[bench]'") from error
    if plot.suffix in (".png", ".svg"):
        return [plot]
    if plot.suffix:
        raise UsageError(f"`--plot {plot}`: `.png` and `.svg` are drawn")
    return [plot.with_suffix(".png"), plot.with_suffix(".svg")]
