"""How does paging reduce fragmentation? One trace, one budget, every way to allocate, as rows of figures.

`run_study` replays the trace under contiguous reservations, contiguous ranges of the true length, pages, and shared
pages, and returns plain values; what draws or prints them is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np

from kvarto.core.units import GIB
from kvarto.planning.allocation_policies import AllocationPolicy, Pages, Reservation
from kvarto.planning.allocators import Buddy, Compacting, FirstFit
from kvarto.planning.fragmentation import Replay, ReplayResult, expected_waste_fraction, saturating_rate_scale
from kvarto.planning.shared_pages import SharedPages, lru_hit_fraction
from kvarto.planning.traces import Trace

KINDS = ("reserved", "oracle", "pages", "shared")
CURVE_STEPS = 12


@dataclass(frozen=True, slots=True)
class StudySettings:
    """What the trace is replayed against."""

    budget_bytes: int = 8 * GIB
    """For KV alone."""
    token_bytes: int = 23_040
    """KV of one token; the default is SmolLM2-135M-Instruct's in 16 bits."""
    step_s: float = 0.03
    """Seconds of trace time that a step takes."""
    rate_scale: float | None = None
    """How much faster than recorded requests come; None: twice what the budget could hold without waste."""
    reserved_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    page_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    shared_page_sizes: tuple[int, ...] = (16,)
    """For pages with a prefix cache; each divides the trace's blocks."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One policy. Fractions are of the budget while requests waited for memory, unless said otherwise."""

    policy: str
    kind: str
    """`reserved`, `oracle`, `pages` or `shared`."""
    page_size: int | None
    num_served: int
    num_refused: int
    used_fraction: float
    internal_fraction: float
    external_fraction: float
    cached_fraction: float
    idle_fraction: float
    waste_fraction: float
    """Of the bytes held, those without a token, over all requests' whole lives."""
    expected_waste_fraction: float | None
    """The same in closed form, for pages that are not shared."""
    mean_running: float
    peak_running: int
    oracle_share: float
    """Mean concurrency over that of the best oracle of the true length."""
    num_output_tokens_per_step: float
    peak_table_bytes: int
    num_preemptions: int
    recomputed_fraction: float
    """Tokens computed a second time over all tokens."""
    hit_fraction: float | None
    """Prompt blocks found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class HitPoint:
    """The prefix cache of one size."""

    num_blocks: int
    pool_bytes: int
    hit_fraction: float


@dataclass(frozen=True, slots=True)
class Study:
    """All figures of one trace."""

    trace: str
    num_requests: int
    rate_scale: float
    settings: StudySettings
    rows: list[StudyRow] = field(default_factory=list)
    hit_curve: list[HitPoint] = field(default_factory=list)
    """Ends with an unbounded pool. Empty when the trace doesn't say which prompts are equal."""

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def run_study(trace: Trace, settings: StudySettings, on_policy: Callable[[str], None] = lambda name: None) -> Study:
    """Replay the trace under every policy; `on_policy` hears the name of each before it runs."""
    scale = settings.rate_scale or saturating_rate_scale(
        trace, settings.budget_bytes, settings.token_bytes, settings.step_s
    )
    arrival_step = (trace.arrival_s / scale / settings.step_s).astype(np.int64)
    outcomes = []
    for kind, policy in policies(trace, settings):
        on_policy(policy.name)
        replay = Replay(trace, policy, settings.budget_bytes, settings.token_bytes, arrival_step)
        outcomes.append((kind, policy, replay.run()))
    oracle_running = max((result.mean_running for kind, _, result in outcomes if kind == "oracle"), default=0.0)
    rows = [_row(trace, settings, kind, policy, result, oracle_running) for kind, policy, result in outcomes]
    return Study(trace.name, len(trace), scale, settings, rows, hit_curve(trace, settings.token_bytes))


def policies(trace: Trace, settings: StudySettings) -> Iterator[tuple[str, AllocationPolicy]]:
    """Every policy with its kind, made when it is asked for: each begins with the whole budget free."""
    budget, token = settings.budget_bytes, settings.token_bytes
    for length in settings.reserved_lengths:
        yield "reserved", Reservation(f"reserve {length:,}", FirstFit(budget), token, _at_most(length))
    yield "reserved", Reservation("reserve next 2^n", FirstFit(budget), token, _next_power_of_two)
    for allocator in (Buddy(budget), FirstFit(budget), Compacting(budget)):
        yield "oracle", Reservation(f"exact, {allocator.name}", allocator, token, _exactly)
    for page_size in settings.page_sizes:
        yield "pages", Pages(budget, token, page_size)
    for page_size in settings.shared_page_sizes if trace.block_ids is not None else ():
        yield "shared", SharedPages(budget, token, page_size, trace)


def _at_most(length: int) -> Callable[[int], int | None]:
    return lambda max_tokens: length if max_tokens <= length else None


def _next_power_of_two(max_tokens: int) -> int:
    return 1 << (max_tokens - 1).bit_length()


def _exactly(max_tokens: int) -> int:
    return max_tokens


def _row(trace: Trace, settings: StudySettings, kind: str, policy: AllocationPolicy, result: ReplayResult,
         oracle_running: float) -> StudyRow:  # fmt: skip
    tally = result.crowded if result.crowded.num_steps else result.whole
    parts = {
        name: tally.fraction(getattr(tally, f"{name}_bytes"), settings.budget_bytes)
        for name in ("used", "internal", "external", "cached")
    }
    page_size = policy.page_size if isinstance(policy, Pages) else None
    is_expected = page_size is not None and kind == "pages" and not result.num_refused
    num_tokens = int(trace.num_prompt_tokens.sum() + trace.num_output_tokens.sum())
    return StudyRow(
        policy=policy.name,
        kind=kind,
        page_size=page_size,
        num_served=result.num_served,
        num_refused=result.num_refused,
        used_fraction=parts["used"],
        internal_fraction=parts["internal"],
        external_fraction=parts["external"],
        cached_fraction=parts["cached"],
        idle_fraction=1 - sum(parts.values()),
        waste_fraction=result.waste_fraction,
        expected_waste_fraction=expected_waste_fraction(trace, page_size) if is_expected and page_size else None,
        mean_running=result.mean_running,
        peak_running=result.peak_running,
        oracle_share=result.mean_running / oracle_running if oracle_running else 0.0,
        num_output_tokens_per_step=result.whole.running / max(1, result.whole.num_steps),
        peak_table_bytes=result.peak_table_bytes,
        num_preemptions=result.num_preemptions,
        recomputed_fraction=result.num_recomputed_tokens / num_tokens,
        hit_fraction=policy.hit_fraction if isinstance(policy, SharedPages) else None,
    )


def hit_curve(trace: Trace, token_bytes: int) -> list[HitPoint]:
    """Hit rate over the size of the pool, in powers of two down from what holds every block."""
    if trace.block_ids is None:
        return []
    total = len(np.unique(np.concatenate(trace.block_ids)))
    sizes = [max(1, total >> shift) for shift in range(CURVE_STEPS, 0, -1)] + [total]
    block_bytes = trace.block_tokens * token_bytes
    return [HitPoint(size, size * block_bytes, lru_hit_fraction(trace, size)) for size in sorted(set(sizes))]
