"""A chat in the terminal: turns go to a server, and the answer is printed as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvarto.cli.openai_client import OpenAIClient

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."


@dataclass(slots=True)
class Conversation:
    """The turns so far with one model of one server."""

    url: str
    api_key: str | None
    model: str
    settings: dict[str, Any]
    """Sampling fields of every request."""
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system's message, then the turns."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    async def ask(self, text: str, write: Callable[[str], None]) -> Timing:
        """Send a turn and write the answer as it comes. A turn whose answer was cut short is kept as far as it came."""
        self.turns.append({"role": "user", "content": text})
        answer: list[str] = []
        timing = Timing(time.perf_counter())
        try:
            async with OpenAIClient(self.url, api_key=self.api_key) as client:
                async with aclosing(client.stream("/v1/chat/completions", self._body())) as events:
                    async for event in events:
                        piece = timing.take(event)
                        if piece:
                            answer.append(piece)
                            write(piece)
        finally:
            if answer:
                self.turns.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.turns.pop()  # never answered: as if never asked
        return timing

    def _body(self) -> dict[str, Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": self.messages, **self.settings, **options}


@dataclass(slots=True)
class Timing:
    """How long an answer took."""

    asked_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_output_tokens: int = 0

    def take(self, event: dict[str, Any]) -> str:
        """Note when the event came; its text."""
        if event.get("usage"):
            self.num_output_tokens = event["usage"]["completion_tokens"]
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if text:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
        return text

    def __str__(self) -> str:
        if self.first_s is None or self.last_s is None:
            return "no text"
        rate = (self.num_output_tokens - 1) / max(self.last_s - self.first_s, 1e-9)
        return f"first token {self.first_s - self.asked_s:.2f} s, {self.num_output_tokens} tokens, {rate:.1f} tokens/s"


def talk(conversation: Conversation, *, shows_stats: bool) -> None:
    """Read turns until the end of input."""
    print(f"{conversation.model}. {HELP}")
    with asyncio.Runner() as runner:
        for text in _turns():
            if text == "/reset":
                conversation.turns.clear()
                continue
            try:
                timing = runner.run(conversation.ask(text, _write))
                print(f"\n[{timing}]" if shows_stats else "")
            except KeyboardInterrupt:
                print(" …")


def _turns() -> Iterator[str]:
    import readline  # noqa: F401  # editing and history for `input`

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if text in ("/exit", "/quit"):
            return
        if text:
            yield text


def _write(piece: str) -> None:
    print(piece, end="", flush=True)
