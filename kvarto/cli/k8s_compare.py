"""`kvarto k8s compare MODEL`: the schemes side by side, for a card and a model."""

from __future__ import annotations

from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvarto.cli.flags import count, takes
from kvarto.cli.k8s_flags import ClusterConfig, OverheadConfig, cluster_options
from kvarto.cli.k8s_size import size_need
from kvarto.core.errors import UsageError
from kvarto.engine.config import EngineConfig

FORMATS = ("text", "markdown", "json")


@takes(engine=EngineConfig, cluster=ClusterConfig, overhead=OverheadConfig)
def k8s_compare(
    *,
    engine: EngineConfig,
    cluster: ClusterConfig,
    overhead: OverheadConfig,
    tokens_per_seq: Annotated[int | None, Parameter(converter=count)] = None,
    format: str = "text",
) -> None:
    """Isolation, unit, over-commit and what this model would ask for, scheme by scheme.

    Parameters
    ----------
    tokens_per_seq
        Tokens of prompt and output that each sequence holds; without it `--max-model-len`, or the model's limit.
    format
        `text`, `markdown` or `json`.
    """
    if format not in FORMATS:
        raise UsageError(f"`--format {format}` is unknown; take one of {', '.join(FORMATS)}")
    from kvarto.cluster.compare import as_dicts, comparison, markdown_table, text_blocks
    from kvarto.cluster.requests import scheme_requests

    options = cluster_options(cluster, overhead)
    _, need = size_need(engine, overhead, tokens_per_seq, on_gpu=True)
    _, cpu_need = size_need(engine, overhead, tokens_per_seq, on_gpu=False)
    requests = list(scheme_requests(need, cpu_need, options))
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(as_dicts(requests, options))).decode())
    else:
        rows = comparison(requests, options)
        print(markdown_table(rows) if format == "markdown" else text_blocks(rows))
