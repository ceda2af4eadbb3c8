"""Kvarto serves and fine-tunes large language models inside a memory budget that you name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarto.core.sampling import SamplingParams
    from kvarto.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`import kvarto` stays instant: what it exports is imported when it is first used."""
    if name == "LLM":
        from kvarto.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from kvarto.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module `kvarto` has no attribute `{name}`")
