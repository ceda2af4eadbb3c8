"""The few endpoints of a model hub that downloads need, over files in memory; run as a thread of the test."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    repos: dict[str, dict[str, bytes]]
    gated: frozenset[str] = frozenset()
    token: str | None = None
    """Required for `private/…` repositories."""
    cut_after_bytes: int | None = None
    """The first GET of a file breaks off here."""
    url: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path, and `Range` header."""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        path = self.path.split("?")[0]
        self.state.requests.append((self.command, path, self.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+)?", path):
            self._api(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(match[1], match[2], has_body)
        else:
            self._send(404, b"{}", {})

    def _refusal(self, repo: str) -> bool:
        is_private = repo.startswith("private/") and self.headers.get("Authorization") != f"Bearer {self.state.token}"
        if repo in self.state.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"})
        elif repo not in self.state.repos or is_private:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repo"})
        else:
            return False
        return True

    def _api(self, repo: str, what: str | None) -> None:
        if self._refusal(repo):
            return
        files = self.state.repos[repo]
        if what == "tree":
            answer: object = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
        else:
            answer = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, name: str, has_body: bool) -> None:
        if self._refusal(repo):
            return
        data = self.state.repos[repo].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.state.cut_after_bytes
        if has_body and cut is not None and start == 0 and len(data) > cut:
            self.state.cut_after_bytes = None
            self._send(200, data, headers, cut)
            return
        self._send(206 if start else 200, data[start:], headers, None if has_body else 0)

    def _send(self, status: int, body: bytes, headers: dict[str, str], num_bytes: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if num_bytes is None else body[:num_bytes])
            if num_bytes is not None:
                self.close_connection = True
