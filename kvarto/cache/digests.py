"""Keys of the prefix cache: a chain of 256-bit digests over typed, length-prefixed fields.

    root   = blake2b(key=secret, fields: identity, adapter, salt)
    unit i = blake2b(fields: parent = digest of unit i - 1 or root, tokens = 16 ids as little-endian int32)
    branch = blake2b(fields: parent, adapter, first token of it)     between two units, where an adapter begins: `turn`

The secret enters once: every digest of a chain is a function of its root, so nobody without the secret can make one,
and chains of different models, adapters or salts have nothing in common. A field is a tag, its length and its bytes;
an absent field differs from an empty one. The fields of a unit fit into one block of the hash.
"""

from __future__ import annotations

from hashlib import blake2b

from kvarto.core.digest_fields import DIGEST_BYTES, field, field_header

MATCH_UNIT = 16
"""Tokens per digest, whatever the page size."""
TOKEN_BYTES = 4
UNIT_BYTES = MATCH_UNIT * TOKEN_BYTES

_PARENT = field_header(b"P", DIGEST_BYTES)
_TOKENS = field_header(b"T", UNIT_BYTES)


def root_fields(identity: bytes, adapter_digest: bytes, salt: str | None) -> bytes:
    """What separates chains: the model with its numerics and layout, the adapter's content, the tenant's salt."""
    fields = [(b"I", identity), (b"A", adapter_digest)]
    if salt is not None:
        # A salt is a client's string and may hold lone surrogates, which JSON can carry and UTF-8 cannot.
        fields.append((b"S", salt.encode("utf-8", "surrogatepass")))
    return b"".join(field(tag, value) for tag, value in fields)


def root_digest(key: bytes, fields: bytes) -> bytes:
    """Digest before the first token. `key`: up to 64 secret bytes."""
    return blake2b(fields, key=key, digest_size=DIGEST_BYTES).digest()


def branch_fields(adapter_digest: bytes, start: int) -> bytes:
    """What separates chains that leave the base's: the adapter's content, and the token from which it is active."""
    return field(b"A", adapter_digest) + field(b"B", start.to_bytes(8, "little"))


def branch_digest(parent: bytes, fields: bytes) -> bytes:
    """Digest between the last unit of the base and the first of the adapter."""
    return blake2b(_PARENT + parent + fields, digest_size=DIGEST_BYTES).digest()


def unit_digests(parent: bytes, tokens: bytes) -> list[bytes]:
    """Digests of the whole units in `tokens` (little-endian int32 ids), each chained to the one before."""
    digests = []
    for start in range(0, len(tokens) - UNIT_BYTES + 1, UNIT_BYTES):
        parent = blake2b(
            _PARENT + parent + _TOKENS + tokens[start : start + UNIT_BYTES], digest_size=DIGEST_BYTES
        ).digest()
        digests.append(parent)
    return digests
