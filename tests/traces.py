"""Where traces lie: excerpts in `tests/data`, the complete files beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarto.planning.traces import Trace, read_trace

EXCERPTS = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "traces"


def load(path: Path) -> Trace:
    with path.open(encoding="utf-8") as lines:
        return read_trace(path.name, lines)


def azure_excerpt() -> Trace:
    return load(EXCERPTS / "azure_conv_100.csv")


def mooncake_excerpt() -> Trace:
    return load(EXCERPTS / "mooncake_100.jsonl")


def complete(name: str) -> Trace:
    if not (SHARED / name).is_file():
        pytest.skip(f"the complete trace {name} is not beside the checkout, in {SHARED.parent}")
    return load(SHARED / name)
