"""A mistake in a manifest: one message for people, and the edits that correct it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvarto.cluster.tree import Path


class Severity(StrEnum):
    """What a continuous integration makes of it."""

    ERROR = "error"
    WARNING = "warning"


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""Value of an edit that removes."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Set a value, with mappings on the way where there are none, or remove it."""

    document: int
    path: Path
    value: Any = ABSENT
    """`ABSENT` removes. An index one past a list's end appends."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in the terms of RFC 6902."""
        pointer = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in self.path)
        operation = {"op": "remove"} if self.value is ABSENT else {"op": "add", "value": self.value}
        return {"document": self.document, "path": pointer, **operation}


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake."""

    rule: str
    """Its kind, for programs: `memory-unit`."""
    where: str
    """`Deployment kvarto, container server`."""
    document: int
    path: Path
    message: str
    """What was written, what it means, what to write."""
    edits: tuple[Edit, ...] = ()
    """None where only a person can know what was meant."""
    severity: Severity = field(default=Severity.ERROR)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rule": self.rule,
            "severity": str(self.severity),
            "where": self.where,
            "document": self.document,
            "path": ".".join(map(str, self.path)),
            "message": self.message,
            "edits": [edit.as_dict() for edit in self.edits],
        }


class NoSuchPlace(Exception):
    """An edit leads through something that is neither a mapping nor a list."""


def apply(documents: Sequence[Any], edits: Sequence[Edit]) -> None:
    """Change the documents in place, in the order of the edits. Raises NoSuchPlace, with some of them made."""
    for edit in edits:
        try:
            node = documents[edit.document]
            for part in edit.path[:-1]:
                if isinstance(node, dict) and node.get(part) is None:
                    node[part] = {}
                node = node[part]
            _change(node, edit.path[-1], edit.value)
        except (TypeError, LookupError) as error:
            raise NoSuchPlace(f"{edit.as_dict()['path']}: {error}") from error


def _change(node: Any, key: str | int, value: Any) -> None:
    if value is ABSENT:
        del node[key]
    elif isinstance(node, list) and isinstance(key, int) and key == len(node):
        node.append(value)
    else:
        node[key] = value
