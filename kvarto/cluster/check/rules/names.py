"""Names: a dot where a slash belongs, MIG profiles that are misspelt or that the card does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvarto.cluster.cards import CARDS, Card, Profile
from kvarto.cluster.check.finding import Edit, Finding
from kvarto.cluster.check.manifests import Container, Files
from kvarto.cluster.check.vocabulary import HAMI_MEMORY
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.mig import PREFIX, mig_resources

_DOTTED = re.compile(r"(nvidia\.com|volcano\.sh|aliyun\.com|tencent\.com)\.(.+)")
_BARE = {"gpumem": HAMI_MEMORY, "gpu": "nvidia.com/gpu", "gpu-mem": "aliyun.com/gpu-mem"}
_CLOSE = {
    "nvidia.com/gpu-mem": HAMI_MEMORY, "nvidia.com/gpu-memory": HAMI_MEMORY, "nvidia.com/gpumemory": HAMI_MEMORY,
    "nvidia.com/gpus": "nvidia.com/gpu", "volcano.sh/vgpu-mem": "volcano.sh/vgpu-memory",
    "aliyun.com/gpu-memory": "aliyun.com/gpu-mem", "tencent.com/vcuda-mem": "tencent.com/vcuda-memory",
    "tencent.com/vcuda-cores": "tencent.com/vcuda-core",
}  # fmt: skip
_OF_RTX = re.compile(r"(1g\.24gb|2g\.48gb|4g\.96gb)(\.gfx|\.me\.all|-me)")
"""Engines beside the memory, which RTX PRO 6000 alone divides so: graphics, all of the media, none of it."""
_PROFILE = re.compile(r"([1-7])g\.?([0-9]+)\s*gb([+.-]?me)?", re.IGNORECASE)


def resource_names(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Names that no plugin advertises, so that the pod waits for ever or runs without a limit."""
    for container in files.containers:
        for name in dict.fromkeys(name for _, name, _ in container.amounts()):
            right = right_name(name)
            if right is not None:
                message = f"`{name}` is a name that nothing advertises; write `{right}`"
                yield container.finding(
                    "resource-name", ("resources", "limits", name), message, *rename(container, name, right)
                )


def mig_profiles(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Profiles in resource names."""
    for container in files.containers:
        for name in mig_resources(container.manifest):
            yield from _mig_profile(container, name, options.card)


def rename(container: Container, name: str, right: str) -> list[Edit]:
    """Another name for the same amount."""
    edits = []
    for kind, each, value in container.amounts():
        if each == name:
            edits += [
                container.edit("resources", kind, right, value=value),
                container.edit("resources", kind, name),
            ]
    return edits


def right_name(name: str) -> str | None:
    """What a misspelt resource is called; None for all others."""
    dotted = _DOTTED.fullmatch(name)
    if dotted is not None:
        slashed = f"{dotted[1]}/{dotted[2]}"
        return _CLOSE.get(slashed, slashed)
    return _BARE.get(name) or _CLOSE.get(name)


def _mig_profile(container: Container, name: str, card: Card | None) -> Iterator[Finding]:
    path = ("resources", "limits", name)
    profile = name.removeprefix(PREFIX)
    if _OF_RTX.fullmatch(profile) and (card is None or card.name == "RTX-PRO-6000"):
        return
    match = _PROFILE.fullmatch(profile)
    if match is None:
        message = f"`{name}` names no MIG profile; they look like `{PREFIX}3g.40gb`"
        yield container.finding("mig-name", path, message)
        return
    spelt = f"{match[1]}g.{match[2]}gb"
    right = f"{PREFIX}{spelt}{'.me' if match[3] else ''}"
    if card is not None and all(profile.name != spelt for profile in card.profiles):
        yield _not_on_card(container, name, spelt, card)
    elif name != right:
        message = f"`{name}` is a name that nothing advertises; write `{right}`"
        yield container.finding("mig-name", path, message, *rename(container, name, right))


def _not_on_card(container: Container, name: str, spelt: str, card: Card) -> Finding:
    path = ("resources", "limits", name)
    message = f"`{name}`: `{card.name}` has no profile `{spelt}`"
    holding = _holding(card, spelt)
    if holding is None:
        known = ", ".join(f"`{profile.name}`" for profile in card.profiles) or "no MIG at all"
        return container.finding("mig-profile", path, f"{message}; it has {known}")
    message = f"{message}; the smallest that holds as much is `{holding.resource}`"
    return container.finding("mig-profile", path, message, *rename(container, name, holding.resource))


def _holding(card: Card, spelt: str) -> Profile | None:
    """The smallest profile of the card that holds what the named one holds on its own card."""
    sizes = [each.memory_bytes for other in CARDS.values() for each in other.profiles if each.name == spelt]
    gigabytes = int(spelt.partition(".")[2].removesuffix("gb"))
    needed_bytes = min(sizes, default=gigabytes * 10**9)
    holding = [each for each in card.profiles if each.memory_bytes >= needed_bytes and not each.has_media]
    return holding[0] if holding else None
