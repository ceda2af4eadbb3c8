"""What a person sees while the server starts: phases with seconds, the layout, and how to call it. Then silence."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

from kvarto.engine.messages import Ready

Say = Callable[[str], None]
_BAR_CELLS = 30


def package_version() -> str:
    """Of Kvarto as it is installed."""
    try:
        return version("kvarto")
    except PackageNotFoundError:  # run from a source tree
        return "0+source"


class Phases:
    """Prints each phase with its seconds when the next one begins, and remembers the whole.

    How far a long one is, a terminal sees in a line that goes again; a log does not.
    """

    def __init__(
        self, say: Say, clock: Callable[[], float] = time.monotonic, terminal: TextIO | None = None
    ) -> None:
        """`terminal`: where the line goes; without it, to standard error, if that is one."""
        self._say = say
        self._clock = clock
        self._terminal = sys.stderr if terminal is None and sys.stderr.isatty() else terminal
        self._has_bar = False
        self._started_s = self._began_s = clock()
        self._name: str | None = None

    def begin(self, name: str) -> None:
        """A phase begins, and the one before it ends."""
        self.end()
        self._name, self._began_s = name, self._clock()

    def advance(self, fraction: float) -> None:
        """So much of the phase is done."""
        if self._terminal is not None:
            bar = ("█" * round(fraction * _BAR_CELLS)).ljust(_BAR_CELLS, "·")
            self._terminal.write(f"\r  {self._name or '':<16} {bar} {fraction:4.0%}")
            self._terminal.flush()
            self._has_bar = True

    def end(self) -> None:
        """The last phase ends."""
        if self._has_bar and self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._has_bar = False
        if self._name is not None:
            self._say(f"  {self._name:<16} {self._clock() - self._began_s:6.1f} s")
            self._name = None

    @property
    def total_s(self) -> float:
        """Seconds since the first."""
        return self._clock() - self._started_s


def capacity_line(ready: Ready, device: str) -> str:
    """The line that vLLM prints, letter for letter, because scripts read it."""
    num_tokens = int(ready.max_concurrency * ready.max_model_len)
    kind = "CPU" if device == "cpu" else "GPU"
    return (
        f"{kind} KV cache size: {num_tokens:,} tokens, Maximum concurrency for {ready.max_model_len:,} tokens "
        f"per request: {ready.max_concurrency:.2f}x"
    )


def curl_line(url: str, model: str, *, has_chat: bool, needs_key: bool) -> str:
    """A command to copy that asks the server something."""
    target = f"--unix-socket {url[5:]} http://localhost" if url.startswith("unix:") else url
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    body: dict[str, object]
    if has_chat:
        path, body = "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, body = "/v1/completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 32}
    return f"curl {target}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
