"""Pods: who places them, what they may see, misspelt fields."""

from __future__ import annotations

from collections.abc import Iterator

from tests.cluster.manifests import GPU_SCHEMES, LIMIT_MIB, container, correct_manifests, of_kind, template
from tests.cluster.mistakes.base import (
    ALL_SCHEMES,
    Documents,
    Mistake,
    annotate,
    env,
    misplaced,
    moved,
    shares,
    spec,
    with_runtime_class,
)


def scheduling() -> Iterator[Mistake]:
    for scheme in GPU_SCHEMES:
        yield Mistake(
            "node-name", scheme, spec(nodeName="gpu-7"), "node-name",
            "`nodeName: gpu-7` passes over every scheduler, so nobody counts this pod's GPU memory; write "
            "`nodeSelector: {kubernetes.io/hostname: gpu-7}`",
            lambda documents: template(documents)["spec"].setdefault("nodeSelector", {}).update(
                {"kubernetes.io/hostname": "gpu-7"}
            ),
        )  # fmt: skip
        yield Mistake(
            "runtime-class", scheme, with_runtime_class, "runtime-class",
            "no `runtimeClassName`, and NVIDIA's runtime is the class `nvidia`; write it",
            lambda documents: (with_runtime_class(documents), spec(runtimeClassName="nvidia")(documents)),
        )  # fmt: skip
    for scheme, wanted in (("volcano", "volcano"), ("kai", "kai-scheduler")):
        yield Mistake(
            "no-scheduler", scheme,
            lambda documents: template(documents)["spec"].pop("schedulerName"),
            "scheduler-name",
            f"no `schedulerName`: only `{wanted}` counts what this pod asks for; write `schedulerName: {wanted}`",
        )  # fmt: skip
        yield Mistake(
            "other-scheduler", scheme, spec(schedulerName="mine"), "scheduler-name",
            f"`schedulerName: mine`: only `{wanted}` counts what this pod asks for; write `schedulerName: {wanted}`",
        )  # fmt: skip
    for scheme, reason in (
        ("hami", "HAMi's webhook passes over pods that name one, and their limit is forgotten"),
        ("aliyun", "Alibaba's extender belongs to the default scheduler"),
        ("tencent", "gpu-manager's extender belongs to the default scheduler"),
    ):
        yield Mistake(
            "own-scheduler", scheme, spec(schedulerName="mine"), "scheduler-name",
            f"`schedulerName: mine`: {reason}; leave it out",
        )  # fmt: skip
    yield Mistake(
        "no-queue", "kai",
        lambda documents: template(documents)["metadata"]["labels"].pop("kai.scheduler/queue"),
        "kai-queue",
        "no label `kai.scheduler/queue`: KAI leaves pods without a queue waiting; write `default-queue`",
    )  # fmt: skip


def annotations() -> Iterator[Mistake]:
    for name in (
        "nvidia.com/use-gputype", "nvidia.com/nouse-gputype", "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid",
        "nvidia.com/numa-bind", "nvidia.com/vgpu-mode", "hami.io/node-scheduler-policy", "hami.io/gpu-scheduler-policy",
    ):  # fmt: skip
        yield misplaced("hami", name, "A100")
    yield misplaced("kai", "gpu-fraction-num-devices", "1")

    def memory_above(documents: Documents) -> None:
        value = template(documents)["metadata"]["annotations"].pop("gpu-memory")
        of_kind(documents, "Deployment")["metadata"]["annotations"] = {"gpu-memory": value}

    yield Mistake(
        "place-gpu-memory", "kai", memory_above, "annotation-place",
        "annotation `gpu-memory` stands on the Deployment, where nobody reads it; move it to "
        "`spec.template.metadata.annotations`",
        lambda documents: of_kind(documents, "Deployment")["metadata"].update(annotations={}),
    )  # fmt: skip
    for scheme in ALL_SCHEMES:
        yield Mistake(
            "annotation-number", scheme,
            lambda documents: annotate(documents, "prometheus.io/port", 8000),
            "annotation-text",
            '`prometheus.io/port: 8000` is no text, as annotations must be; write `"8000"`',
        )  # fmt: skip
    yield Mistake(
        "memory-number", "kai", lambda documents: annotate(documents, "gpu-memory", LIMIT_MIB), "annotation-text",
        f'`gpu-memory: {LIMIT_MIB}` is no text, as annotations must be; write `"{LIMIT_MIB}"`',
    )  # fmt: skip


def access() -> Iterator[Mistake]:
    for scheme in GPU_SCHEMES:
        yield Mistake(
            "privileged", scheme, lambda documents: container(documents)["securityContext"].update(privileged=True),
            "privileged", "`privileged: true` gives the container every GPU of the node, past any limit; leave it out",
        )  # fmt: skip
        yield Mistake(
            "visible-all", scheme, env("NVIDIA_VISIBLE_DEVICES", "all"), "visible-devices",
            "`NVIDIA_VISIBLE_DEVICES=all` shows the container GPUs of the node beside those that it asks for; "
            "leave it out",
        )  # fmt: skip
        yield Mistake(
            "split-size", scheme, env("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:4096"), "max-split-size",
            "`PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:4096`: `max_split_size_mb` only says which blocks "
            "PyTorch splits "
            "and limits no memory; leave it out",
        )  # fmt: skip
    yield Mistake(
        "visible-all", "cpu", env("NVIDIA_VISIBLE_DEVICES", "all"), "visible-devices",
        "`NVIDIA_VISIBLE_DEVICES=all` shows the container GPUs of the node though it asks for none, and nobody counts "
        "it; leave it out",
    )  # fmt: skip
    yield Mistake(
        "split-size-beside", "hami",
        env("PYTORCH_ALLOC_CONF", "max_split_size_mb:4096,expandable_segments:True"), "max-split-size",
        "`PYTORCH_ALLOC_CONF=max_split_size_mb:4096,expandable_segments:True`: `max_split_size_mb` only says "
        "which blocks "
        "PyTorch splits and limits no memory; leave it out",
        env("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    )  # fmt: skip
    for scheme in ("hami", "volcano", "tencent"):
        yield Mistake(
            "device-order", scheme, env("CUDA_VISIBLE_DEVICES", "1"), "device-order",
            "`CUDA_VISIBLE_DEVICES=1` renumbers devices whose limits are set by number, so the wrong one may be "
            "charged; "
            "leave it out",
        )  # fmt: skip
    for scheme in ("hami", "volcano"):
        yield Mistake(
            "control-off", scheme, env("CUDA_DISABLE_CONTROL", "true"), "control-off",
            "`CUDA_DISABLE_CONTROL=true` switches HAMi's limit off for this container; leave it out",
        )  # fmt: skip
        for name in ("CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0"):
            yield Mistake(
                f"by-hand-{name}", scheme, env(name, "40g"), "limit-by-hand",
                f"`{name}=40g` goes against the limit that the scheduler counts; leave it out",
            )  # fmt: skip


def mps_by_hand() -> Iterator[Mistake]:
    for scheme in ("whole", "vgpu", "aliyun", "kai"):
        right = shares("/tmp/nvidia-mps", env("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
        yield Mistake(
            "own-mps", scheme, env("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "own-mps",
            "MPS run by hand needs `hostIPC: true` and a `hostPath` volume at `/tmp/nvidia-mps`; without, "
            "clients don't "
            "meet their server",
            right,
        )  # fmt: skip
        yield Mistake(
            "own-mps-ipc", scheme,
            lambda documents, right=right: (right(documents), template(documents)["spec"].pop("hostIPC")),
            "own-mps", "MPS run by hand needs `hostIPC: true`; without, clients don't meet their server", right,
        )  # fmt: skip


def fields() -> Iterator[Mistake]:
    for scheme in ALL_SCHEMES:
        yield Mistake(
            "misspelt", scheme, lambda documents: moved(container(documents), "imagePullPolicie", "imagePullPolicy"),
            "schema",
            "`spec.template.spec.containers.0.imagePullPolicie` is no field that Kubernetes knows there; write "
            "`imagePullPolicy`",
            lambda documents: container(documents).update(imagePullPolicy="Always"),
        )  # fmt: skip
        index = len(container(correct_manifests(scheme))["env"])
        yield Mistake(
            "number-as-text", scheme, env("OMP_NUM_THREADS", 4), "schema",
            f'`spec.template.spec.containers.0.env.{index}.value: 4` must be text; write `"4"`',
            env("OMP_NUM_THREADS", "4"),
        )  # fmt: skip
