"""`kvarto k8s mig`: which MIG profiles a card has, and how models are packed onto cards."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from kvarto.core.errors import UsageError
from kvarto.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvarto.cluster.cards import Card
    from kvarto.cluster.mig_packing import Demand, MigPlan

MOST_DEMANDS = 512


def k8s_mig(*demands: str, card: str, json: bool = False) -> None:
    """Pack models onto as few cards as possible, by MIG.

    Parameters
    ----------
    demands
        `NAME=SIZE` or `NAME=PROFILE`, with `xCOUNT` for several: `chat=30GiB`, `code=3g.40gbx2`. Sizes are those that
        `kvarto k8s size` calls GPU memory. Without any, the card's profiles are listed.
    card
        `A30`, `A100-40`, `A100-80`, `H100-80`, `H100-94`, `H200`, `B200`, `GB200`, `B300`, `GB300` or `RTX-PRO-6000`.
    json
        Print JSON.
    """
    from kvarto.cluster.cards import find_card
    from kvarto.cluster.mig_packing import pack

    kind = find_card(card)
    wanted = [demand for text in demands for demand in _demands(text)]
    if len(wanted) > MOST_DEMANDS:
        raise UsageError(f"{len(wanted)} demands are more than the {MOST_DEMANDS} that are packed at once; give fewer")
    if not wanted:
        print(_json(_profile_rows(kind)) if json else _profiles(kind))
        return
    plan = pack(kind, wanted)
    print(_json(_as_dict(plan)) if json else _as_text(plan))


def _demands(text: str) -> list[Demand]:
    from kvarto.cluster.mig_packing import Demand

    match = re.fullmatch(r"([^=]+)=(.+?)(?:[x×]([0-9]+))?", text)
    if match is None:
        raise UsageError(f"`{text}` is no demand; write `NAME=SIZE` or `NAME=PROFILE`, such as `chat=30GiB`")
    name, what, count = match[1], match[2], _count(text, match[3])
    names = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
    if re.fullmatch(r"[1-7]g\.[0-9]+gb([+.]me)?", what):
        return [Demand(each, profile=what) for each in names]
    try:
        return [Demand(each, memory_bytes=parse_bytes(what)) for each in names]
    except ValueError as error:
        raise UsageError(f"`{text}`: {error}") from error


def _count(text: str, digits: str | None) -> int:
    """How many; checked before as many names are made."""
    if digits is None:
        return 1
    count = int(digits[:9])
    if not 1 <= count <= MOST_DEMANDS or len(digits) > 9:
        raise UsageError(f"`{text}` wants {digits:.20} instances; give 1 to {MOST_DEMANDS}")
    return count


def _profile_rows(card: Card) -> list[dict[str, Any]]:
    from kvarto.cluster.mig_card import card_sets

    most = card_sets(card).most
    return [
        {
            "profile": profile.name, "resource": profile.resource, "memory_bytes": profile.memory_bytes,
            "is_estimate": profile.is_estimate, "compute_slices": profile.compute_slices,
            "memory_slices": profile.memory_slices, "starts": profile.starts, "most": count,
        }
        for profile, count in zip(card.profiles, most, strict=True)
    ]  # fmt: skip


def _profiles(card: Card) -> str:
    if not card.profiles:
        return f"{card.name} can't be divided by MIG."
    lines = [f"{card.name}, {format_bytes(card.memory_bytes)}"]
    for row in _profile_rows(card):
        size = f"{'about ' if row['is_estimate'] else ''}{format_bytes(row['memory_bytes'])}"
        places = f"{{{','.join(map(str, row['starts']))}}}:{row['memory_slices']}"
        lines.append(f"  {row['profile']:<12}{size:>17}  at most {row['most']}  placements {places}")
    return "\n".join(lines)


def _as_text(plan: MigPlan) -> str:
    from kvarto.cluster.mig_config import commands, creation_order, mig_parted_config
    from kvarto.cluster.yaml_text import dump

    proof = "no fewer would do" if plan.is_proven else "whether fewer would do was not found out"
    lines = [f"{len(plan.cards)} × {plan.card.name}: {proof}"]
    for index, card in enumerate(plan.cards):
        lines.append(f"  card {index}")
        for each in creation_order(card):
            profile = each.placed.profile
            size = f"{'about ' if profile.is_estimate else ''}{format_bytes(profile.memory_bytes)}"
            lines.append(f"    {profile.name:<12}at {each.placed.start}  {size:>17}  {each.demand.name}")
    lines += ["", "# By hand, in this order:", *commands(plan), "", "# mig-parted, where all cards are in one node:"]
    return "\n".join([*lines, dump(mig_parted_config(plan)).rstrip()])


def _as_dict(plan: MigPlan) -> dict[str, Any]:
    from kvarto.cluster.mig_config import commands, creation_order, mig_parted_config

    cards = [
        [
            {"name": each.demand.name, "profile": each.placed.profile.name, "start": each.placed.start}
            for each in creation_order(card)
        ]
        for card in plan.cards
    ]
    return {
        "card": plan.card.name,
        "cards": cards,
        "is_proven": plan.is_proven,
        "commands": commands(plan),
        "mig_parted": mig_parted_config(plan),
    }


def _json(answer: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(answer)).decode()
