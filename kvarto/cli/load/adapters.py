"""Loads by turns on one server: requests over many adapters, over one, and of the bare base."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvarto.adapters.random_adapter import ALL_LINEAR, QV, RandomAdapter
from kvarto.adapters.targets import BaseTargets, targets_of
from kvarto.cli.load.report import LoadReport, report
from kvarto.cli.load.run import LoadSettings, find_vocabulary, run_load
from kvarto.cli.load.workload import LengthRange, PromptIds, Workload, random_workload, zipf_models
from kvarto.cli.openai_client import OpenAIClient
from kvarto.core.errors import EngineError
from kvarto.core.units import format_bytes

INPUT_SPREAD, OUTPUT_SPREAD = 0.9, 1 / 3
MANY, ONE, BASE = "many adapters", "one adapter", "bare base"
UNGROUPED = "ungrouped"
"""Many adapters, on a server of its own that does not prefer those which run already."""
_STEPS, _IN_STEPS, _STEP_BYTES = (
    f"kvarto:{name}_total" for name in ("adapter_steps", "adapters_in_steps", "adapter_step_bytes")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """See `AdapterFlags`."""

    num_adapters: int
    ranks: tuple[int, ...]
    modules: str
    zipf: float
    num_prompts: int
    max_concurrency: int
    input_len: int
    output_len: int
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Adapters in a folder, and who asks for which."""

    names: tuple[str, ...]
    asked: tuple[str, ...]
    """One per request."""
    size_bytes: dict[str, int]
    """Of those that are asked for."""

    @classmethod
    def make(cls, model: str, settings: StudySettings, folder: Path) -> AdapterSet:
        """Write them. The adapters that nobody asks for are of the right size and take no room."""
        base = base_targets(model)
        names = tuple(f"adapter-{index:05d}" for index in range(settings.num_adapters))
        asked = zipf_models(names, settings.num_prompts, settings.zipf, settings.seed)
        ends = ALL_LINEAR if settings.modules == "all" else QV
        used, sizes = set(asked), {}
        for index, name in enumerate(names):
            rank = settings.ranks[index % len(settings.ranks)]
            adapter = RandomAdapter(ends, rank, seed=settings.seed + index, is_hole=name not in used)
            adapter.write(folder / name, base)
            if name in used:
                sizes[name] = sum(2 * a * b for _, (a, b) in adapter.tensors(base))
        return cls(names, asked, sizes)


def base_targets(model: str) -> BaseTargets:
    """The modules of a model."""
    from kvarto.engine.assemble import open_program
    from kvarto.engine.config import EngineConfig
    from kvarto.engine.settings import open_backend
    from kvarto.models.hub import resolve

    config = EngineConfig(model=str(resolve(model, say=lambda text: None)))
    files, program = open_program(config, open_backend(config))
    files.close()
    return targets_of(program)


@dataclass(frozen=True, slots=True)
class Counts:
    """What the server counted while one load ran: series of `/metrics` that speak of adapters, and how they grew."""

    grown: dict[str, float]
    now: dict[str, float]

    def per_step(self, name: str) -> float:
        """How much a series grew for each step that had an adapter."""
        num_steps = self.grown.get(_STEPS, 0.0)
        return self.grown.get(name, 0.0) / num_steps if num_steps else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One kind of load, its rounds in order."""

    reports: tuple[LoadReport, ...]
    counts: tuple[Counts, ...]

    @property
    def output_tokens_per_s(self) -> float:
        """Median."""
        return statistics.median(each.output_tokens_per_s for each in self.reports)

    @property
    def mean_ttft_ms(self) -> float:
        """Median over rounds of the mean time to the first token."""
        return statistics.median(each.time_to_first_token.mean_ms for each in self.reports if each.time_to_first_token)

    @property
    def p99_interval_ms(self) -> float:
        """Median over rounds of the 99th percentile of the time between tokens."""
        spreads = [each.inter_token_latency for each in self.reports]
        return statistics.median(spread.percentiles_ms["p99"] for spread in spreads if spread)

    @property
    def adapters_per_step(self) -> float:
        """Median of the mean number of distinct adapters, over steps that had any."""
        return statistics.median(each.per_step(_IN_STEPS) for each in self.counts)

    @property
    def adapter_bytes_per_step(self) -> float:
        """The same for their bytes, which such a step reads beside the base's."""
        return statistics.median(each.per_step(_STEP_BYTES) for each in self.counts)


@dataclass(frozen=True, slots=True)
class AdapterStudy:
    """All of it."""

    settings: StudySettings
    num_distinct: int
    """Adapters that some request asks for."""
    distinct_bytes: int
    loads: dict[str, Figures]
    """By kind, in the order in which they took turns."""

    def beside(self, other: AdapterStudy) -> AdapterStudy:
        """With the loads of the same settings on another server."""
        return replace(self, loads=self.loads | other.loads)

    @property
    def num_failed(self) -> int:
        """Requests without an answer, of all loads."""
        return sum(each.num_failed for figures in self.loads.values() for each in figures.reports)


async def run_study(
    url: str, settings: StudySettings, adapters: AdapterSet, names: Sequence[str] = (BASE, ONE, MANY)
) -> AdapterStudy:
    """Loads of these names by turns, in this order in each round. Prompts differ from round to round."""
    all_kinds: dict[str, tuple[str, ...] | None] = {
        BASE: None,
        ONE: (adapters.asked[0],) * settings.num_prompts,
        MANY: adapters.asked,
        UNGROUPED: adapters.asked,
    }
    kinds = {name: all_kinds[name] for name in names}
    rounds: dict[str, list[tuple[LoadReport, Counts]]] = {kind: [] for kind in kinds}
    async with OpenAIClient(url) as client:
        base = (await client.models())[0]
        vocabulary = await find_vocabulary(client, base)
        for turn in range(settings.rounds):
            for place, (kind, models) in enumerate(kinds.items()):
                prompts = PromptIds(vocabulary, settings.seed + turn * len(kinds) + place)
                rounds[kind].append(await _one_load(client, base, settings, models, prompts))
    return AdapterStudy(
        settings,
        len(adapters.size_bytes),
        sum(adapters.size_bytes.values()),
        {kind: Figures(tuple(r for r, _ in each), tuple(c for _, c in each)) for kind, each in rounds.items()},
    )


async def _one_load(
    client: OpenAIClient, base: str, settings: StudySettings, models: tuple[str, ...] | None, prompts: PromptIds
) -> tuple[LoadReport, Counts]:
    workload = _workload(settings, models)
    before = await _adapter_series(client)
    answers, duration_s = await run_load(client, workload, prompts, LoadSettings(base, settings.max_concurrency))
    after = await _adapter_series(client)
    found = report(answers, duration_s)
    if found.num_failed == found.num_requests:
        raise EngineError(f"no request was answered: {next(iter(found.errors))}")
    return found, Counts({name: value - before.get(name, 0.0) for name, value in after.items()}, after)


def _workload(settings: StudySettings, models: tuple[str, ...] | None) -> Workload:
    made = random_workload(
        settings.num_prompts,
        LengthRange(settings.input_len, INPUT_SPREAD),
        LengthRange(settings.output_len, OUTPUT_SPREAD),
        None,
        settings.seed,
    )
    return Workload(None, made.num_prompt_tokens, made.num_output_tokens, models=models)


async def _adapter_series(client: OpenAIClient) -> dict[str, float]:
    """`kvarto_adapter_…` of `/metrics`, by name and labels; the model's own label left out."""
    found = {}
    for family in text_string_to_metric_families(await client.get_text("/metrics")):
        for sample in family.samples:
            if sample.name.startswith("kvarto:adapter"):
                labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine")]
                found[" ".join([sample.name, *labels])] = sample.value
    return found


def print_study(study: AdapterStudy) -> None:
    """A table of medians, and what the last round's loads did with adapters."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "tokens/s", "of one", "TTFT, ms", "of one", "p99, ms", "adapters", "bytes", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    one = study.loads[ONE]
    for kind, figures in study.loads.items():
        table.add_row(
            kind,
            f"{figures.output_tokens_per_s:,.1f}",
            f"{figures.output_tokens_per_s / one.output_tokens_per_s:.0%}",
            f"{figures.mean_ttft_ms:,.0f}",
            f"{figures.mean_ttft_ms / one.mean_ttft_ms:.2f}×",
            f"{figures.p99_interval_ms:,.1f}",
            f"{figures.adapters_per_step:,.2f}" if figures.adapters_per_step else "",
            format_bytes(round(figures.adapter_bytes_per_step)) if figures.adapter_bytes_per_step else "",
        )
    console.print(table)
    console.print(
        "output tokens; mean time to the first; p99 between two; distinct adapters per step that has any, their bytes",
        soft_wrap=True,
    )
    console.print(
        f"{study.num_distinct} of {study.settings.num_adapters:,} adapters were asked for: "
        f"{format_bytes(study.distinct_bytes)}; medians of {study.settings.rounds}",
        soft_wrap=True,
    )
    for line in _count_lines(study.loads[MANY].counts):
        console.print(line, soft_wrap=True)


def _count_lines(counts: Sequence[Counts]) -> list[str]:
    names = sorted({name for each in counts for name in each.now})
    ending = " (each round)" if len(counts) > 1 else ""
    return [f"{name}: {', '.join(f'{_growth(each, name):,.0f}' for each in counts)}{ending}" for name in names]


def _growth(counts: Counts, name: str) -> float:
    """Counters by what they grew, gauges as they stand."""
    return counts.grown[name] if name.partition(" ")[0].endswith("_total") else counts.now[name]
