"""NVIDIA cards: memory as the driver reports it, and the MIG profiles of each.

Seven compute slices and eight memory slices on most cards, four and four on A30 and RTX PRO 6000; a profile takes some
of both and may begin only at certain memory slices. Names round: `1g.5gb` holds 4.75 GiB. Where the exact size of an
instance was not at hand it is estimated a little low (`is_estimate`); a node's driver has the last word.

    1g {0..6}:1   1g, double memory {0,2,4,6}:2   2g {0,2,4}:2   3g {0,4}:4   4g {0}:4   7g {0}:8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvarto.core.errors import UsageError
from kvarto.core.units import MIB

_ESTIMATED_SHARE = (24, 25)
"""Of its slices' share of the card, what an instance holds at least: 0.96 to 1.0 where it is known."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A MIG profile on one card."""

    name: str
    """`3g.40gb`, or `1g.10gb+me` with the media engines."""
    memory_bytes: int
    compute_slices: int
    memory_slices: int
    starts: tuple[int, ...]
    """Memory slices at which an instance may begin."""
    is_estimate: bool = False
    has_media: bool = False
    """At most one such instance fits on a card."""

    @property
    def resource(self) -> str:
        """The device plugin's name under the `mixed` strategy; `+` may not stand in a resource's name."""
        return f"nvidia.com/mig-{self.name.replace('+', '.')}"


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of card."""

    name: str
    memory_bytes: int
    profiles: tuple[Profile, ...] = ()
    """Smallest first; empty where the card has no MIG."""
    compute_slices: int = 7
    memory_slices: int = 8

    def profile(self, name: str) -> Profile:
        """By name, `+me` or `.me`. Raises UsageError listing those that there are."""
        wanted = name.replace(".me", "+me")
        for profile in self.profiles:
            if profile.name == wanted:
                return profile
        known = ", ".join(f"`{profile.name}`" for profile in self.profiles) or "none: it can't be divided by MIG"
        raise UsageError(f"`{self.name}` has no MIG profile `{name}`; it has {known}")


_SEVEN = (
    ("1g", 1, 1, (0, 1, 2, 3, 4, 5, 6)), ("1g", 1, 2, (0, 2, 4, 6)), ("2g", 2, 2, (0, 2, 4)),
    ("3g", 3, 4, (0, 4)), ("4g", 4, 4, (0,)), ("7g", 7, 8, (0,)),
)  # fmt: skip
_FOUR = (("1g", 1, 1, (0, 1, 2, 3)), ("2g", 2, 2, (0, 2)), ("4g", 4, 4, (0,)))

_Sizes = dict[int, tuple[int, int | None]]

_CARDS: dict[str, tuple[int, _Sizes]] = {
    # name: (MiB of the card, {memory slices: (GB in the name, MiB of an instance or None)})
    "A30-24": (24_258, {1: (6, 5_836), 2: (12, 11_672), 4: (24, 23_344)}),
    "A100-40": (40_536, {1: (5, 4_864), 2: (10, 9_856), 4: (20, 19_968), 8: (40, 40_192)}),
    "A100-80": (81_920, {1: (10, 9_856), 2: (20, 19_968), 4: (40, 40_192), 8: (80, 80_384)}),
    "H100-80": (81_559, {1: (10, 9_984), 2: (20, 20_090), 4: (40, 40_448), 8: (80, 81_152)}),
    "H100-94": (95_830, {1: (12, None), 2: (24, None), 4: (47, None), 8: (94, None)}),
    "H200-141": (143_771, {1: (18, None), 2: (35, None), 4: (71, 71_475), 8: (141, None)}),
    "B200-180": (183_359, {1: (23, None), 2: (45, None), 4: (90, None), 8: (180, None)}),
    "GB200": (189_471, {1: (23, None), 2: (47, None), 4: (93, None), 8: (186, None)}),
    "B300": (275_040, {1: (34, None), 2: (67, None), 4: (135, None), 8: (269, None)}),
    "GB300": (284_208, {1: (35, None), 2: (70, None), 4: (139, None), 8: (278, None)}),
    "RTX-PRO-6000": (97_887, {1: (24, None), 2: (48, None), 4: (96, None)}),
}
_WITHOUT_MIG = {"T4": 15_360, "L4": 23_034, "A10": 23_028, "V100-32": 32_768, "L40S": 46_068, "RTX-4090": 24_564}


def _profiles(memory_mib: int, sizes: _Sizes) -> Iterator[Profile]:
    num_slices = max(sizes)
    for slices, compute, memory, starts in _SEVEN if num_slices == 8 else _FOUR:
        gb, known_mib = sizes[memory]
        numerator, denominator = _ESTIMATED_SHARE
        estimate_mib = memory_mib * memory * numerator // (num_slices * denominator)
        size_bytes = (known_mib or estimate_mib) * MIB
        plain = Profile(f"{slices}.{gb}gb", size_bytes, compute, memory, starts, known_mib is None)
        yield plain
        if memory == 1:
            yield Profile(f"{plain.name}+me", size_bytes, compute, memory, starts, plain.is_estimate, has_media=True)


def _cards() -> Iterator[Card]:
    for name, (memory_mib, sizes) in _CARDS.items():
        num_slices = max(sizes)
        num_compute = 7 if num_slices == 8 else 4
        yield Card(name, memory_mib * MIB, tuple(_profiles(memory_mib, sizes)), num_compute, num_slices)
    for name, memory_mib in _WITHOUT_MIG.items():
        yield Card(name, memory_mib * MIB)


CARDS: dict[str, Card] = {card.name: card for card in _cards()}


def find_card(name: str) -> Card:
    """A card by name, case and dashes aside; `H100` means the only or the smallest of that name. Raises UsageError."""
    wanted = name.upper().replace("_", "-").replace(" ", "-").removesuffix("GB")
    found = [card for card in CARDS.values() if card.name == wanted or card.name.startswith(f"{wanted}-")]
    if not found:
        raise UsageError(f"card `{name}` is not in the table; known: {', '.join(CARDS)}")
    return found[0]
