"""`kvarto bench adapters`: many LoRA adapters against one, and against the bare base, on a server started here."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from kvarto.cli.flags import DEFAULT_MODEL, check_output, count
from kvarto.core.errors import UsageError

if TYPE_CHECKING:  # imported where they are used, so that `--help` answers at once
    from kvarto.cli.load.adapters import AdapterStudy

_Count = Annotated[int, Parameter(converter=count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFlags:
    """Flags of `kvarto bench adapters`."""

    num_adapters: _Count = 100
    """Adapters that the server knows by name. They are random; those that no request names are files with holes."""
    ranks: str = "8,16,32,64"
    """Their ranks, by turns."""
    modules: str = "all"
    """`all`: every linear of a layer; `qv`: the projections of queries and values."""
    zipf: float = 1.0
    """The k-th adapter is asked for in proportion to 1 / k^zipf; 0 asks for all alike."""
    num_prompts: Annotated[int, Parameter(name=["--num-prompts", "--num-requests"], converter=count)] = 32
    """Requests of each run."""
    max_concurrency: _Count = 32
    """Requests in flight at most."""
    max_num_seqs: Annotated[int | None, Parameter(converter=count)] = None
    """Sequences that run at once; without it, as many as are in flight. With fewer, requests wait, and the server can
    choose whom to run together."""
    ungrouped: bool = False
    """Run the many adapters once more on a server that does not prefer adapters which run already."""
    input_len: _Count = 256
    """Prompt tokens, on average; they vary evenly by up to 90 %."""
    output_len: _Count = 96
    """Output tokens, on average; they vary evenly by up to a third."""
    rounds: _Count = 3
    """Times that the three runs take turns; medians are shown."""
    seed: int = 0
    """Of adapters, lengths, prompts and names."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw them into this file (`.png`, `.svg` or `.pdf`)."""


def bench_adapters(
    model: str = DEFAULT_MODEL, *serve_flags: Annotated[str, Parameter(allow_leading_hyphen=True)],
    flags: Annotated[AdapterFlags, Parameter(name="*")] = AdapterFlags(),
) -> int:  # fmt: skip
    """Serve MODEL with many LoRA adapters, and compare: all of them by a Zipf law, one of them, none.

    Counts how many distinct adapters a step holds, which it reads once each, and what they weigh.

    What stands behind `--` goes to `kvarto serve` as it is, such as `-- --device-memory 2GiB`.
    """
    from kvarto.cli.load.adapters import print_study

    _check(flags)
    with tempfile.TemporaryDirectory(prefix="kvarto-adapters-") as folder:
        study = _run(model, serve_flags, flags, Path(folder))
    print_study(study)
    if flags.json is not None:
        flags.json.write_bytes(msgspec.json.format(msgspec.json.encode(study)) + b"\n")
    if flags.plot is not None:
        from kvarto.cli.load.adapter_plot import draw

        draw(study, flags.plot)
    return 1 if study.num_failed else 0


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks that a flag names. Raises UsageError."""
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise UsageError(f"`--ranks {text}`: write whole numbers with commas, such as `8,16`")
    return ranks


def _check(flags: AdapterFlags) -> None:
    ranks_of(flags.ranks)
    if flags.modules not in ("all", "qv"):
        raise UsageError(f"`--modules {flags.modules}` is neither `all` nor `qv`")
    if flags.zipf < 0:
        raise UsageError(f"`--zipf {flags.zipf}`: 0 or more")
    for name in ("num_adapters", "num_prompts", "max_concurrency", "input_len", "output_len", "rounds"):
        if getattr(flags, name) < 1:
            raise UsageError(f"`--{name.replace('_', '-')} {getattr(flags, name)}`: must be more than 0")
    if flags.max_num_seqs is not None and flags.max_num_seqs < 1:
        raise UsageError(f"`--max-num-seqs {flags.max_num_seqs}`: must be more than 0")
    check_output("--json", flags.json)
    check_output("--plot", flags.plot)


def _run(model: str, serve_flags: tuple[str, ...], flags: AdapterFlags, folder: Path) -> AdapterStudy:
    import uvloop

    from kvarto.cli.load.adapters import UNGROUPED, AdapterSet, StudySettings, run_study
    from kvarto.cli.local_server import local_server

    settings = StudySettings(
        num_adapters=flags.num_adapters,
        ranks=ranks_of(flags.ranks),
        modules=flags.modules,
        zipf=flags.zipf,
        num_prompts=flags.num_prompts,
        max_concurrency=flags.max_concurrency,
        input_len=flags.input_len,
        output_len=flags.output_len,
        rounds=flags.rounds,
        seed=flags.seed,
    )
    adapters = AdapterSet.make(model, settings, folder)
    known = ["--adapter-dir", str(folder), "--max-lora-rank", str(max(settings.ranks))]
    known += ["--max-num-seqs", str(flags.max_num_seqs or flags.max_concurrency)]
    with local_server([model, *known, *serve_flags]) as url:
        study = uvloop.run(run_study(url, settings, adapters))
    if not flags.ungrouped:
        return study
    with local_server([model, *known, "--no-adapter-affinity", *serve_flags]) as url:
        return study.beside(uvloop.run(run_study(url, settings, adapters, (UNGROUPED,))))
