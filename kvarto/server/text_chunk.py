"""Chunks of a stream that differ in nothing but their text: what stands around it is encoded once."""

from __future__ import annotations

import msgspec

from kvarto.server.event_stream import event


class TextChunk:
    """Gives events of one chunk with ever other texts, byte for byte as `event` would."""

    def __init__(self, empty: msgspec.Struct) -> None:
        """`empty` is the chunk with the text "", behind which it has no other empty string."""
        self._head, quotes, self._tail = event(empty).rpartition(b'""')
        assert quotes, "the chunk has no empty text"

    def event(self, text: str) -> bytes:
        """The chunk with this text."""
        return self._head + msgspec.json.encode(text) + self._tail
