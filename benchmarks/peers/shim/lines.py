"""The engine's side of the shim's pipe: requests in, tokens out. Standard library only, for every environment."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Request:
    """One line of the front."""

    id: int
    prompt: list[int]
    max_tokens: int
    adapter: str | None = None
    """By its name; None asks for the base."""


@dataclass(frozen=True)
class Answer:
    """One line to the front: the next tokens of a request, and whether they are its last."""

    id: int
    tokens: list[int]
    finished: bool


class Lines:
    """Requests, read by a thread; answers, written at once. What libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def take(self, is_blocking: bool) -> list[Request]:
        """What has come since the last call; with `is_blocking`, at least one. Ends the process with the front."""
        taken: list[Request] = []
        while is_blocking or not self._requests.empty():
            request = self._requests.get()
            if request is None:
                sys.exit()
            taken.append(request)
            is_blocking = False
        return taken

    def give(self, answers: list[Answer]) -> None:
        """Tokens of several requests, in one write."""
        self._out.write("".join(f"{json.dumps(asdict(answer))}\n" for answer in answers).encode())

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._requests.put(Request(**json.loads(line)))
        self._requests.put(None)
