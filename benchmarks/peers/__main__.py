"""How fast are other engines on this machine, and how fast are we? One client, one set of prompts, real servers.

    python -m benchmarks.peers install                       each peer into a virtual environment of its own
    python -m benchmarks.peers limits                        what the machine can do: bandwidth, matrix products
    python -m benchmarks.peers run kvarto llama.cpp:q4_0     ours against a peer, A B A B, with ratios
    python -m benchmarks.peers sweep kvarto llama.cpp:q4_0   tokens/s against concurrency and against context
    python -m benchmarks.peers plot FILE... --folder FOLDER  draw what `--json` wrote
    python -m benchmarks.peers adapters                      LoRA adapters for the column `lora`

A server is written `ENGINE[:FORMAT] [VARIABLE=VALUE...] [FLAG...]`, in quotes when it has more than one word, so two
configurations of one engine meet as easily as two engines. The first one named is the baseline, and each of the others
is measured in turn with it. With `--columns lora` every server gets its engine's flags for adapters, and is asked for
the bare base too (`c32`). `{adapters}` in a flag is their folder, and says that all such flags are there:

    "vllm:bf16 --enable-lora --max-loras 4 --max-lora-rank 16 --lora-modules adapter-0={adapters}/adapter-0 …"

    prompts → workload → client → server (a process; a shim where an engine has no OpenAI server) → figures → table
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.compare import Comparison, Meeting
from benchmarks.peers.engines.openvino import OpenVino
from benchmarks.peers.folders import Folders
from benchmarks.peers.gguf_adapter import convert_adapter
from benchmarks.peers.plots import draw
from benchmarks.peers.prompts import PromptMaker, corpus_text, digest
from benchmarks.peers.servers import ENGINES, ServerName
from benchmarks.peers.sweep import CONCURRENCIES, CONTEXT_TOKENS, concurrency_columns, context_columns
from benchmarks.peers.table import commands, table
from benchmarks.peers.weights import fetch_demo, make_folders, make_gguf_files
from benchmarks.peers.workload import ADAPTER_COLUMNS, ADAPTER_RANK, ADAPTERS, BARE_COLUMN, COLUMNS, Column
from kvarto.adapters.random_adapter import ALL_LINEAR, RandomAdapter
from kvarto.cli.load.adapters import base_targets
from kvarto.core.errors import KvartoError, UsageError
from kvarto.models.tokenizer import tokenizer_from_folder


def parser() -> argparse.ArgumentParser:
    """Commands and their flags."""
    top = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Ours and others, side by side.")
    top.add_argument("--cache", type=Path, help="where peers live (default ~/.cache/kvarto/peers)")
    commands = top.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="peers and the formats of the demo model that they read")
    install.add_argument("names", nargs="*", help=f"of {', '.join(ENGINES)}; all by default")
    run = commands.add_parser("run", help="the table")
    run.add_argument("--columns", default=",".join(column.name for column in COLUMNS))
    sweep = commands.add_parser("sweep", help="against concurrency and context")
    sweep.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)))
    sweep.add_argument("--context", default=",".join(map(str, CONTEXT_TOKENS)))
    for measuring, repeat in ((run, 3), (sweep, 1)):
        measuring.add_argument("servers", nargs="+", help="ENGINE[:FORMAT] [FLAG...]; the first is the baseline")
        measuring.add_argument("--repeat", type=int, default=repeat, help="measurements of each column and server")
        measuring.add_argument("--seed", type=int, default=0, help="of the prompts")
        measuring.add_argument("--json", type=Path, help="write everything measured to this file")
    commands.add_parser("adapters", help="LoRA adapters for the column `lora`")
    commands.add_parser("limits", help="bandwidth and matrix products of this machine")
    plot = commands.add_parser("plot", help="draw what `--json` wrote")
    plot.add_argument("files", nargs="+", type=Path)
    plot.add_argument("--folder", type=Path, required=True, help="where the pictures go")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors are one sentence."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers are stopped on the way out
    flags = parser().parse_args(arguments)
    folders = Folders.default(flags.cache)
    try:
        COMMANDS[flags.command](folders, flags)
    except KvartoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def install(folders: Folders, flags: argparse.Namespace) -> None:
    """The engines named, then the formats."""
    for name in flags.names or ENGINES:
        if name not in ENGINES:
            raise UsageError(f"no engine `{name}`; there are {', '.join(ENGINES)}")
        ENGINES[name].install(folders)
    fetch_demo(folders.gguf)
    make_folders(folders)
    make_gguf_files(folders)


def run(folders: Folders, flags: argparse.Namespace) -> None:
    """The table."""
    compare(folders, flags, chosen_columns(flags.columns))


def sweep(folders: Folders, flags: argparse.Namespace) -> None:
    """The same, with a column per point."""
    compare(folders, flags, concurrency_columns(counts(flags.concurrency)) + context_columns(counts(flags.context)))


def compare(folders: Folders, flags: argparse.Namespace, columns: tuple[Column, ...]) -> None:
    """The baseline with each of the others; alone when it is the only one."""
    names = [ServerName.parse(text) for text in flags.servers]
    adapters = ADAPTERS if any(column.needs_adapters for column in columns) else ()
    comparison = Comparison(folders, prompt_maker(folders, flags.seed), columns, flags.repeat, say)
    baseline, *others = names
    pairs = [[baseline, other] for other in others] or [[baseline]]
    meetings = [comparison.meet([name.launch(folders, adapters) for name in pair]) for pair in pairs]
    print(table(meetings, columns))
    print(commands(meetings))
    report(meetings, comparison, flags.json)


def report(meetings: Sequence[Meeting], comparison: Comparison, path: Path | None) -> None:
    """Everything measured as one JSON line, and to a file when asked."""
    prompts = comparison.maker.mixed("digest")
    result = {
        "benchmark": "peers",
        "prompts": digest(prompts),
        "meetings": [[row.as_dict() for row in meeting.rows] for meeting in meetings],
    }
    text = json.dumps(result)
    if path is not None:
        path.write_text(text + "\n")
    print(text)


def adapters(folders: Folders, flags: argparse.Namespace) -> None:
    """Written anew, as PEFT has them and as llama.cpp does; what OpenVINO needs for them, when it is installed."""
    base = base_targets(str(folders.gguf))
    for folder in (folders.adapters, folders.gguf_adapters):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for index, name in enumerate(ADAPTERS):
        RandomAdapter(ALL_LINEAR, ADAPTER_RANK, seed=index).write(folders.adapters / name, base)
        convert_adapter(folders.adapters / name, folders.gguf_adapters / f"{name}.gguf", base)
    if folders.environment("openvino").exists():
        OpenVino().write_named(folders)
    print(f"{folders.adapters}\n{folders.gguf_adapters}")


def limits(folders: Folders, flags: argparse.Namespace) -> None:
    """What the machine can do."""
    from benchmarks.peers.limits import measure  # PyTorch takes seconds

    measured = measure()
    for limit in measured:
        print(f"{limit.what:36} {limit.rate:8.1f} {limit.unit}")
    print(json.dumps({"benchmark": "peers.limits", "rates": {limit.what: limit.rate for limit in measured}}))


def plot(folders: Folders, flags: argparse.Namespace) -> None:
    """Pictures."""
    for path in draw(flags.files, flags.folder):
        print(path)


def counts(text: str) -> tuple[int, ...]:
    """`1,8,32`; nothing for an empty text. Raises UsageError."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise UsageError(f"`{text}`: numbers with commas between them") from error
    if any(number < 1 for number in numbers):
        raise UsageError(f"`{text}`: each is 1 or more")
    return numbers


def chosen_columns(text: str) -> tuple[Column, ...]:
    """By name, in the order of the table, and the bare base beside adapters. Raises UsageError for another name."""
    names = text.split(",")
    known = {column.name: column for column in (*COLUMNS, *ADAPTER_COLUMNS)}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"`--columns {text}`: no column `{unknown[0]}`; there are {', '.join(known)}")
    if any(known[name].needs_adapters for name in names):
        names.append(BARE_COLUMN)
    return tuple(column for name, column in known.items() if name in names)


def prompt_maker(folders: Folders, seed: int) -> PromptMaker:
    """Over the text of this checkout."""
    return PromptMaker(tokenizer_from_folder(folders.folder("f32")).encode(corpus_text()), seed)


def say(text: str) -> None:
    """Progress, as it comes."""
    print(text, file=sys.stderr, flush=True)


COMMANDS = {
    "install": install, "run": run, "sweep": sweep, "adapters": adapters, "limits": limits, "plot": plot,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
