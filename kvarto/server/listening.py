"""The socket that the server listens on: bound before the model is loaded, so that a taken port is known at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from kvarto.core.errors import UsageError
from kvarto.server.config import ServerConfig

_BACKLOG = 2048


class ListeningSocket:
    """The place where clients find the server. Constructed it holds the place; `listen` opens it; `close` gives it up.

    The file of a Unix socket appears only with `listen`: whoever waits for it may connect at once.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises UsageError when the place cannot be had."""
        self._config = config
        self._owns_file = False
        if config.uds is None:
            self.socket = _bind_tcp(config.host, config.port)
        else:
            _remove_stale(config.uds)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def listen(self) -> None:
        """Take connections from now on. Raises UsageError when somebody else took the place meanwhile."""
        config = self._config
        if config.uds is not None:
            _bind_unix(self.socket, config.uds)
            self._owns_file = True
        try:
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise _refused(config.host, config.port, error) from error

    @property
    def url(self) -> str:
        """For people: `http://127.0.0.1:8000`, or `unix:` and a path."""
        config = self._config
        if config.uds is not None:
            return f"unix:{config.uds}"
        host, port = self.socket.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"

    def close(self) -> None:
        """Close it, and remove the file that it made."""
        self.socket.close()
        if self._owns_file and self._config.uds is not None:
            self._owns_file = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config.uds)


def _bind_tcp(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UsageError(f"`--port {port}` is not a TCP port; take one from 1 to 65535, or 0 for a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"`--host {host}` is not an address of this machine: {error}") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refused(host, port, error) from error
    return bound


def _bind_unix(unbound: socket.socket, path: str) -> None:
    """The socket's file belongs to this user alone."""
    mask = os.umask(0o177)
    try:
        unbound.bind(path)
    except OSError as error:
        raise UsageError(f"`--uds {path}` cannot be used: {error.strerror or error}; choose another path") from error
    finally:
        os.umask(mask)


def _remove_stale(path: str) -> None:
    """Remove a socket file that a dead server left; anything else there is not ours."""
    if not os.path.exists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise UsageError(f"`--uds {path}` names something that is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise UsageError(f"another server listens on `{path}`; stop it, or choose another `--uds`")


def _refused(host: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"port {port} on {host} is in use; stop who uses it, or choose another, such as `--port {port + 1}`"
        )
    if error.errno == errno.EACCES:
        return UsageError(f"port {port} needs more rights than this user has; choose one above 1023: `--port 8000`")
    return UsageError(f"cannot listen on {host}, port {port}: {error.strerror or error}")
