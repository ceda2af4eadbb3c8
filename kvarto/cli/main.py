"""`kvarto`: finds the command, runs it, and turns errors into one box and an exit code.

Nothing of a command is imported until it is called, so `kvarto --help` answers at once. Exit codes: 0 done, 1 failed,
2 the command line, the model or the budget can't work, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from kvarto.cli.refused_flags import refuse_foreign
from kvarto.core.errors import EngineError, KvartoError

VERBOSE = ("-v", "--verbose")
FAILED = 1
USAGE = 2
INTERRUPTED = 130


def _version() -> str:
    from importlib.metadata import version

    return f"kvarto {version('kvarto')}"


app = App(
    name="kvarto",
    help="Serve large language models inside a memory budget that you name.",
    help_epilogue=(
        "Every flag is also an environment variable, `KVARTO_` and its name; dashes and underscores are the same. "
        "Sizes are written `8GiB`, counts `4096`, `4k` or `4K`. `-v` shows where an error came from."
    ),
    help_format="plaintext",  # markdown would import three packages to draw a backtick
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative_iterable=()),
    version=_version,
)
_COMMANDS = {
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "chat": "Talk to a model: a running server's, or one started here.",
    "generate": "Continue one prompt and print the text.",
    "plan": "Print where every byte would go, without loading weights.",
    "pull": "Download a model into the local cache.",
}
for _name, _help in _COMMANDS.items():
    app.command(f"kvarto.cli.{_name}:{_name}", name=_name, help=_help, help_format="markdown")

bench = App(name="bench", help="Measure: a server, many adapters, or ways to allocate memory.", help_format="markdown")
bench.command("kvarto.cli.bench_serve:bench_serve", name="serve", help="Load a running server and time its answers.")
bench.command(
    "kvarto.cli.bench_memory:bench_memory", name="memory", help="How much memory paging saves, on a trace of requests."
)
bench.command(
    "kvarto.cli.bench_adapters:bench_adapters", name="adapters", help="Many LoRA adapters against one and none."
)
app.command(bench)

k8s = App(name="k8s", help="Size, render and check pods on shared GPUs.", help_format="markdown")
_K8S_COMMANDS = {
    "size": "How much memory a pod must ask for, in every scheme's own unit.",
    "mig": "MIG profiles of a card, and the packing of models onto cards.",
    "render": "Manifests of a server under one scheme.",
    "compare": "The schemes side by side, for a card and a model.",
    "check": "Find and correct mistakes in manifests.",
}
for _name, _help in _K8S_COMMANDS.items():
    k8s.command(f"kvarto.cli.k8s_{_name}:k8s_{_name}", name=_name, help=_help)
limiter = App(name="limiter", help="The preloaded limit of GPU memory.", help_format="markdown")
limiter.command(
    "kvarto.cli.k8s_limiter:k8s_limiter_status", name="status", help="What it has counted in this container."
)
k8s.command(limiter)
app.command(k8s)


def main() -> None:
    """Entry point of the `kvarto` script."""
    sys.exit(run(sys.argv[1:]))


def run(tokens: Sequence[str]) -> int:
    """Run one command line; the exit code. Errors raised on purpose are shown as a box on standard error."""
    is_verbose, tokens = _take_verbose(tokens)
    try:
        refuse_foreign(tokens)
        code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads any more; Python would complain at exit
        return FAILED
    except (CycloptsError, KvartoError) as error:
        if is_verbose:
            raise
        _show(_sentence(error))
        return FAILED if isinstance(error, EngineError) else USAGE
    except Exception as error:
        if is_verbose:
            raise
        _show(f"{type(error).__name__}: {error}\nThis is a defect of Kvarto; `-v` shows where it happened.")
        return FAILED


def _take_verbose(tokens: Sequence[str]) -> tuple[bool, list[str]]:
    """`-v` may stand anywhere before `--`, and belongs to every command."""
    end = list(tokens).index("--") if "--" in tokens else len(tokens)
    kept = [token for token in tokens[:end] if token not in VERBOSE]
    return len(kept) < end, kept + list(tokens[end:])


def _sentence(error: Exception) -> str:
    if isinstance(error, UnusedCliTokensError):
        rest = " ".join(map(str, error.unused_tokens or ()))
        return f"`{rest}` is left over; write text with spaces in quotes, and a flag's name before its value"
    return str(error)


def _show(message: str) -> None:
    """A box with lines above and below only, so that a command in it can be copied; plain when not a terminal."""
    from rich import box
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(stderr=True)
    if console.is_terminal:
        console.print(Panel(Text(message), title="Error", title_align="left", border_style="red", box=box.HORIZONTALS))
    else:
        print(f"error: {message}", file=sys.stderr)
