"""An adapter as a value: which bands of which weights it updates, by what, and when. It has no name and no folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvarto.adapters.arrays import LazyArray
from kvarto.adapters.targets import Role, Target


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """`y[band] += scaling * (B (A x) + bias)`; with a magnitude m, `y[band]` is scaled by `m / |W + scaling B A|` too.

    For an embedding table x is the indicator of a token, so A x is a column of A.
    """

    target: Target
    rank: int
    scaling: float
    lora_a: LazyArray
    """`[rank, in]`."""
    lora_b: LazyArray
    """`[out, rank]`."""
    bias: LazyArray | None = None
    """`[out]`, multiplied by the scaling like the rest of B's output."""
    magnitude: LazyArray | None = None
    """`[out]`, of DoRA (arXiv:2402.09353)."""

    def arrays(self) -> tuple[LazyArray, ...]:
        """A, B and what else there is, in this order."""
        return tuple(a for a in (self.lora_a, self.lora_b, self.bias, self.magnitude) if a is not None)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows that stand in place of the base's: in the embedding, in the output matrix, or in both of a tied pair."""

    weight: str
    roles: tuple[Role, ...]
    token_ids: tuple[int, ...]
    rows: LazyArray
    """`[tokens, hidden]`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Everything that was read of one adapter's files; tensors are still there."""

    updates: tuple[LowRankUpdate, ...]
    """In the order in which a step meets them, so the first pages serve the first layers; bands never overlap."""
    token_rows: tuple[TokenRows, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    """Active from the last place where these stand in a row, and nowhere if they do not; empty: active everywhere."""
    warnings: tuple[str, ...] = ()
    """Sentences for people."""

    @property
    def max_rank(self) -> int:
        """The largest rank of its updates."""
        return max((update.rank for update in self.updates), default=0)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, as the file has them."""
        return sum(array.size_bytes for array in self.arrays())

    def arrays(self) -> Iterator[LazyArray]:
        """Every tensor: updates in order, then token rows."""
        for update in self.updates:
            yield from update.arrays()
        for rows in self.token_rows:
            yield rows.rows
