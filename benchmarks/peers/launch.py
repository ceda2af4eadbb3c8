"""How one server is started and addressed: all that the harness knows of it before it runs."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, and how requests reach what it starts."""

    label: str
    """What it is called in the table."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to ours."""
    model: str
    """Name of the base in requests."""
    port: int
    version: str
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each adapter, the fields of a request that asks for it; they win over what asks for the base."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def addressed(self, adapter: str | None) -> dict[str, Any]:
        """The fields of a request that say whom it asks: an adapter, or None for the base."""
        return {"model": self.model} | (dict(self.adapters[adapter]) if adapter is not None else {})


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
