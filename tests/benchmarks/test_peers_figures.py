from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.compare import Meeting, Row
from benchmarks.peers.figures import Answer, decode_rate, output_rate, prefill_rate, spread_fraction
from benchmarks.peers.plots import draw, merged_medians, sweep_points
from benchmarks.peers.servers import ENGINES, ServerName
from benchmarks.peers.table import table
from benchmarks.peers.workload import COLUMNS
from kvarto.core.errors import UsageError

durations = st.floats(0.01, 100.0)
answers = st.builds(
    lambda prompt, output, sent, ttft, rest: Answer(prompt, output, sent, sent + ttft, sent + ttft + rest),
    st.integers(1, 1000), st.integers(2, 200), durations, durations, durations,
)  # fmt: skip


def row(label: str, factor: float = 1.0) -> Row:
    values = {column.name: [factor, 2 * factor, 9 * factor] for column in COLUMNS}
    return Row(label, "1.0", "serve", 1.5, 0.0, 10**9, values)


@given(st.lists(answers, min_size=1, max_size=5), st.floats(0.1, 10.0))
def test_a_machine_that_is_twice_as_fast_has_twice_the_rates(several: list[Answer], factor: float) -> None:
    faster = [
        Answer(a.num_prompt_tokens, a.num_output_tokens, *(t / factor for t in (a.sent_s, a.first_s, a.last_s)))
        for a in several
    ]
    for rate in (decode_rate, prefill_rate, output_rate):
        assert math.isclose(rate(faster), factor * rate(several), rel_tol=1e-6)


@given(st.lists(answers, min_size=1, max_size=5))
def test_output_rate_counts_the_time_when_several_run_once(several: list[Answer]) -> None:
    serial_s = sum(answer.last_s - answer.sent_s for answer in several)
    gaps_s = max(a.last_s for a in several) - min(a.sent_s for a in several)
    tokens = sum(answer.num_output_tokens for answer in several)
    assert math.isclose(output_rate(several), tokens / gaps_s)
    if len(several) == 1:
        assert math.isclose(output_rate(several), tokens / serial_s)


def test_the_first_token_belongs_to_prefill() -> None:
    answer = Answer(500, 11, sent_s=1.0, first_s=3.0, last_s=8.0)
    assert decode_rate([answer]) == 10 / 5.0
    assert prefill_rate([answer]) == 500 / 2.0


def test_spread_is_relative() -> None:
    assert spread_fraction([9.0, 10.0, 12.0]) == spread_fraction([90.0, 100.0, 120.0]) == pytest.approx(0.3)


def test_the_ratio_is_baseline_over_peer_and_uses_medians() -> None:
    meeting = Meeting((row("ours", 3.0), row("peer", 1.5)))
    assert all(meeting.ratio(column.name) == 2.0 for column in COLUMNS)
    lines = table([meeting], COLUMNS).splitlines()
    assert [line.split()[0] for line in lines] == ["server", "ours", "peer", "ratio"]
    assert lines[3].split()[1:] == ["2.00×"] * len(COLUMNS)
    assert len({len(line) for line in lines[:3]}) == 1, "columns align"


def test_a_server_alone_has_no_ratio() -> None:
    assert "ratio" not in table([Meeting((row("ours"),))], COLUMNS)


def test_names_have_an_engine_a_format_and_flags() -> None:
    name = ServerName.parse("llama.cpp:q8_0 --threads 1 --x 'a b'")
    assert (name.engine.name, name.weights, name.flags) == ("llama.cpp", "q8_0", ("--threads", "1", "--x", "a b"))
    name = ServerName.parse("openvino OMP_NUM_THREADS=1 A_B=c=d --property HINT=f32")
    assert (name.environment, name.flags) == ({"OMP_NUM_THREADS": "1", "A_B": "c=d"}, ("--property", "HINT=f32"))
    for engine in ENGINES.values():
        assert ServerName.parse(engine.name).weights == engine.formats[0]


@pytest.mark.parametrize("text", ["", "nobody", "vllm:q4_1", ":q4_1"])
def test_an_unknown_engine_or_format_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(UsageError, match="there are|is measured in"):
        ServerName.parse(text)


def test_a_server_that_met_several_is_drawn_once_at_its_best() -> None:
    result = {"meetings": [[row("ours", 1.0).as_dict(), row("a").as_dict()], [row("ours", 2.0).as_dict()]]}
    merged = merged_medians([result])
    assert list(merged) == ["ours", "a"]
    assert merged["ours"]["single"] == 4.0


def test_points_of_a_sweep_come_in_numeric_order() -> None:
    assert sweep_points({"at128": 3.0, "at2": 2.0, "ctx4": 9.0, "at1": 1.0}, "at") == ([1, 2, 128], [1.0, 2.0, 3.0])


def test_pictures_are_written_for_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    swept = Row("ours", "1", "serve", 1.0, 0.0, 1, {"at1": [5.0], "at8": [20.0]})
    result = {"benchmark": "peers", "meetings": [[row("ours").as_dict()], [swept.as_dict()]]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    written = draw([tmp_path / "result.json"], tmp_path / "plots")
    assert {path.name for path in written} == {f"peers_{n}.{s}" for n in ("columns", "at") for s in ("png", "svg")}
    assert all(path.stat().st_size > 1_000 for path in written)
