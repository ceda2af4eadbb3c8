"""What a client of an OpenAI-compatible server needs: JSON in, server-sent events out, errors as sentences."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvarto.core.errors import EngineError, UsageError

CONNECT_TIMEOUT_S = 10
LINE_BYTES = 1 << 20
"""Longest event; one with many log-probabilities is long."""


class ServerUnreachable(UsageError):
    """Nothing answers at the URL."""


class ServerRefused(EngineError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OpenAIClient:
    """One server, at `http://…`, `https://…` or `unix:PATH`. Use as an async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float | None = None) -> None:
        parts = urlsplit(url)
        self._socket_path = parts.path if parts.scheme == "unix" else None
        if not self._socket_path and (parts.scheme not in ("http", "https") or not parts.netloc):
            raise UsageError(f"`--url {url}` is no address; write `http://127.0.0.1:8000`, or `unix:PATH` for a socket")
        self._url = "http://localhost" if self._socket_path else url.rstrip("/").removesuffix("/v1")
        self._address = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0)
        if self._socket_path is not None:
            connector = aiohttp.UnixConnector(self._socket_path, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout, read_bufsize=LINE_BYTES
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None, "closed before it was opened"
        await self._session.close()

    async def models(self) -> list[str]:
        """Ids of `/v1/models`."""
        answer = await self.get("/v1/models")
        return [card["id"] for card in answer["data"]]

    async def get(self, path: str) -> Any:
        """A JSON answer."""
        async with self._ask("GET", path, None) as response:
            return msgspec.json.decode(await response.read())

    async def get_text(self, path: str) -> str:
        """An answer as text."""
        async with self._ask("GET", path, None) as response:
            return await response.text()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """A JSON answer to a JSON body."""
        async with self._ask("POST", path, body) as response:
            return msgspec.json.decode(await response.read())

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The objects of a stream, until `[DONE]`. An object that carries an error raises it."""
        async with self._ask("POST", path, body) as response:
            async for line in _lines(response.content):
                if not line.startswith(b"data:"):
                    continue  # blank lines, and comments that keep the connection open
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    event = msgspec.json.decode(data)
                except msgspec.DecodeError as error:
                    raise ServerRefused(f"an event of the stream is not JSON: {error}", response.status) from error
                if "error" in event:
                    raise ServerRefused(_sentence(event), response.status)
                yield event
        raise ServerRefused("the stream ended without `[DONE]`", 200)

    @asynccontextmanager
    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "used before it was opened"
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, self._url + path, data=data, headers=headers) as response:
                if response.status >= 400:
                    raise ServerRefused(await _refusal(response), response.status)
                yield response
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachable(
                f"no server answers at {self._address}; start one with `kvarto serve`, or name another with `--url`"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerRefused(f"{path}: {str(error) or type(error).__name__}", 0) from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines. All that came together is cut at once: to wait for each costs more than it says."""
    rest = b""
    async for some in content.iter_any():
        *lines, rest = (rest + some).split(b"\n")
        if len(rest) > LINE_BYTES:
            raise ServerRefused(f"an event of the stream is longer than {LINE_BYTES} bytes", 200)
        for line in lines:
            yield line
    if rest:
        yield rest


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = await response.read()
    try:
        return f"{response.status}: {_sentence(msgspec.json.decode(text))}"
    except (msgspec.DecodeError, AttributeError):
        return f"{response.status}: {text[:200].decode(errors='replace')}"


def _sentence(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)
