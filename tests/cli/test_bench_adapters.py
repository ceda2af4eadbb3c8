"""Who is asked follows a Zipf law, each kind of load has its turn, and the figures are medians of its own rounds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvarto.cli.bench_adapters import AdapterFlags, bench_adapters, ranks_of
from kvarto.cli.load.adapter_plot import draw
from kvarto.cli.load.adapters import BASE, MANY, ONE, UNGROUPED, AdapterSet, StudySettings, print_study, run_study
from kvarto.cli.load.workload import zipf_models
from kvarto.core.errors import UsageError
from tests.cli.fake_server import FakeServer, serving

SETTINGS = StudySettings(
    num_adapters=5, ranks=(2, 4), modules="all", zipf=1.0, num_prompts=6, max_concurrency=3, input_len=10,
    output_len=4, rounds=2, seed=0,
)  # fmt: skip


def test_zipf_names_come_in_proportion() -> None:
    names = [f"a{k}" for k in range(8)]
    drawn = Counter(zipf_models(names, 40_000, 1.0, seed=0))
    wanted = np.array([1 / k for k in range(1, 9)])
    shares = np.array([drawn[name] for name in names]) / 40_000
    assert np.allclose(shares, wanted / wanted.sum(), atol=0.01)
    assert zipf_models(names, 50, 1.0, seed=3) == zipf_models(names, 50, 1.0, seed=3)
    even = Counter(zipf_models(names, 40_000, 0.0, seed=0))
    assert max(even.values()) < 1.1 * min(even.values())


async def test_three_loads_take_turns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = FakeServer()
    names = tuple(f"a{k}" for k in range(5))
    asked = zipf_models(names, SETTINGS.num_prompts, 1.0, 0)
    async with serving(server) as url:
        study = await run_study(url, SETTINGS, AdapterSet(names, asked, dict.fromkeys(set(asked), 100)))
    models = [body["model"] for body in server.bodies]
    size = SETTINGS.num_prompts
    turns = [Counter(models[start : start + size]) for start in range(0, len(models), size)]
    base, one = Counter({"fake-model": size}), Counter({asked[0]: size})
    assert turns == [base, one, Counter(asked)] * SETTINGS.rounds
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    long = [prompt for prompt in prompts if len(prompt) > 3]
    assert len(set(long)) == len(long)  # nothing comes from the prefix cache of a load before
    assert {kind: len(figures.reports) for kind, figures in study.loads.items()} == {BASE: 2, ONE: 2, MANY: 2}
    assert study.num_failed == 0
    assert study.distinct_bytes == 100 * study.num_distinct
    assert study.loads[MANY].counts[0].grown["kvarto:adapter_loads_total"] == size
    assert study.loads[MANY].counts[1].now["kvarto:adapter_bytes tier=device"] == 7
    assert (study.loads[MANY].adapters_per_step, study.loads[MANY].adapter_bytes_per_step) == (2.5, 1024)
    async with serving(FakeServer()) as url:
        adapters = AdapterSet(names, asked, dict.fromkeys(set(asked), 100))
        study = study.beside(await run_study(url, SETTINGS, adapters, (UNGROUPED,)))
    assert list(study.loads) == [BASE, ONE, MANY, UNGROUPED]
    print_study(study)
    said = capsys.readouterr().out
    assert "kvarto:adapter_loads_total: 6, 6 (each round)" in said
    assert "2.50" in said
    draw(study, tmp_path / "study.svg")
    assert (tmp_path / "study.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (AdapterFlags(ranks="8,"), "--ranks 8,"),
        (AdapterFlags(ranks="0"), "--ranks 0"),
        (AdapterFlags(modules="some"), "--modules some"),
        (AdapterFlags(zipf=-1), "--zipf -1"),
        (AdapterFlags(num_adapters=0), "--num-adapters 0"),
        (AdapterFlags(max_num_seqs=0), "--max-num-seqs 0"),
    ],
)
def test_flags_that_cannot_work(flags: AdapterFlags, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        bench_adapters("demo", flags=flags)


def test_ranks() -> None:
    assert ranks_of("8, 16,3") == (8, 16, 3)
