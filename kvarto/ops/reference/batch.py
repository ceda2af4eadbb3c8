"""Batch: one Step as tensors on the device, shared by the kernels of one pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.buffers import Rows
from kvarto.core.step import Step, StepResult
from kvarto.ops.reference.segments import Segment, segments

if TYPE_CHECKING:
    from kvarto.ops.reference.work_list import WorkList


class Batch:
    """A step, and what several kernels derive from it. Lives for one pass."""

    def __init__(
        self,
        step: Step,
        page_size: int,
        device: torch.device,
        adapters: Mapping[int, BoundAdapter] = MappingProxyType({}),
    ) -> None:
        self.step = step
        self.device = device
        self.num_tokens = step.num_tokens
        self.num_samples = step.num_samples
        self.token_ids = self.upload(step.token_ids)
        self.positions = self.upload(step.positions)
        self.sample_rows = self.upload(step.sample_rows)
        self.work_lists: dict[tuple[int, int | None], WorkList] = {}
        """By layer group and window: made by the first attention of each."""
        self.result: StepResult | None = None
        """Filled in by `Sample`."""
        self._page_size = page_size
        self._adapters = adapters
        self._segments: dict[Rows, tuple[Segment, ...]] = {}
        self._slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """The array on the device; on a CPU the same memory."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def num_rows(self, rows: Rows) -> int:
        """Rows of this step in a buffer of one row per token, or per sample."""
        return self.num_tokens if rows is Rows.TOKENS else self.num_samples

    def segments(self, rows: Rows) -> tuple[Segment, ...]:
        """Adapters and the rows that they are active for; none in a step without adapters."""
        if self.step.adapters is None:
            return ()
        if rows not in self._segments:
            self._segments[rows] = tuple(segments(self.step, self._adapters, rows))
        return self._segments[rows]

    def slots(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset of each token's KV in a layer group, int64 `[num_tokens]` each."""
        if group not in self._slots:
            pages, offsets = np.divmod(self.step.slot_mapping[group], self._page_size)
            self._slots[group] = self.upload(pages), self.upload(offsets)
        return self._slots[group]
