"""A real engine in a real process with a tiny random model: loading, answering, dying as it should."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from kvarto.core.errors import BadFile, BudgetTooSmall, UsageError
from kvarto.core.sampling import SamplingParams
from kvarto.engine.assemble import build, plan_engine
from kvarto.engine.channel import EXIT_MALFORMED, EXIT_ORPHANED, LocalChannel
from kvarto.engine.config import EngineConfig, FaultPlan
from kvarto.engine.frames import FrameReader, decode_from_engine, encode_frame
from kvarto.engine.messages import (
    AddRequest,
    FromEngine,
    LoadFailed,
    Phase,
    Ready,
    ResumedChoice,
    Shutdown,
    Stats,
    StatsRequest,
    StepOut,
)
from tests.engine.tiny_model import MAX_POSITIONS, VOCAB_SIZE, write_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return EngineConfig(model=str(model), device_memory=8 << 20, max_num_seqs=8, threads=1, seed=3)


class Child:
    """An engine process and our end of its socket."""

    def __init__(self, config: EngineConfig | None) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "kvarto.engine.process", "--fd", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)
        self.socket.settimeout(120)
        self._reader = FrameReader()
        self._frames: list[FromEngine] = []
        if config is not None:
            self.send(config)

    def send(self, message: msgspec.Struct) -> None:
        self.socket.sendall(encode_frame(message))

    def receive(self) -> FromEngine:
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._frames += map(decode_from_engine, self._reader.feed(data))
        return self._frames.pop(0)

    def receive_until(self, kind: type[FromEngine]) -> list[FromEngine]:
        frames = [self.receive()]
        while not isinstance(frames[-1], kind):
            frames.append(self.receive())
        return frames

    def receive_to_the_end(self) -> list[FromEngine]:
        frames = []
        try:
            while True:
                frames.append(self.receive())
        except EOFError:
            return frames

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[object]:
    children: list[Child] = []

    def start_child(config: EngineConfig | None) -> Child:
        children.append(Child(config))
        return children[-1]

    yield start_child
    for child in children:
        child.close()


def request(request_id: str, num_prompt: int = 20, **fields: object) -> AddRequest:
    prompt = tuple((7 * index + len(request_id)) % VOCAB_SIZE for index in range(num_prompt))
    resumed = fields.pop("resumed", None)
    sampling = SamplingParams(**({"max_tokens": 6, "seed": 11, "logprobs": 2} | fields))  # type: ignore[arg-type]
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, resumed=resumed)  # type: ignore[arg-type]


Answers = dict[tuple[str, int], list[tuple[int, object]]]


def gather(answers: Answers, frame: FromEngine) -> None:
    if isinstance(frame, StepOut):
        for out in frame.outputs():
            rows = zip(out.token_ids, out.logprobs or (None,) * len(out.token_ids), strict=True)
            answers.setdefault((out.request_id, out.choice), []).extend(rows)


def run_here(config: EngineConfig, requests: list[AddRequest]) -> Answers:
    """The answers of an engine in this process, all requests at once."""
    channel = LocalChannel()
    engine = build(config, channel)
    channel.inbox.extend(requests)
    engine.loop.step()
    while engine.loop.has_work:
        engine.loop.step()
    answers: Answers = {}
    for frame in channel.outbox:
        gather(answers, frame)
    assert engine.pool.num_held == engine.pool.num_draining == 0
    engine.ledger.check()
    engine.close()
    return answers


def test_load_answer_resume_and_shut_down(start, config: EngineConfig) -> None:  # type: ignore[no-untyped-def]
    child = start(config)
    *phases, ready = child.receive_until(Ready)
    assert [phase.name for phase in phases if isinstance(phase, Phase)] == [name for name, _ in ready.phases]
    assert (ready.vocab_size, ready.max_model_len, ready.page_size) == (VOCAB_SIZE, MAX_POSITIONS, 16)
    assert "weights" in ready.layout
    requests = [request("a", 50), request("bb", 120, temperature=0.0), request("ccc", 3, n=3)]
    for message in requests:
        child.send(message)
    answers: Answers = {}
    while sum(len(rows) for rows in answers.values()) < 5 * 6:
        gather(answers, child.receive())
    assert answers == run_here(config, requests), "the process and an engine in this process disagree"
    begun = ResumedChoice(0, tuple(token for token, _ in answers["a", 0][:4]))
    again = request("again", 50, resumed=(begun,))
    child.send(msgspec.structs.replace(again, prompt_token_ids=requests[0].prompt_token_ids))
    rest: Answers = {}
    while len(rest.get(("again", 0), ())) < 2:
        gather(rest, child.receive())
    assert rest["again", 0] == answers["a", 0][4:]
    child.send(StatsRequest())
    stats = child.receive_until(Stats)[-1]
    assert isinstance(stats, Stats)
    assert stats.num_held_pages == 0
    assert sum(stats.region_bytes.values()) == plan_engine(config)[1].total_bytes
    child.send(Shutdown())
    assert child.process.wait(60) == 0
    assert child.process.stderr.read() == b""


def test_answers_do_not_depend_on_settings(config: EngineConfig) -> None:
    requests = [request(str(10**index), 10 + 37 * index, n=1 + index % 2) for index in range(6)]
    alone = [run_here(config, [message]) for message in requests]
    expected = {key: rows for answers in alone for key, rows in answers.items()}
    for changes in (
        {},
        {"block_size": 64, "max_num_batched_tokens": 33},
        {"block_size": 8, "enable_prefix_caching": False, "max_num_seqs": 3, "max_num_batched_tokens": 16},
    ):
        assert run_here(msgspec.structs.replace(config, **changes), requests) == expected, changes


def test_an_engine_whose_server_is_gone_ends(start, config: EngineConfig) -> None:  # type: ignore[no-untyped-def]
    child = start(config)
    child.receive_until(Ready)
    child.send(request("a", max_tokens=400))
    child.receive()
    child.socket.close()
    assert child.process.wait(60) == EXIT_ORPHANED


def test_a_first_frame_that_is_no_config(start) -> None:  # type: ignore[no-untyped-def]
    child = start(None)
    child.send(Shutdown())
    assert child.process.wait(60) == EXIT_MALFORMED
    assert b"not an EngineConfig" in child.process.stderr.read()


def test_a_poison_prompt_kills_the_process_and_is_named_before(start, config: EngineConfig) -> None:  # type: ignore[no-untyped-def]
    child = start(msgspec.structs.replace(config, faults=FaultPlan(abort_on_tokens=(96, 95))))
    child.receive_until(Ready)
    child.send(request("good", max_tokens=300))
    child.receive_until(StepOut)
    child.send(AddRequest(request_id="bad", prompt_token_ids=(96, 95, 1), sampling=SamplingParams(max_tokens=2)))
    last = child.receive_to_the_end()[-1]
    assert child.process.wait(60) == -signal.SIGABRT
    assert isinstance(last, StepOut)
    assert last.running is not None
    assert set(last.running) == {"good", "bad"}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "/nowhere"}, BadFile, "does not exist"),
        ({"device_memory": 100_000}, BudgetTooSmall, "--device-memory"),
        ({"max_model_len": 5000}, UsageError, "512 positions"),
        ({"block_size": 12}, UsageError, "8, 16, 32"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, UsageError, "--max-num-batched-tokens"),
        ({"dtype": "int3"}, UsageError, "--dtype int3"),
        ({"kv_cache_dtype": "fp8"}, UsageError, "--kv-cache-dtype fp8"),
        ({"scheduling_policy": "lifo"}, UsageError, "fcfs, priority"),
        ({"threads": 0}, UsageError, "--threads 0"),
        ({"device": "quantum"}, UsageError, "--device quantum"),
        ({"max_model_len": 1}, UsageError, "--max-model-len 1"),
    ],
)
def test_what_cannot_work_is_refused_before_memory_is_reserved(
    config: EngineConfig, changes: dict[str, object], error: type[Exception], words: str
) -> None:
    phases: list[str] = []
    with pytest.raises(error) as caught:
        build(msgspec.structs.replace(config, **changes), LocalChannel(), on_phase=phases.append)
    assert words in str(caught.value)
    assert "reserve memory" not in phases


def test_a_failed_load_is_told_and_ends_the_process(start, config: EngineConfig) -> None:  # type: ignore[no-untyped-def]
    child = start(msgspec.structs.replace(config, model="/nowhere"))
    failed = child.receive_until(LoadFailed)[-1]
    assert isinstance(failed, LoadFailed)
    assert failed.error == "BadFile"
    assert "/nowhere" in failed.message
    assert child.process.wait(60) == 1
    assert child.process.stderr.read() == b""
