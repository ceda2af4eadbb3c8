"""PlanRequest: what the planner was asked, and the arithmetic of pages that accepting and refusing share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvarto.core.buffers import StepLimits
from kvarto.core.kv_format import KVFormat
from kvarto.core.layout import Budget
from kvarto.core.program import Program
from kvarto.planning.fixed import FixedRegions, plan_fixed
from kvarto.planning.page_count import longest_sequence, pages_for_sequence


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of `plan`."""

    program: Program
    budget: Budget
    limits: StepLimits
    kv_format: KVFormat
    scratch_bytes: Mapping[int, int]
    max_num_pages: int | None
    usable_bytes: int | None

    def fixed(self, limits: StepLimits) -> FixedRegions:
        """Weights and activations. Scratch is taken as given: smaller steps never need more."""
        return plan_fixed(self.program, limits, self.scratch_bytes)

    def pages_needed(self, limits: StepLimits) -> int:
        """Pages for one sequence of the longest context: a pool must hold that much."""
        groups = self.program.layer_groups
        return pages_for_sequence(groups, self.kv_format.page_size, limits.max_context, limits.max_tokens)

    def num_pages(self, fixed: FixedRegions) -> int | None:
        """Pages that the budget pays for beside `fixed`; None when it does not even pay for that."""
        left_bytes = self.budget.device_bytes - fixed.size_bytes
        asked_bytes = left_bytes if self.budget.kv_bytes is None else self.budget.kv_bytes
        num_pages = asked_bytes // self.kv_format.page_bytes
        if self.max_num_pages is not None:
            num_pages = min(num_pages, self.max_num_pages)
        return num_pages if 0 <= num_pages * self.kv_format.page_bytes <= left_bytes else None

    def longest(self, limits: StepLimits, fixed: FixedRegions) -> int:
        """Tokens of the longest sequence, up to `max_context`, that the pages beside `fixed` hold."""
        groups, page_size = self.program.layer_groups, self.kv_format.page_size
        num_pages = self.num_pages(fixed) or 0
        return longest_sequence(groups, page_size, num_pages, limits.max_tokens, limits.max_context)
