"""Typed, length-prefixed fields: what digests are made over, so that no two different contents give the same bytes.

A field is a tag of one byte, its length and its bytes; an absent field differs from an empty one.
"""

from __future__ import annotations

DIGEST_BYTES = 32
PAGE_KEY_BYTES = 48
"""Of the secret under which pages of adapters are hashed: `kvarto.adapters.page_hasher`."""


def field_header(tag: bytes, size_bytes: int) -> bytes:
    """What comes before the bytes of a field."""
    return tag + size_bytes.to_bytes(8, "little")


def field(tag: bytes, value: bytes) -> bytes:
    """The whole field."""
    return field_header(tag, len(value)) + value
