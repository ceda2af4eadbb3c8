"""The model as the server knows it: names, text to ids and back, and what it says about its own sampling."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvarto.core.errors import NotFound
from kvarto.engine.detokenizer import TokenBytes
from kvarto.engine.token_table import TokenTable


class TextTokenizer(TokenBytes, Protocol):
    """What the server needs of a tokenizer. Called from several threads."""

    @property
    def max_token_chars(self) -> int:
        """Characters of the longest spelling in the vocabulary."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""


class Template(Protocol):
    """What the server needs of a chat template. May block; called off the event loop."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's text."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one or more names; the first is the one in answers."""

    names: tuple[str, ...]
    root: str
    """The model as the operator named it, without local folders."""
    tokenizer: TextTokenizer
    tokens: TokenTable
    chat_template: Template | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]
    """`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, where the model names them."""
    created: int
    """Seconds since 1970."""

    @property
    def name(self) -> str:
        """In answers."""
        return self.names[0]

    def check_name(self, asked: str | None) -> None:
        """Raises NotFound, with near names, when a client asks for another model. None asks for whatever there is."""
        if asked is None or asked in self.names:
            return
        near = difflib.get_close_matches(asked, self.names, n=3, cutoff=0.4) or self.names
        raise NotFound(
            f"the model `{asked[:200]}` is not served here; did you mean {' or '.join(f'`{name}`' for name in near)}?",
            param="model",
        )
