"""Request traces: when requests came, how long prompts and outputs were, and which prompts began alike.

Two public forms are read. Azure's CSV (AzurePublicDataset, CC-BY 4.0; Patel et al., Splitwise, ISCA 2024):
`TIMESTAMP,ContextTokens,GeneratedTokens`. Mooncake's JSON lines (kvcache-ai/Mooncake, Apache-2.0; Qin et al.,
FAST 2025): `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one id per 512 tokens of the prompt;
equal ids mean that the prompts are equal up to the end of that block. Lines come in, arrays go out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvarto.core.errors import BadFile

MOONCAKE_BLOCK_TOKENS = 512
MAX_REQUEST_TOKENS = 1 << 24
"""A longer request is taken for a broken line."""

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TokenCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUEST_TOKENS)]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; arrays are `[num_requests]`."""

    name: str
    arrival_s: NDArray[np.float64]
    """Seconds since the first request."""
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    block_ids: tuple[NDArray[np.int64], ...] | None = None
    """Ids of each prompt's blocks of `block_tokens` tokens, the last one perhaps partial; None: prompts are unknown."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def head(self, num_requests: int | None) -> Trace:
        """The first `num_requests` requests; None keeps all."""
        return Trace(
            self.name,
            self.arrival_s[:num_requests],
            self.num_prompt_tokens[:num_requests],
            self.num_output_tokens[:num_requests],
            self.block_ids[:num_requests] if self.block_ids is not None else None,
            self.block_tokens,
        )


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _TokenCount
    output_length: _TokenCount
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


def read_trace(name: str, lines: Iterable[str]) -> Trace:
    """Read either form, told apart by the first line. Raises BadFile with the line's number."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise BadFile(f"`{name}` is empty; a trace is Azure's CSV or Mooncake's JSON lines")
    if first[1].lstrip().startswith("{"):
        return _read_mooncake(name, first, numbered)
    return _read_azure(name, first[1], numbered)


def _read_azure(name: str, header: str, lines: Iterable[tuple[int, str]]) -> Trace:
    columns = [column.strip() for column in next(csv.reader([header]))]
    missing = [column for column in _AZURE_COLUMNS if column not in columns]
    if missing:
        raise BadFile(f"`{name}` line 1: no column `{missing[0]}`; a trace in CSV has {', '.join(_AZURE_COLUMNS)}")
    at = [columns.index(column) for column in _AZURE_COLUMNS]
    rows = [_azure_row(name, number, line, at) for number, line in lines]
    return _trace(name, [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def _azure_row(name: str, number: int, line: str, at: list[int]) -> tuple[float, int, int]:
    fields = next(csv.reader([line]))
    try:
        # Seven digits of a second: Python reads six.
        when = datetime.fromisoformat(fields[at[0]].strip()[:26]).replace(tzinfo=UTC).timestamp()
        return when, _tokens(fields[at[1]]), _tokens(fields[at[2]])
    except (ValueError, IndexError) as error:
        raise BadFile(f"`{name}` line {number}: {error or 'too few fields'}; got `{line.strip()[:80]}`") from error


def _tokens(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MAX_REQUEST_TOKENS:
        raise ValueError(f"{count} tokens; 1 to {MAX_REQUEST_TOKENS:,} make sense")
    return count


def _read_mooncake(name: str, first: tuple[int, str], rest: Iterable[tuple[int, str]]) -> Trace:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    rows = [_mooncake_row(name, number, line, decoder) for number, line in (first, *rest)]
    return _trace(
        name,
        [row.timestamp / 1000 for row in rows],
        [row.input_length for row in rows],
        [row.output_length for row in rows],
        tuple(np.array(row.hash_ids, dtype=np.int64) for row in rows),
    )


def _mooncake_row(
    name: str, number: int, line: str, decoder: msgspec.json.Decoder[_MooncakeLine]
) -> _MooncakeLine:
    try:
        row = decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise BadFile(f"`{name}` line {number}: {error}") from error
    expected = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
    if len(row.hash_ids) != expected:
        raise BadFile(
            f"`{name}` line {number}: {len(row.hash_ids)} `hash_ids` for {row.input_length} tokens; "
            f"blocks of {MOONCAKE_BLOCK_TOKENS} make {expected}"
        )
    return row


def _trace(
    name: str,
    when: list[float],
    prompts: list[int],
    outputs: list[int],
    block_ids: tuple[NDArray[np.int64], ...] | None = None,
) -> Trace:
    if not when:
        raise BadFile(f"`{name}` has a header and no requests")
    order = np.argsort(np.array(when), kind="stable")
    arrival_s = np.array(when)[order]
    return Trace(
        name,
        arrival_s - arrival_s[0],
        np.array(prompts, dtype=np.int64)[order],
        np.array(outputs, dtype=np.int64)[order],
        tuple(block_ids[index] for index in order) if block_ids is not None else None,
    )
