"""JSON that we did not write: bounded, valid UTF-8, an object, no key twice, no NaN."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from kvarto.core.errors import BadFile
from kvarto.models.raw_file import RawFile

MAX_CONFIG_BYTES = 64 << 20
"""The largest real one (an index of a sharded mixture of experts) is below 16 MiB."""


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in the file. Raises BadFile."""
    return parse_json(read_text(path, max_bytes), str(path))


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """The whole file. Raises BadFile where it is larger than `max_bytes`."""
    file = RawFile(path)
    try:
        if file.size_bytes > max_bytes:
            raise BadFile(f"`{path}` has {file.size_bytes} bytes; at most {max_bytes} are read")
        return file.read(0, file.size_bytes)
    finally:
        file.close()


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """The object in `text`; `what` names it in errors. Raises BadFile."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            twice, _ = Counter(name for name, _ in items).most_common(1)[0]
            raise BadFile(f"`{what}`: key `{twice}` stands there twice")
        return found

    def constant(name: str) -> NoReturn:
        raise BadFile(f"`{what}`: `{name}` is not JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"`{what}` is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadFile(f"`{what}`: an object was expected, found {type(value).__name__}")
    return value
