"""Which bytes a vocabulary's spelling stands for: byte-level alphabets, byte fallback, and the `▁` of SentencePiece."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100 in order."""
    alphabet = {chr(byte): byte for byte in _PRINTABLE}
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class TokenBytes:
    """Reads spellings as the given decoder (its part of a `tokenizer.json`) would."""

    def __init__(self, decoder: Mapping[str, Any]) -> None:
        steps = decoder.get("decoders", [decoder])
        kinds = {step.get("type") for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        self._has_space_mark = "Metaspace" in kinds or any(
            step.get("type") == "Replace" and step.get("pattern") == {"String": "▁"} for step in steps
        )

    def of(self, piece: str, is_added: bool) -> bytes:
        """The bytes; added tokens are spelt as they are."""
        if is_added:
            return piece.encode()
        if self._is_byte_level:
            return b"".join(bytes((BYTE_ALPHABET[char],)) if char in BYTE_ALPHABET else char.encode() for char in piece)
        if self._has_byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return (piece.replace("▁", " ") if self._has_space_mark else piece).encode()
