"""Typed reads of GGUF metadata below one prefix, which remember what was asked for.

A GGUF key says its own type, and a hostile or careless file says another than the one we expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvarto.core.errors import BadFile, UnsupportedModel

MAX_COUNT = 1 << 24


class MetadataKeys:
    """The keys `PREFIX…`. All reads raise BadFile for a value of another type, or one that makes no sense."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self._asked: set[str] = set()

    def _get(self, key: str) -> Any:
        self._asked.add(key)
        return self._metadata.get(self._prefix + key)

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return self._get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to 2^24. An array of equal integers, one per layer, counts as one."""
        value = self._get(key)
        value = default if value is None else value
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int or not 0 < value <= MAX_COUNT:
            raise self.wrong(key, f"an integer from 1 to {MAX_COUNT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. float32 values come as the shortest decimal that means them, as a config would say."""
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(str(np.float32(value)))

    def optional_number(self, key: str) -> float | None:
        """The same, None where the key is absent."""
        return self.number(key) if self.has(key) else None

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, at least one."""
        value = self._get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list of strings")
        return value

    def numbers(self, key: str) -> list[float]:
        """An array of finite numbers, at least one."""
        value = self._get(key)
        if not isinstance(value, np.ndarray) or value.size == 0 or not np.isfinite(value).all():
            raise self.wrong(key, "an array of finite numbers")
        found: list[float] = value.tolist()
        return found

    def wrong(self, key: str, expected: str) -> BadFile:
        """The error for a value that is not what it should be."""
        value = self._metadata.get(self._prefix + key)
        found = "missing" if value is None else f"{value!r:.80}"
        return BadFile(f"the GGUF key `{self._prefix}{key}` is {found}; {expected} is needed: convert the model again")

    def refuse_unknown(self, harmless: frozenset[str]) -> None:
        """Raise UnsupportedModel for a key below the prefix that nobody asked for."""
        for key in self._metadata:
            name = key.removeprefix(self._prefix)
            if name != key and name not in self._asked | harmless:
                raise UnsupportedModel(f"the GGUF key `{key}` = {self._metadata[key]!r:.60} is not built in")
