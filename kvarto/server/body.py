"""A request's body: received with a limit and a deadline, then read into a typed value. All that is wrong is a 4xx."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import re
from typing import TypeVar

import msgspec
from fastapi import Request

from kvarto.core.errors import InvalidRequest
from kvarto.server.errors import BodyTimeout, BodyTooLarge, UnsupportedEncoding
from kvarto.server.protocol import HARMLESS, IGNORED, UNSUPPORTED

logger = logging.getLogger("kvarto.server")

BODY_DEADLINE_S = 60.0
"""A body must have arrived by then, however slowly it comes."""
_MAX_NAMED_FIELDS = 32
"""Unknown fields that are named in the log; clients can invent any number."""

T = TypeVar("T", bound=msgspec.Struct)
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyReader:
    """Reads bodies for one server; remembers which unknown fields it has named."""

    def __init__(self, max_bytes: int, *, strict_fields: bool = False) -> None:
        self._max_bytes = max_bytes
        self._strict_fields = strict_fields
        self._named: set[str] = set()

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body as a `kind`. Raises RequestError: 400, 408, 413 or 415."""
        body = await self._receive(request)
        value = _decode(body, kind)
        self._check_fields(body, kind)
        return value

    async def _receive(self, request: Request) -> bytes:
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedEncoding("compressed bodies are not accepted; send plain JSON", param=None)
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large(int(announced))
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise self._too_large(len(body))
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {BODY_DEADLINE_S:.0f} seconds") from None
        return bytes(body)

    def _too_large(self, num_bytes: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body has {num_bytes} bytes or more; at most {self._max_bytes} are accepted (`--max-request-bytes`)"
        )

    def _check_fields(self, body: bytes, kind: type[msgspec.Struct]) -> None:
        known = _names_of(kind)
        for name, raw in _raw_fields.decode(body).items():
            if name in known or name in IGNORED:
                continue
            if name in UNSUPPORTED:
                _refuse_unsupported(name, bytes(raw))
            elif self._strict_fields:
                raise InvalidRequest(f"`{name[:64]}` is not a field of this request", param=name[:64])
            else:
                self._name_once(name[:64])

    def _name_once(self, name: str) -> None:
        if name not in self._named and len(self._named) < _MAX_NAMED_FIELDS:
            self._named.add(name)
            logger.warning("a client sends the field %r, which this server does not know and ignores", name)


@functools.cache
def _names_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Of its fields. Asking reads the annotations of them all, which takes longer than the rest of a request."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def _refuse_unsupported(name: str, raw: bytes) -> None:
    if raw == b"null" or re.sub(rb"\s", b"", raw) in HARMLESS.get(name, ()):
        return
    raise InvalidRequest(UNSUPPORTED[name], param=name, code="unsupported_parameter")


def _decode(body: bytes, kind: type[T]) -> T:
    gc.disable()  # a body holds no cycles, and to look for them in millions of small lists takes seconds
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error))
        raise InvalidRequest(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    finally:
        gc.enable()


def _explain(text: str) -> tuple[str, str | None]:
    """The library's "Expected `int`, got `str` - at `$.max_tokens`" as a sentence and the field's name."""
    what, _, path = text.partition(" - at `$")
    missing = re.search(r"required field `(\w+)`", what)
    if missing:
        return f"`{missing[1]}` is missing", missing[1]
    field = re.match(r"\.(\w+)", path)
    if field is None:
        return f"the body is not what this path takes: {what[:1].lower()}{what[1:]}", None
    return f"`{field[1]}` is wrong: {what[:1].lower()}{what[1:]}".replace(" | null", ""), field[1]
