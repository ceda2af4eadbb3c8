"""Names of resources and of MIG profiles."""

from __future__ import annotations

from collections.abc import Iterator

from tests.cluster.manifests import correct_manifests, limits
from tests.cluster.mistakes.base import (
    COUNTED,
    MEMORY,
    Mistake,
    misnamed,
    renamed,
    without_arena,
)


def names() -> Iterator[Mistake]:
    for scheme in ("whole", "time-slicing", "mps", "vgpu", "hami", "volcano", "aliyun", "tencent"):
        resources = [name for name in limits(correct_manifests(scheme)) if "/" in name]
        for name in resources:
            yield misnamed(scheme, name, name.replace("/", ".", 1))
    for scheme, wrong in (
        ("hami", "nvidia.com/gpu-mem"), ("hami", "nvidia.com/gpu-memory"), ("hami", "nvidia.com/gpumemory"),
        ("hami", "gpumem"), ("volcano", "volcano.sh/vgpu-mem"), ("aliyun", "aliyun.com/gpu-memory"),
        ("aliyun", "gpu-mem"),
        ("tencent", "tencent.com/vcuda-mem"), ("hami", "nvidia.com.gpu-mem"),
    ):  # fmt: skip
        yield misnamed(scheme, MEMORY[scheme], wrong)
    yield misnamed("whole", "nvidia.com/gpu", "nvidia.com/gpus")
    yield misnamed("tencent", "tencent.com/vcuda-core", "tencent.com/vcuda-cores")


def mig_names() -> Iterator[Mistake]:
    mine = COUNTED["mig"]
    for wrong, right in (
        ("nvidia.com/mig-1g.20GB", mine), ("nvidia.com/mig-1g20gb", mine), ("nvidia.com/mig-1G.20gb", mine),
        ("nvidia.com/mig-3g.40gb+me", "nvidia.com/mig-3g.40gb.me"),
        ("nvidia.com/mig-3g.40gb-me", "nvidia.com/mig-3g.40gb.me"),
    ):  # fmt: skip
        yield Mistake(
            f"name-{wrong}", "mig", renamed(mine, wrong), "mig-name",
            f"`{wrong}` is a name that nothing advertises; write `{right}`", renamed(mine, right),
        )  # fmt: skip
    for profile, right in (
        ("2g.12gb", "1g.20gb"), ("3g.20gb", "1g.20gb"), ("3g.47gb", "7g.80gb"), ("2g.24gb", "3g.40gb"),
        ("1g.35gb", "3g.40gb"), ("4g.24gb", "3g.40gb"), ("1g.45gb", "7g.80gb"), ("3g.71gb", "7g.80gb"),
    ):  # fmt: skip
        wrong, named = f"nvidia.com/mig-{profile}", f"nvidia.com/mig-{right}"
        if profile in ("2g.12gb",):
            wanted = without_arena(renamed(mine, wrong)), without_arena(renamed(mine, named))
        else:
            wanted = renamed(mine, wrong), renamed(mine, named)
        yield Mistake(
            f"profile-{profile}", "mig", wanted[0], "mig-profile",
            f"`{wrong}`: `H100-80` has no profile `{profile}`; the smallest that holds as much is `{named}`", wanted[1],
        )  # fmt: skip
