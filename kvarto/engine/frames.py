"""Frames between server and engine process: a 4-byte little-endian length, then one msgpack message of that many bytes."""

from __future__ import annotations

import msgspec

from kvarto.core.errors import EngineDied
from kvarto.engine.messages import MAX_FRAME_BYTES, FromEngine, ToEngine

HEADER_BYTES = 4

_encoder = msgspec.msgpack.Encoder()
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message as a frame. Raises ValueError when it is larger than the other side accepts."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes does not fit into a frame of at most {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def frame_length(header: bytes) -> int:
    """Bytes that follow the header. Raises EngineDied for a length that nobody of ours would write."""
    length = int.from_bytes(header, "little")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise EngineDied(f"a frame of {length} bytes arrived; frames have 1 to {MAX_FRAME_BYTES} bytes")
    return length


def decode_from_engine(body: bytes) -> FromEngine:
    """Raises EngineDied when the bytes are not a message of the engine."""
    try:
        return _from_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineDied(f"the engine sent a frame that is not one of its messages: {error}") from error


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises EngineDied when the bytes are not a message for the engine; the engine process then ends."""
    try:
        return _to_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineDied(f"a frame arrived that is not a message for the engine: {error}") from error
