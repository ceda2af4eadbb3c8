"""`kvarto k8s size MODEL`: the memory request of a pod in every scheme's own unit, and which scheme to take."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from kvarto.cli.flags import count, takes
from kvarto.cli.k8s_flags import ClusterConfig, OverheadConfig, cluster_options
from kvarto.core.errors import UsageError
from kvarto.engine.config import EngineConfig

if TYPE_CHECKING:
    from kvarto.cluster.need import Need
    from kvarto.cluster.schemes import ClusterOptions
    from kvarto.core.layout import Layout

GPU = "cuda:0"
BUDGET_FLAGS = ("device_memory", "gpu_memory_utilization", "kv_cache_memory_bytes")


@takes(engine=EngineConfig, cluster=ClusterConfig, overhead=OverheadConfig)
def k8s_size(
    *,
    engine: EngineConfig,
    cluster: ClusterConfig,
    overhead: OverheadConfig,
    tokens_per_seq: Annotated[int | None, Parameter(converter=count)] = None,
    json: bool = False,
) -> int:
    """How much GPU memory a pod must ask for, so that its server holds the load.

    The load is `--max-num-seqs` sequences of `--tokens-per-seq` tokens at once. Nothing of it need be here but the
    model's files: weights are not loaded, and no GPU is asked.

    Parameters
    ----------
    tokens_per_seq
        Tokens of prompt and output that each sequence holds; without it `--max-model-len`, or the model's limit.
    json
        Print JSON.
    """
    options = cluster_options(cluster, overhead)
    layout, need = size_need(engine, overhead, tokens_per_seq, on_gpu=True)
    _, cpu_need = size_need(engine, overhead, tokens_per_seq, on_gpu=False)
    print(_as_json(layout, need, cpu_need, options) if json else _as_text(layout, need, cpu_need, options))
    return 0 if options.card is None or need.limit_bytes <= options.card.memory_bytes else 1


def size_need(
    engine: EngineConfig, overhead: OverheadConfig, tokens_per_seq: int | None, *, on_gpu: bool
) -> tuple[Layout, Need]:
    """The layout that holds the load, and what it needs of a node. Raises KvartoError."""
    from kvarto.cluster.need import need_of
    from kvarto.engine.sizing import size_engine
    from kvarto.models.hub import resolve

    for name in BUDGET_FLAGS:
        if getattr(engine, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"`{flag}` is what `kvarto k8s` works out; say `--max-num-seqs` and `--tokens-per-seq`")
    if tokens_per_seq is not None and tokens_per_seq < 1:
        raise UsageError(f"`--tokens-per-seq {tokens_per_seq}` is no load; give 1 or more")
    path = resolve(engine.model, lambda line: print(line, file=sys.stderr))
    if on_gpu and engine.backend == "native":
        engine = msgspec.structs.replace(engine, backend="auto")  # the native one computes on a CPU
    config = msgspec.structs.replace(engine, model=str(path), device=GPU if on_gpu else "cpu")
    _, layout = size_engine(config, tokens_per_seq)
    return layout, need_of(layout, on_gpu=on_gpu, overhead_bytes=overhead.overhead_memory)


def _as_text(layout: Layout, need: Need, cpu_need: Need, options: ClusterOptions) -> str:
    from kvarto.cluster.advice import advise
    from kvarto.cluster.requests import scheme_requests
    from kvarto.core.units import format_bytes

    rows = [
        ("weights", layout.weights.size_bytes, ""),
        ("activations", layout.activations.size_bytes, f"steps of {layout.limits.max_tokens:,} tokens"),
        ("pages", layout.pages.size_bytes, f"{layout.budget.source}; {layout.num_pages:,} pages"),
        ("arena", need.arena_bytes, "`--device-memory`, whole MiB"),
        ("driver", need.overhead_bytes, "context and workspaces: an allowance, `--overhead-memory` sets it"),
        ("GPU memory", need.limit_bytes, "what a limit must leave"),
        ("host memory", need.host_bytes, "of the container, beside the GPU"),
    ]
    cells = ((name, f"{size_bytes:,}", format_bytes(size_bytes), note) for name, size_bytes, note in rows)
    lines = [f"{name:<12}{exact:>19}  {rounded:>11}  {note}".rstrip() for name, exact, rounded, note in cells]
    lines.append("")
    lines += [f"{each.scheme.name:<14}{each.text}" for each in scheme_requests(need, cpu_need, options)]
    lines.append("")
    if options.card is None:
        lines.append("Name the card, such as `--card H100-80`, for MIG profiles, equal parts, and a recommendation.")
    else:
        advice = advise(need, options.card)
        taken = "nothing fits" if advice.scheme is None else f"take `--scheme {advice.scheme}`"
        lines.append(f"On `{options.card.name}` {taken}: {'; '.join(advice.reasons)}.")
    return "\n".join(lines)


def _as_json(layout: Layout, need: Need, cpu_need: Need, options: ClusterOptions) -> str:
    from kvarto.cluster.advice import advise
    from kvarto.cluster.compare import as_dicts
    from kvarto.cluster.requests import scheme_requests

    answer: dict[str, Any] = {
        "weights_bytes": layout.weights.size_bytes,
        "activations_bytes": layout.activations.size_bytes,
        "pages_bytes": layout.pages.size_bytes,
        "num_pages": layout.num_pages,
        "arena_bytes": need.arena_bytes,
        "overhead_bytes": need.overhead_bytes,
        "limit_bytes": need.limit_bytes,
        "host_bytes": need.host_bytes,
        "schemes": as_dicts(list(scheme_requests(need, cpu_need, options)), options),
    }
    if options.card is not None:
        advice = advise(need, options.card)
        answer["advice"] = {"scheme": advice.scheme, "reasons": advice.reasons}
    return msgspec.json.format(msgspec.json.encode(answer)).decode()
