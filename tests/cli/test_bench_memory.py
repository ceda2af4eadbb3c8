"""`kvarto bench memory` on the excerpts: table, JSON and drawings say the same as the study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvarto.cli.main import run
from kvarto.planning.paging_study import StudySettings, run_study
from tests.traces import EXCERPTS, mooncake_excerpt

AZURE = str(EXCERPTS / "azure_conv_100.csv")
MOONCAKE = str(EXCERPTS / "mooncake_100.jsonl")


def test_table_json_and_drawings_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    flags = ["--budget", "8GiB", "--json", str(written), "--plot", str(tmp_path / "drawn")]
    assert run(["bench", "memory", "--trace", MOONCAKE, *flags]) == 0
    study = run_study(mooncake_excerpt(), StudySettings())
    figures = json.loads(written.read_text())
    assert [row["policy"] for row in figures["rows"]] == [row.policy for row in study.rows]
    assert figures["rows"][-1]["hit_fraction"] == study.rows[-1].hit_fraction
    assert len(figures["hit_curve"]) == len(study.hit_curve) > 1
    shown = capsys.readouterr().out
    for row in study.rows:
        assert row.policy in shown
        assert f"{row.waste_fraction:.2%}" in shown
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "drawn.svg").read_text()
    assert all(row.policy in (tmp_path / "drawn.svg").read_text() for row in study.rows)


def test_flags_change_what_is_replayed(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    flags = ["--budget", "1GiB", "--page-sizes", "8,1K", "--reserved-lengths", "4k", "--num-requests", "50"]
    assert run(["bench", "memory", "--trace", AZURE, *flags, "--json", str(written), "--rate-scale", "30"]) == 0
    figures = json.loads(written.read_text())
    assert figures["num_requests"] == 50
    assert figures["rate_scale"] == 30
    assert [row["page_size"] for row in figures["rows"] if row["kind"] == "pages"] == [8, 1024]
    assert figures["rows"][0]["policy"] == "reserve 4,000"


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--page-sizes", "8,many"], "many"),
        (["--page-sizes", "0"], "--page-sizes"),
        (["--budget", "0"], "--budget"),
        (["--step-ms", "0"], "--step-ms"),
        (["--rate-scale", "-1"], "--rate-scale"),
        (["--plot", "x.jpg"], ".svg"),
    ],
)
def test_a_wrong_value_is_refused_before_the_replay(
    flags: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "memory", "--trace", AZURE, *flags]) == 2
    captured = capsys.readouterr()
    assert names in captured.err
    assert captured.out == ""


def test_a_file_that_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "noise.csv"
    path.write_bytes(b"\xff\xfe\x00")
    assert run(["bench", "memory", "--trace", str(path)]) == 2
    assert "noise.csv" in capsys.readouterr().err
