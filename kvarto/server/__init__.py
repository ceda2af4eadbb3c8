"""OpenAI-compatible HTTP in front of the engine's client."""

from __future__ import annotations

from typing import Any

from kvarto.server.config import ServerConfig

__all__ = ["ServerConfig", "run"]


def __getattr__(name: str) -> Any:
    """`run` brings the HTTP stack, which the settings alone do not need."""
    if name == "run":
        from kvarto.server.lifecycle import run

        return run
    raise AttributeError(f"module `kvarto.server` has no attribute `{name}`")
