"""Adapters for tests of ops: random matrices in pages of an open backend, and what they compute, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter, LowRankUpdate, TokenRows
from kvarto.adapters.arrays import StoredArray
from kvarto.adapters.binding import bind, bound_shape
from kvarto.adapters.magnitudes import scale_of
from kvarto.adapters.packing import num_pages, stream_bytes
from kvarto.adapters.targets import BaseTargets, Role, Target
from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.dtype import DType
from kvarto.core.ids import NO_ADAPTER
from kvarto.core.ops import Embed, HeadShape, Linear, Logits, Op
from kvarto.core.step import Step
from kvarto.models.convert import to_bfloat16
from kvarto.ops.base import Backend
from tests.adapters.held import HeldArray, ScaleOf, array_of, page_images, stood_for, update_values

Array = np.ndarray[Any, Any]
_TYPES = {DType.F32: np.float32, DType.F16: np.float16}


def lazy(values: Array, dtype: DType = DType.F32) -> HeldArray:
    """The values, rounded to a type."""
    return array_of(to_bfloat16(values.astype(np.float32)) if dtype is DType.BF16 else values.astype(_TYPES[dtype]))


@dataclass(frozen=True)
class Draw:
    """How an adapter's numbers are drawn."""

    rank: int = 4
    dtypes: tuple[DType, DType] = (DType.F32, DType.F32)
    scaling: float = 0.5
    spread: float = 0.2
    has_bias: bool = False
    has_magnitude: bool = False
    seed: int = 0


def drawn(targets: Sequence[Target], draw: Draw) -> Adapter:
    """An update for each target."""
    rng = np.random.default_rng(draw.seed)

    def array(shape: tuple[int, ...], dtype: DType) -> HeldArray:
        return lazy(rng.normal(0, draw.spread, shape), dtype)

    return Adapter(
        tuple(
            LowRankUpdate(
                target,
                draw.rank,
                draw.scaling,
                array((draw.rank, target.in_width), draw.dtypes[0]),
                array((target.out_width, draw.rank), draw.dtypes[1]),
                array((target.out_width,), draw.dtypes[1]) if draw.has_bias else None,
                lazy(rng.uniform(0.5, 8, target.out_width), draw.dtypes[1]) if draw.has_magnitude else None,
            )
            for target in targets
        )
    )


def bfloat16_twin(adapter: Adapter) -> Adapter:
    """The adapter with what its codes stand for in the place of codes."""

    def twin(array: StoredArray, *, has_columns: bool = False) -> StoredArray:
        if array.codes is None:
            return array
        return array_of(to_bfloat16(np.ascontiguousarray(stood_for(array, has_columns=has_columns))))

    updates = (replace(u, lora_a=twin(u.lora_a), lora_b=twin(u.lora_b, has_columns=True)) for u in adapter.updates)
    return replace(adapter, updates=tuple(updates))


def with_tokens(adapter: Adapter, weight: str, roles: tuple[Role, ...], ids: Sequence[int], width: int) -> Adapter:
    """The adapter that replaces tokens too."""
    values = np.random.default_rng(len(ids)).normal(size=(len(ids), width))
    return replace(adapter, token_rows=(*adapter.token_rows, TokenRows(weight, roles, tuple(ids), lazy(values))))


@dataclass
class Shelf:
    """Hands out pages from the end of a pool, scattered, and binds adapters under handles 0, 1, 2, ..."""

    backend: Backend
    base: BaseTargets
    page_bytes: int
    free: list[int]
    bound: list[NDArray[np.int32]] = field(default_factory=list)

    def bind(self, adapter: Adapter) -> int:
        """Fill pages and bind; the handle."""
        count = num_pages(stream_bytes(adapter), self.page_bytes)
        pages = np.array([self.free.pop() for _ in range(count)], np.int32)
        images = np.frombuffer(b"".join(page_images(adapter, self.page_bytes, self._scale_of)), np.uint8)
        self.backend.write_pages(pages, images.reshape(count, -1), np.arange(count, dtype=np.int32))
        handle = len(self.bound)
        self.backend.bind_adapter(handle, bind(bound_shape(adapter, self.base), pages, self.page_bytes))
        self.bound.append(pages)
        return handle

    def _scale_of(self, update: LowRankUpdate) -> NDArray[np.float32]:
        return scale_of(update, update_values(update), self.backend.read_rows)


@dataclass(frozen=True)
class Stored:
    """A bound adapter and the bytes of its pages, for benches of single ops."""

    bound: BoundAdapter
    images: list[bytes]

    def write(self, pool: NDArray[np.uint8]) -> None:
        """Into the bytes of all pages."""
        for page, image in zip(self.bound.pages.tolist(), self.images, strict=True):
            start = page * self.bound.page_bytes
            pool[start : start + len(image)] = np.frombuffer(image, np.uint8)


def stored(
    adapter: Adapter, base: BaseTargets, page_bytes: int, free: list[int], scale_of: ScaleOf | None = None
) -> Stored:
    """Takes pages from the end of `free`."""
    images = page_images(adapter, page_bytes, scale_of)
    pages = np.array([free.pop() for _ in images], np.int32)
    return Stored(bind(bound_shape(adapter, base), pages, page_bytes), images)


def base_of(op: Op, weight_shape: tuple[int, int]) -> BaseTargets:
    """The base that an op alone makes: its weight `w`, op 0."""
    heads, role = HeadShape(1, 1, 16), {Linear: Role.LINEAR, Logits: Role.LOGITS, Embed: Role.EMBED}[type(op)]
    base = BaseTargets("test", heads, weight_shape[0], False, "model.embed_tokens")
    base.op_indices["w", role] = 0
    return base


def scales(matrix: Array) -> ScaleOf:
    """What magnitudes are with that weight below them."""

    def read_rows(_: str, first: int, count: int) -> NDArray[np.float32]:
        return matrix[first : first + count].astype(np.float32)

    return lambda update: scale_of(update, update_values(update), read_rows)


def with_adapters(step: Step, handles: Sequence[int | None], starts: Sequence[int] | None = None) -> Step:
    """The step with an adapter per sequence."""
    adapters = np.array([NO_ADAPTER if handle is None else handle for handle in handles], np.int32)
    active_from = np.array(starts or [0] * len(handles), np.int32)
    return replace(step, adapters=adapters, adapter_starts=active_from)


def merged(adapter: Adapter, target_weight: str, matrix: Array) -> Array:
    """The matrix `[out, in]` of a weight, or a table `[tokens, hidden]`, with all changes made to it, in float64."""
    matrix = matrix.astype(np.float64)
    for rows in adapter.token_rows:
        if rows.weight == target_weight:
            matrix[list(rows.token_ids)] = rows.rows.values()
    for update in adapter.updates:
        target = update.target
        if target.weight == target_weight:
            a, b = (x.values().astype(np.float64) for x in (update.lora_a, update.lora_b))
            rows = matrix.T if target.role is Role.EMBED else matrix
            band = rows[target.first_row : target.first_row + target.out_width]
            band += update.scaling * (b @ a)
            if update.magnitude is not None:
                band *= (update.magnitude.values() / np.linalg.norm(band, axis=1))[:, None]
    return matrix
