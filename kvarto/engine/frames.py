"""Frames: a 4-byte little-endian length, then that many bytes of one msgpack message. Both ends of the socket use this.

A frame that is too long, cut or not one of our messages raises `EngineError`: the other end is our own program, so
there is nothing to repair, and the process that reads it ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvarto.core.errors import EngineError
from kvarto.engine.config import EngineConfig
from kvarto.engine.messages import MAX_FRAME_BYTES, FromEngine, ToEngine

HEADER_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_config = msgspec.msgpack.Decoder(EngineConfig)


def encode_frame(message: msgspec.Struct) -> bytes:
    """The message with its length in front. Raises EngineError where it exceeds MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    _check_length(len(body))
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def frame_length(header: bytes) -> int:
    """Bytes of the body that follow this 4-byte header. Raises EngineError beyond MAX_FRAME_BYTES."""
    length = int.from_bytes(header, "little")
    _check_length(length)
    return length


def decode_to_engine(body: bytes | bytearray | memoryview) -> ToEngine:
    """A message for the engine, types checked. Raises EngineError."""
    try:
        return _to_engine.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"a frame of {len(body)} bytes is not a message to the engine: {error}") from error


def decode_from_engine(body: bytes | bytearray | memoryview) -> FromEngine:
    """A message of the engine, types checked. Raises EngineError."""
    try:
        return _from_engine.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"a frame of {len(body)} bytes is not a message of the engine: {error}") from error


def decode_config(body: bytes | bytearray | memoryview) -> EngineConfig:
    """The first frame that an engine process reads. Raises EngineError."""
    try:
        return _config.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"the first frame, {len(body)} bytes, is not an EngineConfig: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into frame bodies. Feed it whatever arrived."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take `data` and yield the bodies that are now complete. Raises EngineError for a length beyond the limit."""
        self._pending += data
        while len(self._pending) >= HEADER_BYTES:
            end = HEADER_BYTES + frame_length(bytes(self._pending[:HEADER_BYTES]))
            if len(self._pending) < end:
                return
            body = bytes(self._pending[HEADER_BYTES:end])
            del self._pending[:end]
            yield body


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_FRAME_BYTES:
        raise EngineError(f"a frame of {num_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
