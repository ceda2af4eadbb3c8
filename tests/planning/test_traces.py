"""Traces are read exactly, and a wrong line is named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvarto.core.errors import BadFile
from kvarto.planning.traces import MAX_REQUEST_TOKENS, read_trace
from tests.traces import EXCERPTS, azure_excerpt, mooncake_excerpt

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"
LINE = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'


def test_every_number_of_the_excerpts_is_kept() -> None:
    azure = azure_excerpt()
    rows = [line.split(",") for line in (EXCERPTS / "azure_conv_100.csv").read_text().splitlines()[1:]]
    assert azure.num_prompt_tokens.tolist() == [int(row[1]) for row in rows]
    assert azure.num_output_tokens.tolist() == [int(row[2]) for row in rows]
    assert azure.arrival_s[0] == 0
    assert (np.diff(azure.arrival_s) >= 0).all()

    mooncake = mooncake_excerpt()
    lines = [json.loads(line) for line in (EXCERPTS / "mooncake_100.jsonl").read_text().splitlines()]
    assert mooncake.block_ids is not None
    assert [ids.tolist() for ids in mooncake.block_ids] == [line["hash_ids"] for line in lines]
    assert np.allclose(mooncake.arrival_s * 1000, [line["timestamp"] - lines[0]["timestamp"] for line in lines])


def test_requests_are_put_in_order_of_arrival() -> None:
    late = ROW.replace("18:15:46", "18:16:46").replace("374", "9")
    trace = read_trace("t", [HEADER, late, ROW])
    assert trace.num_prompt_tokens.tolist() == [374, 9]
    assert trace.arrival_s.tolist() == [0.0, 60.0]


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ([], "empty"),
        ([HEADER], "no requests"),
        (["a,b,c", ROW], "TIMESTAMP"),
        (["TIMESTAMP,ContextTokens", ROW], "GeneratedTokens"),
        ([HEADER, ROW, "2023-11-16 18:15:46,1"], "line 3"),
        ([HEADER, ROW.replace("374", "0")], "line 2"),
        ([HEADER, ROW.replace("374", "-5")], "line 2"),
        ([HEADER, ROW.replace("374", str(MAX_REQUEST_TOKENS + 1))], "line 2"),
        ([HEADER, ROW.replace("374", "many")], "line 2"),
        ([HEADER, ROW.replace("2023-11-16", "yesterday")], "line 2"),
        ([LINE, LINE.replace("600", "0")], "line 2"),
        ([LINE, LINE.replace("600", "5000")], "blocks of 512 make 10"),
        ([LINE, LINE.replace('"output_length": 3, ', "")], "output_length"),
        ([LINE, LINE.replace("[1, 2]", "[1, -2]")], "line 2"),
        ([LINE, LINE.replace("[1, 2]", "[1, 18446744073709551616]")], "line 2"),
        ([LINE, LINE[:-4]], "line 2"),
    ],
)
def test_a_wrong_line_is_refused_by_number(lines: list[str], names: str) -> None:
    with pytest.raises(BadFile, match=names):
        read_trace("t", lines)
