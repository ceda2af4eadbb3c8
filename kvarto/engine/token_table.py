"""A tokenizer's vocabulary as look-ups: text and log-probabilities ask for the same tokens again and again."""

from __future__ import annotations

from kvarto.engine.detokenizer import TokenBytes


class TokenTable:
    """Remembers what it was asked: at most one entry for each id of the vocabulary."""

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.token_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A single token as text; bytes that are no character by themselves become U+FFFD."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return known

    def is_special(self, token_id: int) -> bool:
        """Is it a control token?"""
        return self._vocabulary.is_special(token_id)
