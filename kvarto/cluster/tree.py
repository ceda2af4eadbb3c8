"""Walking parsed YAML that may have any shape: what is not there, or is something else, counts as empty."""

from __future__ import annotations

from typing import Any

Path = tuple[str | int, ...]
"""Keys and indices from the top down."""


class TruthWord(str):
    """`yes`, `on` or `off` without quotes: a truth value to Kubernetes, kept as it was written."""

    __slots__ = ()

    @property
    def is_true(self) -> bool:
        """What it says."""
        return self.lower() in ("y", "yes", "on")


def truth(value: Any) -> bool | None:
    """A truth value, however it is written; None for anything else."""
    if isinstance(value, TruthWord):
        return value.is_true
    return bool(value) if isinstance(value, bool) else None


def as_text(value: Any) -> str:
    """A number or truth value as somebody wrote it who meant text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def mappings(value: Any) -> list[dict[str, Any]]:
    """Those items of a list that are mappings."""
    return [item for item in sequence(value) if isinstance(item, dict)]


def dig(node: Any, *path: str | int) -> Any:
    """What stands at a path, or None."""
    for part in path:
        if isinstance(part, int):
            items = sequence(node)
            node = items[part] if part < len(items) else None
        else:
            node = mapping(node).get(part)
    return node
