"""The model as the server knows it: names, text to ids and back, and what it says about its own sampling."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from kvarto.core.errors import InvalidRequest, NotFound
from kvarto.engine.detokenizer import TokenBytes
from kvarto.engine.token_table import TokenTable

_MAX_NEAR = 1000
"""Names that are compared with one that nothing has."""


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

    def adapter_of(self, asked: str | None, adapters: Collection[str]) -> str | None:
        """The adapter that a client asks for as a model; None where it asks for the base, or for whatever there is.

        `adapters` are registered names. Raises NotFound, with near names, for a name that nothing has.
        """
        if asked is None or asked in self.names:
            return None
        if asked in adapters:
            return asked
        near = difflib.get_close_matches(asked, [*self.names, *islice(adapters, _MAX_NEAR)], n=3, cutoff=0.4)
        near = near or list(self.names)
        raise NotFound(
            f"the model `{asked[:200]}` is not served here; did you mean {' or '.join(f'`{name}`' for name in near)}?",
            param="model",
        )

    def refuse_own_name(self, name: str) -> None:
        """Raises InvalidRequest for an adapter that would be called like the base."""
        if name in self.names:
            raise InvalidRequest(
                f"`{name[:200]}` is a name of the base model; call the adapter otherwise", param="lora_name"
            )
