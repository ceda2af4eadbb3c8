"""Turn: where a chain leaves the base's. An adapter that is called by tokens of the prompt computes nothing before.

    base's root ── [0..15] ── [16..31] ──┬── [32..47]              the base's KV: shared with it
                                         └── branch ── [32..47]    the adapter's, from the page in which it begins

Of that page the first tokens are the base's KV too; it is the adapter's all the same, for a page has one key.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.cache.digests import branch_digest, branch_fields
from kvarto.cache.geometry import Geometry
from kvarto.memory.arbiter import Unit


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one sequence."""

    start: int
    """The first token that the adapter computes."""
    first_entry: int
    """The entry that holds it: the first that is not the base's."""
    first_unit: int
    """Match unit with which that entry begins."""
    fields: bytes
    """What separates the chains that leave the base there."""
    adapter: Unit | None
    """What they depend on."""


def turn_at(start: int, adapter_digest: bytes, adapter: Unit | None, geometry: Geometry) -> Turn:
    """The turn of a chain whose adapter is active from the token `start`."""
    first_entry = start // geometry.entry_tokens
    fields = branch_fields(adapter_digest, start)
    return Turn(start, first_entry, first_entry * geometry.units_per_entry, fields, adapter)


def next_parent(digests: list[bytes], root_digest: bytes, turn: Turn | None) -> bytes:
    """What the digest after `digests`, which follow each other from the root on, is chained to."""
    parent = digests[-1] if digests else root_digest
    if turn is not None and len(digests) == turn.first_unit:
        return branch_digest(parent, turn.fields)
    return parent
