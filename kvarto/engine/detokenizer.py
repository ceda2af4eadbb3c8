"""Tokens to text as they arrive, and the search for stop strings in it.

Text is made of bytes: each token adds its bytes and an incremental UTF-8 decoder keeps an unfinished character back, so
a token costs what it adds and the pieces always join to the whole. Stop strings are found by one Knuth-Morris-Pratt
automaton each; its state is at once the answer to "how much text may still become a stop string" and must be held back.
Knows nothing of requests, choices or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer; both are table look-ups."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; nothing for ids without a token."""

    def is_special(self, token_id: int) -> bool:
        """Is it a control token, left out of text by `skip_special_tokens`?"""


class _Automaton:
    """Where one stop string stands: `matched` of its characters are the end of the text so far."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._border = _borders(pattern)

    def feed(self, character: str) -> bool:
        """Take one character; True when the text now ends with the pattern."""
        matched = self.matched
        while matched and self.pattern[matched] != character:
            matched = self._border[matched - 1]
        self.matched = matched + (self.pattern[matched] == character)
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    border = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = border[length - 1]
        length += pattern[index] == pattern[length]
        border[index] = length
    return border


class StopScanner:
    """Releases text that can no longer be part of a stop string.

    The output ends at the first character with which any stop string is complete, however the text was cut into
    pieces; of several that end there, the longest counts.
    """

    def __init__(self, stop: Iterable[str], *, keep_stop: bool = False) -> None:
        self._automata = [_Automaton(pattern) for pattern in stop]
        self._keep_stop = keep_stop
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Take new text, give what is safe to show. After a match nothing more comes."""
        if self.found is not None:
            return ""
        if not self._automata:
            return text
        for index, character in enumerate(text):
            complete = [automaton.pattern for automaton in self._automata if automaton.feed(character)]
            if complete:
                return self._end(text[: index + 1], max(complete, key=len))
        return self._release(text)

    def flush(self) -> str:
        """The output ended otherwise: give what was held back."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, found: str) -> str:
        self.found = found
        whole = self.flush() + text
        return whole if self._keep_stop else whole[: len(whole) - len(found)]

    def _release(self, text: str) -> str:
        whole = self._held + text
        cut = len(whole) - max(automaton.matched for automaton in self._automata)
        self._held = whole[cut:]
        return whole[:cut]


class Detokenizer:
    """Text of one choice. Each token costs O(its own bytes)."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_character = False
        self._has_stops = bool(stop)
        self._scanner = StopScanner(stop, keep_stop=include_stop_str_in_output)
        self.num_tokens = 0
        self.stop_found: str | None = None
        """The stop string that ended the text."""

    def feed(self, token_id: int) -> str:
        """Take the next token and give the text that is now certain; "" after a stop string.

        Stop strings are looked for in the text of tokens after the first `min_tokens`.
        """
        self.num_tokens += 1
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        is_ascii = data.isascii() and not self._is_inside_character  # most tokens are: a decoder costs more
        text = data.decode("ascii") if is_ascii else self._decode(data)
        return self._scan(text) if self._has_stops and self.num_tokens > self._min_tokens else text

    def finish(self) -> str:
        """The choice ended: an unfinished character becomes U+FFFD, and text held back is released."""
        rest = self._decoder.decode(b"", final=True)
        return self._scan(rest) + self._scanner.flush()

    def _decode(self, data: bytes) -> str:
        """The characters that are whole with `data`."""
        text = self._decoder.decode(data)
        self._is_inside_character = bool(self._decoder.getstate()[0])
        return text

    def _scan(self, text: str) -> str:
        shown = self._scanner.feed(text)
        self.stop_found = self._scanner.found
        return shown
