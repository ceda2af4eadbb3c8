"""Objects beside pods: configurations of plugins, quotas, claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.cluster.manifests import container, of_kind, template
from tests.cluster.mistakes.base import (
    COUNTED,
    MEMORY,
    UNIT_MIB,
    UNIT_NAME,
    Change,
    Documents,
    Mistake,
    mig_parted,
    plugin,
    quota,
    slice_v1,
    two_plugins,
)


def plugin_configs() -> Iterator[Mistake]:
    for strategy in ("single", "mixed"):
        yield Mistake(
            f"mps-mig-{strategy}", "mps", plugin(flags=f"flags:\n  migStrategy: {strategy}\n"), "mps-mig",
            f"MPS beside `migStrategy: {strategy}`: the plugin does not share MIG instances by MPS; share "
            "`nvidia.com/gpu` alone",
            plugin(flags="flags:\n  migStrategy: none\n"),
        )  # fmt: skip
    for profile in ("1g.10gb", "3g.40gb"):
        yield Mistake(
            f"mps-mig-{profile}", "mps", plugin(resource=f"nvidia.com/mig-{profile}"), "mps-mig",
            f"MPS beside `nvidia.com/mig-{profile}`: the plugin does not share MIG instances by MPS; share "
            "`nvidia.com/gpu` alone",
        )  # fmt: skip
    for scheme in ("time-slicing", "mps"):
        for count in (1, 0):
            yield Mistake(
                f"replicas-{count}", scheme, plugin(replicas=count), "replicas",
                f"`replicas: {count}` of `nvidia.com/gpu`: the plugin wants at least 2; write `2`", plugin(replicas=2),
            )  # fmt: skip
    for wrong, asked, fits, right in (
        ({"3g.40gb": 3}, "3 × 3g.40gb", "2 × 3g.40gb", {"3g.40gb": 2}),
        ({"4g.40gb": 1, "3g.40gb": 1, "1g.10gb": 1}, "1 × 4g.40gb, 1 × 3g.40gb, 1 × 1g.10gb",
         "1 × 4g.40gb, 1 × 3g.40gb", {"4g.40gb": 1, "3g.40gb": 1}),
        ({"2g.20gb": 4}, "4 × 2g.20gb", "3 × 2g.20gb", {"2g.20gb": 3}),
        ({"1g.10gb": 8}, "8 × 1g.10gb", "7 × 1g.10gb", {"1g.10gb": 7}),
        ({"1g.10gb+me": 2}, "2 × 1g.10gb+me", "1 × 1g.10gb+me", {"1g.10gb+me": 1}),
    ):  # fmt: skip
        yield Mistake(
            f"mig-set-{asked}", "mig", mig_parted(wrong), "mig-set",
            f"`mine`: `H100-80` has no placement for {asked}; {fits} fits", mig_parted(right),
        )  # fmt: skip


def plugins() -> Iterator[Mistake]:
    for image, whose in (
        ("projecthami/hami:v2.9", "HAMi's"), ("volcanosh/volcano-vgpu-device-plugin:v1.11", "Volcano's"),
    ):  # fmt: skip
        yield Mistake(
            f"two-plugins-{whose}", "hami", two_plugins(image), "two-plugins",
            f"{whose} and NVIDIA's device plugins both advertise `nvidia.com/gpu` on the same nodes; let {whose} "
            "run where "
            "`gpu=on` and NVIDIA's elsewhere",
            two_plugins(image, apart=True),
        )  # fmt: skip


def quotas() -> Iterator[Mistake]:
    for scheme, name in {**COUNTED, "hami-count": "nvidia.com/gpu", "volcano-count": "volcano.sh/vgpu-number"}.items():
        scheme = scheme.removesuffix("-count")
        yield Mistake(
            f"quota-prefix-{name}", scheme, quota(name, "4"), "quota-prefix",
            f"`{name}` is no key of a quota, and Kubernetes refuses it; write `requests.{name}`",
            quota(f"requests.{name}", "4"),
        )  # fmt: skip
        if name != "nvidia.com/gpumem":
            yield Mistake(
                f"quota-limits-{name}", scheme, quota(f"limits.{name}", "4"), "quota-limits",
                f"`limits.{name}`: Kubernetes counts extended resources under `requests.` alone; write "
                f"`requests.{name}`",
                quota(f"requests.{name}", "4"),
            )  # fmt: skip
    for scheme, name in MEMORY.items():
        right = str(65536 // UNIT_MIB[scheme])
        yield Mistake(
            "quota-unit", scheme, quota(f"requests.{name}", "64Gi"), "quota-unit",
            f"`requests.{name}: 64Gi`: the resource counts {UNIT_NAME[scheme]} and no bytes; write `{right}`",
            quota(f"requests.{name}", right),
        )  # fmt: skip
    yield Mistake(
        "quota-unit-limits", "hami", quota("limits.nvidia.com/gpumem", "64Gi"), "quota-unit",
        "`limits.nvidia.com/gpumem: 64Gi`: the resource counts MiB and no bytes; write `65536`",
        quota("limits.nvidia.com/gpumem", "65536"),
    )  # fmt: skip


def claims() -> Iterator[Mistake]:
    def request(documents: Documents) -> Any:
        return of_kind(documents, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]

    def version(text: str) -> Change:
        version = f"resource.k8s.io/{text}"
        return lambda documents: of_kind(documents, "ResourceClaimTemplate").update(apiVersion=version)

    def flat(documents: Documents) -> None:
        request(documents).update(request(documents).pop("exactly"))

    def flat_beta(documents: Documents) -> None:
        flat(documents)
        version("v1beta1")(documents)

    def memory(text: Any) -> Change:
        return lambda documents: request(documents)["exactly"]["capacity"]["requests"].update(memory=text)

    def nest(documents: Documents) -> None:
        claim = of_kind(documents, "ResourceClaimTemplate")
        claim["spec"] = claim["spec"]["spec"]

    yield Mistake(
        "claim-unused", "dra", lambda documents: container(documents)["resources"].pop("claims"), "claim-unused",
        "the pod declares claim `gpu` and no container uses it, so none gets the device; add it to "
        "`resources.claims` of "
        "`server`",
    )  # fmt: skip
    yield Mistake(
        "claim-undeclared", "dra",
        lambda documents: template(documents)["spec"].pop("resourceClaims"),
        "claim-undeclared",
        "the container uses claim `gpu`, which the pod does not declare; declare it, from the template `kvarto-gpu`",
    )  # fmt: skip
    yield Mistake(
        "claim-name", "dra", lambda documents: container(documents)["resources"]["claims"][0].update(name="card"),
        "claim-undeclared",
        "the container uses claim `card`, which the pod does not declare; the pod's claim is `gpu`: write that",
    )  # fmt: skip
    yield Mistake(
        "shape-v1", "dra", flat, "dra-shape",
        "this is the shape of another version: in `resource.k8s.io/v1` requests stand inside `exactly`",
    )  # fmt: skip
    yield Mistake(
        "shape-v1beta2", "dra", lambda documents: (flat(documents), version("v1beta2")(documents)), "dra-shape",
        "this is the shape of another version: in `resource.k8s.io/v1beta2` requests stand inside `exactly`",
        version("v1beta2"),
    )  # fmt: skip
    yield Mistake(
        "shape-v1beta1", "dra", version("v1beta1"), "dra-shape",
        "this is the shape of another version: in `resource.k8s.io/v1beta1` requests have no `exactly` around them",
        flat_beta,
    )  # fmt: skip
    for old in ("v1alpha2", "v1alpha3"):
        yield Mistake(
            f"version-{old}", "dra",
            lambda documents, old=old: (flat(documents), version(old)(documents)),
            "dra-version",
            f"`resource.k8s.io/{old}` is not served by Kubernetes 1.36; write `resource.k8s.io/v1`",
        )  # fmt: skip
    yield Mistake(
        "basic-v1", "dra", slice_v1(basic=True), "dra-shape",
        "this is the shape of another version: in `resource.k8s.io/v1` devices have no `basic` around them",
        slice_v1(basic=False),
    )  # fmt: skip
    yield Mistake(
        "nesting", "dra", nest, "dra-template",
        "`spec.devices` belongs to a claim; a template holds a whole one: write `spec.spec.devices`",
    )  # fmt: skip
    yield Mistake(
        "unit", "dra", memory(20480), "dra-unit", "`memory: 20480` is 20,480 bytes: DRA counts bytes; write `20480Mi`",
        memory("20480Mi"),
    )  # fmt: skip
    yield Mistake(
        "over-card", "dra", memory("96Gi"), "over-card",
        "`memory: 96Gi` is more than the 79.65 GiB of `H100-80`; at most `81559Mi` fits", memory("81559Mi"),
    )  # fmt: skip
