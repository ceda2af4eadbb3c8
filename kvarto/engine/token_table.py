"""A tokenizer's vocabulary as look-ups: text and log-probabilities ask for the same tokens again and again."""

from __future__ import annotations

from typing import Protocol


class Vocabulary(Protocol):
    """What a tokenizer knows of single tokens."""

    def token_to_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in running text; empty for an id without a spelling."""

    @property
    def control_tokens(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""


class TokenTable:
    """Remembers what it was asked: at most one entry for each id of the vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._special = vocabulary.control_tokens
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.token_to_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A single token as text; bytes that are no character by themselves become U+FFFD."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return known

    def is_special(self, token_id: int) -> bool:
        """Is it a control token?"""
        return token_id in self._special
