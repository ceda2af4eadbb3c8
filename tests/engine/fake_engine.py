"""A small engine process for tests of its client: real frames over the real socket, no model.

Tokens are a hash of (prompt, seed, choice, position), so they depend on nothing else, and a resumed choice goes on with
the tokens it would have had. `config.model` carries what the engine should do wrong, as a query string:
`fake?step_s=0.01&die_after=7&fail=BudgetTooSmall:text&mute_after=5&eos_after=9&max_len=64`.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import time
import zlib
from urllib.parse import parse_qsl

from kvarto.engine.config import EngineConfig
from kvarto.engine.frames import HEADER_BYTES, decode_config, decode_to_engine, encode_frame, frame_length
from kvarto.engine.messages import (
    AdapterAnswer,
    AdapterInfo,
    AdapterNames,
    AddRequest,
    Cancel,
    ListAdapters,
    LoadAdapter,
    LoadFailed,
    Phase,
    Ready,
    Shutdown,
    Stats,
    StatsRequest,
    StepOut,
    TokenLogprobs,
    TokensOut,
    UnloadAdapter,
)

EOS = 0
VOCAB_SIZE = 300
LETTERS = b"abcdefghijklmnopqrstuvwxyz \n"


def token_at(prompt: tuple[int, ...], seed: int, choice: int, position: int) -> int:
    """The token of a choice at an output position: a letter."""
    digest = zlib.crc32(repr((prompt, seed, choice, position)).encode())
    return LETTERS[digest % len(LETTERS)]


def options_of(model: str) -> dict[str, str]:
    return dict(parse_qsl(model.partition("?")[2]))


def info_of(name: str, path: str) -> AdapterInfo:
    return AdapterInfo(
        name=name, path=path, parent="fake", rank=8, size_bytes=1000, num_pages=1, tier="disk", digest=None,
        num_requests=0,
    )  # fmt: skip


class FakeEngine:
    """One loop: read what came, run one step of one token for each request."""

    def __init__(self, connection: socket.socket, config: EngineConfig) -> None:
        self.connection = connection
        self.config = config
        self.options = options_of(config.model)
        self.requests: dict[str, AddRequest] = {}
        self.outputs: dict[tuple[str, int], int] = {}
        self.num_steps = 0
        self.adapters: dict[str, AdapterInfo] = {}
        self.begun: set[str] = set()

    @property
    def num_begun(self) -> int:
        return len(self.begun & set(self.requests))

    def send(self, message: object) -> None:
        self.connection.sendall(encode_frame(message))  # type: ignore[arg-type]

    def load(self) -> None:
        self.send(Phase("find"))
        if "fail" in self.options:
            error, _, message = self.options["fail"].partition(":")
            self.send(LoadFailed(error=error, message=message))
            sys.exit(1)
        self.send(Phase("read"))
        self.send(
            Ready(
                model_name="fake",
                fingerprint=f"fake-{os.getpid() if 'changes' in self.options else 1}",
                vocab_size=VOCAB_SIZE,
                max_model_len=int(self.options.get("max_len", "4096")),
                page_size=16,
                num_pages=1024,
                max_concurrency=16.0,
                layout="weights | activations | pages",
                phases=(("find", 0.0), ("read", 0.0)),
            )
        )

    def run(self) -> None:
        self.load()
        beat_s = time.monotonic()
        while True:
            while self.readable(0.0 if self.requests else 0.05):
                self.take()
            if self.requests:
                self.step()
            elif time.monotonic() - beat_s > 0.2:
                beat_s = time.monotonic()
                self.send(StepOut(step=self.num_steps))

    def readable(self, timeout_s: float) -> bool:
        return bool(select.select([self.connection], [], [], timeout_s)[0])

    def take(self) -> None:
        try:
            header = self.connection.recv(HEADER_BYTES, socket.MSG_WAITALL)
        except ConnectionResetError:
            header = b""
        if len(header) < HEADER_BYTES:
            os._exit(0)
        message = decode_to_engine(self.connection.recv(frame_length(header), socket.MSG_WAITALL))
        if isinstance(message, AddRequest):
            assert len(self.requests) - self.num_begun < self.config.max_num_queued, "the queue is full"
            self.requests[message.request_id] = message
            resumed = message.resumed
            started = (
                dict.fromkeys(range(message.sampling.n), 0)
                if resumed is None
                else {choice.index: len(choice.token_ids) for choice in resumed}
            )
            self.outputs.update({(message.request_id, index): count for index, count in started.items()})
        elif isinstance(message, Cancel):
            self.cancel(message)
        elif isinstance(message, StatsRequest):
            self.send(self.stats())
        elif isinstance(message, LoadAdapter | UnloadAdapter | ListAdapters):
            self.answer(message)
        elif isinstance(message, Shutdown):
            os._exit(0)

    def answer(self, message: LoadAdapter | UnloadAdapter | ListAdapters) -> None:
        """Paths that say `missing` are refused; nothing is read."""
        error, shown = None, list(self.adapters.values())
        if isinstance(message, LoadAdapter):
            if "missing" in message.path:
                error, shown = "AdapterRefused", []
            else:
                self.adapters[message.name] = info = info_of(message.name, message.path)
                shown = [info]
        elif isinstance(message, UnloadAdapter):
            gone = self.adapters.pop(message.name, None)
            error, shown = ("UnknownAdapter", []) if gone is None else (None, [gone])
        self.send(AdapterNames(tuple(self.adapters)))
        text = "" if error is None else f"`{getattr(message, 'name', '')}` cannot be had"
        self.send(AdapterAnswer(request_id=message.request_id, adapters=tuple(shown), error=error, message=text))

    def cancel(self, message: Cancel) -> None:
        if message.choice is None:
            self.forget(message.request_id)
        else:
            self.outputs.pop((message.request_id, message.choice), None)

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.requests),
            num_pages=1024,
            num_free_pages=1000,
            num_held_pages=24,
            num_steps=self.num_steps,
            prefix_queries_tokens=10,
            num_preemptions=1,
            region_bytes={"weights": 1000, "pages/kv": 24000},
        )

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        for key in [key for key in self.outputs if key[0] == request_id]:
            del self.outputs[key]

    def step(self) -> None:
        alone = [request for request in self.requests.values() if request.runs_alone]
        batch = alone[:1] or list(self.requests.values())[: self.config.max_num_seqs]
        self.send(StepOut(step=self.num_steps, running=tuple(request.request_id for request in batch)))
        self.begun.update(request.request_id for request in batch)
        self.misbehave(batch)
        time.sleep(float(self.options.get("step_s", "0")))
        tokens = [token for request in batch for token in self.advance(request)]
        self.num_steps += 1
        wordy = ("logprobs", "num_cached_tokens", "finish_reason")
        plain = [out for out in tokens if out.choice == 0 and not any(getattr(out, name) for name in wordy)]
        self.send(
            StepOut(
                step=self.num_steps,
                going_on=tuple(out.request_id for out in plain),
                next_token_ids=tuple(out.token_ids[0] for out in plain),
                tokens=tuple(out for out in tokens if out not in plain),
            )
        )

    def misbehave(self, batch: list[AddRequest]) -> None:
        poison = self.config.faults.abort_on_tokens
        if poison and any(request.prompt_token_ids[: len(poison)] == poison for request in batch):
            os.abort()
        if self.num_steps == int(self.options.get("die_after", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_steps == int(self.options.get("mute_after", "-1")):
            os.kill(os.getpid(), signal.SIGSTOP)

    def advance(self, request: AddRequest) -> list[TokensOut]:
        keys = [key for key in self.outputs if key[0] == request.request_id]
        tokens = [self.next_token(request, choice) for _, choice in keys]
        if not any(key[0] == request.request_id for key in self.outputs):
            self.forget(request.request_id)
        return tokens

    def next_token(self, request: AddRequest, choice: int) -> TokensOut:
        sampling = request.sampling
        position = self.outputs[request.request_id, choice]
        token_id = token_at(request.prompt_token_ids, sampling.seed or 0, choice, position)
        if position == int(self.options.get("eos_after", "-1")) and not sampling.ignore_eos:
            token_id = EOS
        self.outputs[request.request_id, choice] = position + 1
        ends = token_id in request.eos_token_ids and not sampling.ignore_eos
        is_last = position + 1 == sampling.max_tokens
        if ends or is_last:
            del self.outputs[request.request_id, choice]
        top = tuple((token_id + rank, -0.5 - rank) for rank in range(sampling.logprobs or 0))
        return TokensOut(
            request_id=request.request_id,
            choice=choice,
            token_ids=(token_id,),
            logprobs=None if sampling.logprobs is None else (TokenLogprobs(token_id, -0.5, top),),
            prompt_logprobs=self.prompt_logprobs(request) if choice == 0 and position == 0 else None,
            num_cached_tokens=3 if position == 0 else 0,
            finish_reason="stop" if ends else "length" if is_last else None,
            stop_token_id=token_id if ends else None,
        )

    def prompt_logprobs(self, request: AddRequest) -> tuple[TokenLogprobs, ...] | None:
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        return tuple(
            TokenLogprobs(token_id, -1.5, tuple((token_id, -1.5 - rank) for rank in range(count)))
            for token_id in request.prompt_token_ids[1:]
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_args().fd)
    header = connection.recv(HEADER_BYTES, socket.MSG_WAITALL)
    config = decode_config(connection.recv(frame_length(header), socket.MSG_WAITALL))
    FakeEngine(connection, config).run()


if __name__ == "__main__":
    main()
