"""`kvarto bench serve`: load a running OpenAI-compatible server, and time its answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from kvarto.cli.flags import check_output, count
from kvarto.core.errors import UsageError

if TYPE_CHECKING:  # imported where they are used, so that `--help` answers at once
    from kvarto.cli.load.report import LoadReport
    from kvarto.cli.load.workload import Workload

_Count = Annotated[int, Parameter(converter=count)]
_MaybeCount = Annotated[int | None, Parameter(converter=count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """Flags of `kvarto bench serve`."""

    url: Annotated[str, Parameter(name=["--url", "--base-url"])] = "http://127.0.0.1:8000"
    """Where the server listens."""
    model: str | None = None
    """Name in the requests; without it, the first of `/v1/models`."""
    api_key: Annotated[str | None, Parameter(env_var="KVARTO_API_KEY", show_env_var=False)] = None
    """Sent as a bearer token."""
    num_prompts: Annotated[int, Parameter(name=["--num-prompts", "--num-requests"], converter=count)] = 100
    """Requests to send; of a trace, the first ones."""
    max_concurrency: _MaybeCount = None
    """Requests in flight at most; 8 when neither rate nor trace says when to send."""
    request_rate: float | None = None
    """Requests per second, arriving at random (Poisson), whatever the server does."""
    input_len: Annotated[int, Parameter(name=["--input-len", "--random-input-len"], converter=count)] = 256
    """Prompt tokens, on average."""
    output_len: Annotated[int, Parameter(name=["--output-len", "--random-output-len"], converter=count)] = 64
    """Output tokens, on average."""
    length_spread: Annotated[float, Parameter(name=["--length-spread", "--random-range-ratio"])] = 0.0
    """Lengths vary evenly by up to this share of the mean, 0 to 1."""
    trace: Annotated[Path | None, Parameter(name=["--trace", "--trace-file"])] = None
    """Arrivals and lengths from Azure's CSV, or from Mooncake's JSON lines, whose equal blocks become equal tokens."""
    rate_scale: float = 1.0
    """How much faster than recorded a trace is sent."""
    max_request_tokens: _MaybeCount = None
    """Leave out requests of a trace with more tokens than this, prompt and output together."""
    temperature: float = 0.0
    """Of every request; 0 is greedy."""
    seed: int = 0
    """Of lengths, arrivals and prompts."""
    json: Path | None = None
    """Write all figures to this file."""


def bench_serve(*, flags: Annotated[LoadFlags, Parameter(name="*")] = LoadFlags()) -> int:
    """Load a running server and time its answers: first token, between tokens, whole, and throughput.

    Every output has exactly the length asked for (`ignore_eos`), so two servers do the same work.
    """
    import uvloop

    from kvarto.cli.load.table import print_report

    _check(flags)
    workload = _workload(flags)
    result = uvloop.run(_run(flags, workload))
    print_report(result)
    if flags.json is not None:
        flags.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return 1 if result.num_failed else 0


def _check(flags: LoadFlags) -> None:
    for name, value in (("--num-prompts", flags.num_prompts), ("--input-len", flags.input_len),
                        ("--output-len", flags.output_len), ("--rate-scale", flags.rate_scale),
                        ("--request-rate", flags.request_rate), ("--max-concurrency", flags.max_concurrency),
                        ("--max-request-tokens", flags.max_request_tokens)):  # fmt: skip
        if value is not None and not value > 0:
            raise UsageError(f"`{name} {value}`: must be more than 0")
    if not 0 <= flags.length_spread <= 1:
        raise UsageError(f"`--length-spread {flags.length_spread}`: 0 (all equal) to 1")
    if flags.trace is not None and flags.request_rate is not None:
        raise UsageError("a trace says when requests come; give `--rate-scale` instead of `--request-rate`")
    check_output("--json", flags.json)


def _workload(flags: LoadFlags) -> Workload:
    from kvarto.cli.load.workload import LengthRange, random_workload, trace_workload
    from kvarto.cli.trace_file import open_trace

    if flags.trace is None:
        prompt = LengthRange(flags.input_len, flags.length_spread)
        output = LengthRange(flags.output_len, flags.length_spread)
        return random_workload(flags.num_prompts, prompt, output, flags.request_rate, flags.seed)
    trace = open_trace(flags.trace).head(flags.num_prompts)
    workload = trace_workload(trace, rate_scale=flags.rate_scale, max_tokens=flags.max_request_tokens)
    if not len(workload):
        raise UsageError(f"no request of `{flags.trace}` has at most {flags.max_request_tokens} tokens")
    return workload


async def _run(flags: LoadFlags, workload: Workload) -> LoadReport:
    from kvarto.cli.load.report import report
    from kvarto.cli.load.run import LoadSettings, find_vocabulary, run_load
    from kvarto.cli.load.table import progress
    from kvarto.cli.load.workload import PromptIds
    from kvarto.cli.openai_client import OpenAIClient

    concurrency = flags.max_concurrency
    if concurrency is None and workload.arrival_s is None:
        concurrency = 8
    async with OpenAIClient(flags.url, api_key=flags.api_key) as client:
        model = flags.model or (await client.models())[0]
        prompts = PromptIds(await find_vocabulary(client, model), flags.seed)
        settings = LoadSettings(model, concurrency, flags.temperature)
        with progress(len(workload)) as advance:
            answers, duration_s = await run_load(client, workload, prompts, settings, advance)
    return report(answers, duration_s)
