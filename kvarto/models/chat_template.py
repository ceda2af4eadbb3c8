"""Turn chat messages into a prompt by the model's own template, which runs in a capped process of its own.

The process starts with the first rendering (or `warm`), keeps the compiled template, and answers in about a
millisecond; one that exceeds a limit is killed and the next rendering gets a fresh one.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvarto.core.errors import BadFile, InvalidRequest, Unavailable

WORKER = Path(__file__).with_name("template_worker.py")
START_S = 60.0
"""A loaded machine may take seconds to start an interpreter; this is not the template's fault."""
RESERVED = frozenset({
    "chat_template", "tokenize", "conversation", "continue_final_message", "return_assistant_tokens_mask", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
})  # fmt: skip
"""Arguments of other servers' template calls that mean more than a variable; no template needs one so named."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Caps on one rendering."""

    time_s: float = 2.0
    """From asking to the whole answer. Real templates take a few milliseconds."""
    compile_s: float = 10.0
    """For reading the template, once per process: jinja2 works out constant expressions then."""
    memory_bytes: int = 512 << 20
    """Address space of the process; the interpreter and jinja2 take about 50 MiB of it."""
    output_bytes: int = 16 << 20
    """UTF-8. No prompt is longer: it would be millions of tokens."""


class _WorkerGone(Exception):
    """The process ended, or was killed, before it answered."""


class ChatTemplate:
    """A model's chat template. Safe to use from several threads; renderings go one after the other."""

    def __init__(
        self,
        template: str,
        *,
        special_tokens: Mapping[str, str],
        tool_template: str | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        """`tool_template` is taken instead where a request brings tools. Nothing is started or parsed yet."""
        self._templates = {"default": template} | ({"tools": tool_template} if tool_template is not None else {})
        self._special_tokens = dict(special_tokens)
        self._limits = limits if limits is not None else TemplateLimits()
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        """Has the templates."""
        self._starting: subprocess.Popen[bytes] | None = None
        """Has not answered yet."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt, with its control tokens spelt out: encode it with `add_special_tokens=False`.

        Raises InvalidRequest where the template refuses the messages or exceeds a limit, BadFile where it does not
        parse.
        """
        _check_variables(variables)
        values = self._special_tokens | variables
        values |= {
            # An absent key and null mean the same to clients, but templates print the latter.
            "messages": [{key: value for key, value in message.items() if value is not None} for message in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        name = "tools" if tools and "tools" in self._templates else "default"
        try:
            request = json.dumps({"name": name, "values": values}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"`messages` is not plain JSON: {error}", param="messages") from error
        with self._lock:
            return self._answer(request)

    def start(self) -> None:
        """Start the process, and return at once."""
        with self._lock:
            if self._worker is None and self._starting is None:
                self._starting = _start_worker()

    def warm(self) -> None:
        """Start the process and compile, so that the first request need not wait. Raises BadFile."""
        with self._lock:
            self._running_worker()

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        with self._lock:
            self._kill()

    def _answer(self, request: bytes) -> str:
        worker = self._running_worker()
        try:
            status, text = _answer_of(worker, _frame(request), self._limits.time_s, self._limits.output_bytes + 1)
        except TimeoutError:
            self._kill()
            raise InvalidRequest(
                f"the chat template took more than {self._limits.time_s:g} s for these messages; send fewer or shorter",
                param="messages",
            ) from None
        except _WorkerGone:
            self._kill()
            raise InvalidRequest("the chat template's process ended over these messages", param="messages") from None
        if status != b"T":
            raise InvalidRequest(f"the chat template refused the messages: {text}", param="messages")
        return text

    def _running_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        started, self._starting = self._starting, None
        self._kill()
        worker = self._worker = _start_worker() if started is None else started
        try:
            _answer_of(worker, b"", START_S, 1)
        except (TimeoutError, _WorkerGone):
            self._kill()
            raise Unavailable("the chat template's process did not start; see the server's log and try again") from None
        self._compile(worker)
        return worker

    def _compile(self, worker: subprocess.Popen[bytes]) -> None:
        limits = self._limits
        caps = {
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "cpu_s": math.ceil(limits.time_s),
            "compile_cpu_s": math.ceil(limits.compile_s),
        }
        setup = json.dumps({"templates": self._templates, "limits": caps}).encode()
        try:
            status, text = _answer_of(worker, _frame(setup), limits.compile_s, limits.output_bytes)
        except (TimeoutError, _WorkerGone):
            status, text = b"S", f"it takes more than {limits.compile_s:g} s or {limits.memory_bytes} bytes"
        if status != b"T":
            self._kill()
            raise BadFile(
                f"the model's chat template does not parse: {text}; mend it, or remove it: "
                "a model without one serves completions alone"
            )

    def _kill(self) -> None:
        workers, self._worker, self._starting = (self._worker, self._starting), None, None
        for worker in workers:
            if worker is not None:
                worker.kill()
                worker.wait()
                for pipe in _pipes(worker):
                    pipe.close()


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in RESERVED or name.startswith("_") or not name.isidentifier():
            raise InvalidRequest(
                f"`chat_template_kwargs` may not set `{name:.80}`; it takes variables that the template itself defines",
                param="chat_template_kwargs",
            )


def _start_worker() -> subprocess.Popen[bytes]:
    # `-I`: neither the working directory nor the environment of the server decides what is imported.
    found = importlib.util.find_spec("jinja2")
    assert found is not None, "jinja2 is a dependency"
    assert found.origin is not None, "jinja2 is a package on disk"
    script = f"import sys, runpy; sys.path.append({str(Path(found.origin).parents[1])!r}); " + (
        f"runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    )
    worker = subprocess.Popen(
        [sys.executable, "-I", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env={}
    )
    for pipe in _pipes(worker):
        os.set_blocking(pipe.fileno(), False)
    return worker


def _pipes(worker: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    return worker.stdin, worker.stdout


def _frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def _answer_of(worker: subprocess.Popen[bytes], data: bytes, time_s: float, max_bytes: int) -> tuple[bytes, str]:
    """Send bytes and read one frame, all within `time_s`. Raises TimeoutError or _WorkerGone."""
    stdin, stdout = _pipes(worker)
    deadline = time.monotonic() + time_s
    _write(stdin.fileno(), data, deadline)
    (length,) = struct.unpack("<I", _read(stdout.fileno(), 4, deadline))
    if not 1 <= length <= max(max_bytes, 1 << 16):
        raise _WorkerGone
    frame = _read(stdout.fileno(), length, deadline)
    return frame[:1], frame[1:].decode("utf-8", "replace")


def _write(fd: int, data: bytes, deadline: float) -> None:
    rest = memoryview(data)
    while rest:
        _wait(fd, select.POLLOUT, deadline)
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            continue
        except OSError:
            raise _WorkerGone from None


def _read(fd: int, num_bytes: int, deadline: float) -> bytes:
    parts = []
    while num_bytes > 0:
        _wait(fd, select.POLLIN, deadline)
        try:
            part = os.read(fd, min(num_bytes, 1 << 20))
        except BlockingIOError:
            continue
        if not part:
            raise _WorkerGone
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    remaining_ms = int((deadline - time.monotonic()) * 1000)
    if remaining_ms <= 0 or not poll.poll(remaining_ms):
        raise TimeoutError
