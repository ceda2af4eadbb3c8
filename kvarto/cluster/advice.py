"""MIG, sharing, or a whole card: one recommendation, and the reasons for it."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.cluster.cards import Card
from kvarto.cluster.mig_card import card_sets
from kvarto.cluster.mig_packing import Demand, fitting_profiles
from kvarto.cluster.need import Need
from kvarto.core.errors import UsageError
from kvarto.core.units import format_bytes

MOST_LOST = 2
"""MIG may hold so many times fewer copies than the memory would, before sharing is worth its risks."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A scheme's name; None where nothing works on this card."""

    scheme: str | None
    reasons: tuple[str, ...]


def advise(need: Need, card: Card) -> Advice:
    """What to take on that card, for servers of that need."""
    copies = card.memory_bytes // need.limit_bytes
    size, has = format_bytes(need.limit_bytes), f"`{card.name}` has {format_bytes(card.memory_bytes)}"
    if copies == 0:
        lighter = "take a larger card, a smaller weight format, fewer `--max-num-seqs` or a shorter `--max-model-len`"
        return Advice(None, (f"{size} are needed and {has}: {lighter}",))
    if copies == 1:
        share = need.limit_bytes / card.memory_bytes
        return Advice("whole", (f"{size} are {share:.0%} of the card, so no second copy fits beside it",))
    mig_copies = _mig_copies(need, card)
    if mig_copies is None:
        return Advice("hami", (f"`{card.name}` can't be divided by MIG", *_sharing(copies)))
    name, most = mig_copies
    if most * MOST_LOST >= copies and most > 1:
        lost = "" if most >= copies else f", of {copies} that its memory would hold"
        return Advice("mig", (f"the hardware isolates, and `{name}` fits {most} times on the card{lost}",))
    return Advice("hami", (f"MIG's `{name}` fits only {most} times, the memory would hold {copies}", *_sharing(copies)))


def _mig_copies(need: Need, card: Card) -> tuple[str, int] | None:
    """The smallest profile that will do, and how often it fits on a card."""
    try:
        profile = fitting_profiles(card, Demand("server", need.limit_bytes))[0]
    except UsageError:
        return None
    return profile.name, card_sets(card).most[card.profiles.index(profile)]


def _sharing(copies: int) -> tuple[str, ...]:
    return (
        f"a limit in MiB holds {copies} copies",
        "mind that a preloaded limiter is cooperation, not isolation: share a card among those who trust each other",
    )
