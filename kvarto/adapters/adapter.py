"""An adapter as a value: which bands of which weights it updates, by what, and when. It has no name and no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvarto.adapters.arrays import StoredArray
from kvarto.adapters.targets import Role, Target
from kvarto.core.strip_type import StripType

SCALE_TYPE = StripType.F32
"""Of the strip of a magnitude, whatever the file has: pages hold what the sum is multiplied with (magnitudes.py)."""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """`y[band] += scaling * (B (A x) + bias)`; with a magnitude m, `y[band]` is scaled by `m / |W + scaling B A|` too.

    For an embedding table x is the indicator of a token, so A x is a column of A.
    """

    target: Target
    rank: int
    scaling: float
    lora_a: StoredArray
    """`[rank, in]`."""
    lora_b: StoredArray
    """`[out, rank]`."""
    bias: StoredArray | None = None
    """`[out]`, multiplied by the scaling like the rest of B's output."""
    magnitude: StoredArray | None = None
    """`[out]`, of DoRA (arXiv:2402.09353)."""

    def arrays(self) -> tuple[StoredArray, ...]:
        """A, B and what else there is, in this order."""
        return tuple(a for a in (self.lora_a, self.lora_b, self.bias, self.magnitude) if a is not None)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows that stand in place of the base's: in the embedding, in the output matrix, or in both of a tied pair."""

    weight: str
    roles: tuple[Role, ...]
    token_ids: tuple[int, ...]
    rows: StoredArray
    """`[tokens, hidden]`."""


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A whole weight that was saved along. It changes nothing if it is the base's, which its values alone can show."""

    module: str
    array: StoredArray


@dataclass(frozen=True)
class Adapter:
    """Everything that the header and the config of one adapter say. Its values are in a file, and enter with it."""

    updates: tuple[LowRankUpdate, ...]
    """In the order in which a step meets them, so the first pages serve the first layers; bands never overlap."""
    token_rows: tuple[TokenRows, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    """Active from the last place where these stand in a row, and nowhere if they do not; empty: active everywhere."""
    warnings: tuple[str, ...] = ()
    """Sentences for people."""
    copies: tuple[BaseCopy, ...] = ()
    """To be compared with the base's, in each file anew."""

    @cached_property
    def max_rank(self) -> int:
        """The largest rank of its updates."""
        return max((update.rank for update in self.updates), default=0)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all strips, as pages have them."""
        size_bytes = sum(array.strip_bytes for array in self.arrays())
        for update in self.updates:
            if update.magnitude is not None:
                size_bytes += SCALE_TYPE.size_bytes(update.target.out_width) - update.magnitude.strip_bytes
        return size_bytes

    @cached_property
    def strip_types(self) -> tuple[StripType, ...]:
        """Those of A and B, in the order of `StripType`."""
        found = {array.strip_type for update in self.updates for array in (update.lora_a, update.lora_b)}
        return tuple(type for type in StripType if type in found)

    def arrays(self) -> Iterator[StoredArray]:
        """Every tensor: updates in order, then token rows."""
        for update in self.updates:
            yield from update.arrays()
        for rows in self.token_rows:
            yield rows.rows
