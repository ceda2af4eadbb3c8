"""`kvarto k8s render MODEL --scheme …`: manifests of a server whose memory is planned and whose limit matches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvarto.cli.flags import check_output, count, takes
from kvarto.cli.k8s_flags import ClusterConfig, OverheadConfig, check_name, cluster_options
from kvarto.cli.k8s_size import BUDGET_FLAGS, size_need
from kvarto.core.errors import UsageError
from kvarto.engine.config import EngineConfig


class WorkloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The workload in the cluster."""

    name: str = "kvarto"
    """Of Deployment and Service."""
    namespace: str | None = None
    """Without it manifests name none."""
    image: str = "kvarto:latest"
    """Container image; `deploy/Containerfile` builds one."""
    replicas: int = 1
    """Pods."""
    pod_model: str | None = None
    """MODEL for the server in the pod, such as `/models/mine`; without it, the one that is named here."""
    model_claim: str | None = None
    """PersistentVolumeClaim that is mounted at /models; without it models are fetched into each pod."""
    runtime_class: str | None = None
    """`runtimeClassName`, where NVIDIA's runtime is a class of its own."""
    start_limit_s: int = 900
    """Seconds that fetching and loading the model may take."""
    drain_s: int = 300
    """Seconds that running requests may take to finish when a pod ends."""
    limiter: bool = False
    """Preload the limiter of `deploy/Containerfile` under schemes that enforce nothing. It is cooperation."""


@takes(engine=EngineConfig, workload=WorkloadConfig, cluster=ClusterConfig, overhead=OverheadConfig)
def k8s_render(
    *,
    engine: EngineConfig,
    workload: WorkloadConfig,
    cluster: ClusterConfig,
    overhead: OverheadConfig,
    scheme: str,
    tokens_per_seq: Annotated[int | None, Parameter(converter=count)] = None,
    output: Path | None = None,
) -> None:
    """Print a Deployment, a Service, and what the scheme needs beside them. Flags of the engine go into the container.

    Parameters
    ----------
    scheme
        `whole`, `mig`, `time-slicing`, `mps`, `vgpu`, `hami`, `volcano`, `aliyun`, `tencent`, `kai`, `dra` or `cpu`.
    tokens_per_seq
        Tokens of prompt and output that each sequence holds; without it `--max-model-len`, or the model's limit.
    output
        Write to this file instead.
    """
    check_output("--output", output)
    from kvarto.cluster.deployment import Workload
    from kvarto.cluster.render import render
    from kvarto.cluster.schemes import find_scheme
    from kvarto.cluster.yaml_text import dump_all

    chosen, options = find_scheme(scheme), cluster_options(cluster, overhead)
    check_workload(workload)
    if engine.backend == "native" and scheme != "cpu":
        raise UsageError(f"`--backend native` computes on a CPU and `--scheme {scheme}` gives it a GPU; leave one out")
    _, need = size_need(engine, overhead, tokens_per_seq, on_gpu=scheme != "cpu")
    settings = msgspec.structs.asdict(workload)
    model = settings.pop("pod_model") or _model_in_pod(engine.model)
    rendered = render(chosen, Workload(model=model, flags=engine_flags(engine), **settings), need, options)
    text = dump_all(rendered.documents)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


def _model_in_pod(model: str) -> str:
    """The same, with a word of warning for a path: in the pod something else may be there, or nothing."""
    from kvarto.cluster.deployment import MODELS
    from kvarto.models.hub import DEMO

    if model != DEMO and Path(model).expanduser().exists() and not model.startswith(f"{MODELS}/"):
        sys.stderr.write(
            f"`{model}` is a path on this machine, and the pod is told the same; mount the models by `--model-claim` "
            f"and say where with `--pod-model {MODELS}/…`\n"
        )
    return model


def check_workload(workload: WorkloadConfig) -> None:
    """Refuse what the API server would refuse. Raises UsageError."""
    check_name("--name", workload.name, "service")
    check_name("--namespace", workload.namespace, "label")
    check_name("--image", workload.image, "image")
    check_name("--model-claim", workload.model_claim, "domain")
    check_name("--runtime-class", workload.runtime_class, "domain")
    for flag, number in (
        ("--replicas", workload.replicas),
        ("--start-limit-s", workload.start_limit_s - 4),
        ("--drain-s", workload.drain_s),
    ):
        if number < 1:
            raise UsageError(f"`{flag}` is too small; a pod needs at least one, and 5 s to start")


def engine_flags(engine: EngineConfig) -> tuple[str, ...]:
    """Flags of `kvarto serve` that differ from their defaults, but for those that the rendering itself writes."""
    words: list[str] = []
    for field in msgspec.structs.fields(EngineConfig):
        value = getattr(engine, field.name)
        if field.name in ("model", "device", "secret", "faults", *BUDGET_FLAGS) or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return tuple(words)
