"""Frames: whatever is sent arrives whole, and nothing else is believed."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.core.errors import EngineError
from kvarto.core.sampling import SamplingParams
from kvarto.engine.channel import EXIT_MALFORMED, EXIT_ORPHANED
from kvarto.engine.config import EngineConfig
from kvarto.engine.frames import (
    FrameReader,
    decode_config,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from kvarto.engine.messages import (
    MAX_FRAME_BYTES,
    AdapterAnswer,
    AdapterInfo,
    AdapterNames,
    AddRequest,
    Cancel,
    FromEngine,
    ListAdapters,
    LoadAdapter,
    LoadFailed,
    Phase,
    Progress,
    Ready,
    ResumedChoice,
    Shutdown,
    Stats,
    StatsRequest,
    StepOut,
    ToEngine,
    TokenLogprobs,
    TokensOut,
    UnloadAdapter,
)

TO_ENGINE: list[ToEngine] = [
    AddRequest(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(logit_bias={3: -1.0})),
    AddRequest(
        request_id="b",
        prompt_token_ids=(5,),
        sampling=SamplingParams(n=2, stop=("é", "\n"), seed=2**63 - 1),
        resumed=(ResumedChoice(1, (4, 5)),),
        deadline_s=1.5,
        cache_salt="s",
    ),
    Cancel("a"),
    LoadAdapter(request_id="c", name="a", path="/adapters/a", is_known=True),
    UnloadAdapter(request_id="d", name="a"),
    ListAdapters(request_id="e"),
    StatsRequest(),
    Shutdown(),
]
INFO = AdapterInfo(
    name="a", path="/adapters/a", parent="base", rank=8, size_bytes=1 << 40, num_pages=3, tier="disk", digest=None,
    num_requests=0, warnings=("w",),
)  # fmt: skip
FROM_ENGINE: list[FromEngine] = [
    AdapterAnswer(request_id="c", adapters=(INFO,)),
    AdapterAnswer(request_id="d", error="UnknownAdapter", message="no"),
    AdapterNames(("a", "b")),
    Ready(
        model_name="m", fingerprint="f", vocab_size=9, max_model_len=8, page_size=16, num_pages=3,
        max_concurrency=6.0, layout="",
        phases=(("load", 0.5),),
    ),
    LoadFailed(error="BadFile", message="x"),
    Phase("load"),
    Progress(0.5),
    StepOut(
        step=3,
        tokens=(TokensOut(request_id="a", choice=0, token_ids=(7,), logprobs=(TokenLogprobs(7, -0.5, ((7, -0.5),)),)),),
        running=("a",),
        going_on=("b", "a"),
        next_token_ids=(8, 2**31 - 1),
    ),
    Stats(num_running=1, region_bytes={"weights": 5}),
]  # fmt: skip


def test_every_message_is_here() -> None:
    assert {type(message) for message in TO_ENGINE} == set(get_args(ToEngine))
    assert {type(message) for message in FROM_ENGINE} == set(get_args(FromEngine))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1))
def test_messages_survive_any_cut(sizes: list[int]) -> None:
    stream = b"".join(map(encode_frame, TO_ENGINE))
    reader, found, start = FrameReader(), [], 0
    while start < len(stream):
        size = sizes[start % len(sizes)]
        found += [decode_to_engine(body) for body in reader.feed(stream[start : start + size])]
        start += size
    assert found == TO_ENGINE


def test_from_engine_round_trip() -> None:
    assert [decode_from_engine(encode_frame(message)[4:]) for message in FROM_ENGINE] == FROM_ENGINE
    config = EngineConfig(model="m", device_memory=5)
    assert decode_config(encode_frame(config)[4:]) == config


def test_a_step_says_its_outputs_in_order() -> None:
    end = TokensOut(request_id="b", choice=0, token_ids=(), finish_reason="deadline")
    step = StepOut(step=3, going_on=("b", "a"), next_token_ids=(8, 9), tokens=(end,))
    assert list(step.outputs()) == [
        TokensOut(request_id="b", choice=0, token_ids=(8,)),
        TokensOut(request_id="a", choice=0, token_ids=(9,)),
        end,
    ]


def test_lengths_beyond_the_limit_are_refused_before_reading() -> None:
    assert frame_length(MAX_FRAME_BYTES.to_bytes(4, "little")) == MAX_FRAME_BYTES
    with pytest.raises(EngineError, match="exceeds the limit"):
        frame_length((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_raise_nothing_else(body: bytes) -> None:
    for decode in (decode_to_engine, decode_from_engine, decode_config):
        try:
            message = decode(body)
        except EngineError:
            continue
        assert isinstance(message, msgspec.Struct)


def test_a_message_of_the_wrong_type_is_refused() -> None:
    body = msgspec.msgpack.encode({"type": "add", "request_id": 5})
    with pytest.raises(EngineError, match="not a message"):
        decode_to_engine(body)


_ECHO = """
import socket, sys
from kvarto.engine.channel import SocketChannel
from kvarto.engine.messages import Phase
channel = SocketChannel(socket.socket(fileno=int(sys.argv[1])))
channel.send(Phase(channel.read_config().model))
channel.start()
heard = 0
while heard < int(sys.argv[2]):
    for message in channel.receive(5.0):
        channel.send(Phase(type(message).__name__))
        heard += 1
assert channel.receive(0.0) == []
"""


def start(program: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, str(theirs.fileno()), str(len(TO_ENGINE))]
    child = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL)
    theirs.close()
    return child


def test_the_channel_hears_in_order_and_answers() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        child = start(_ECHO, theirs)
        ours.sendall(encode_frame(EngineConfig(model="m")) + b"".join(map(encode_frame, TO_ENGINE)))
        reader, names = FrameReader(), []
        while len(names) < 1 + len(TO_ENGINE):
            data = ours.recv(4096)
            assert data, f"the engine ended after {names}"
            names += [decode_from_engine(body).name for body in reader.feed(data)]
        assert names == ["m", *(type(message).__name__ for message in TO_ENGINE)]
        assert child.wait(30) == 0


_CHILD = """
import socket, sys, time
from kvarto.engine.channel import SocketChannel
channel = SocketChannel(socket.socket(fileno=int(sys.argv[1])))
channel.start()
while True:  # only the reading thread can end this
    pass
"""


@pytest.mark.parametrize(
    ("frame", "code"),
    [(b"", EXIT_ORPHANED), (b"\x05\0\0\0junk!", EXIT_MALFORMED), (b"\xff\xff\xff\xff", EXIT_MALFORMED)],
)
def test_a_busy_engine_ends_when_its_server_is_gone_or_talks_nonsense(frame: bytes, code: int) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        child = start(_CHILD, theirs)
        ours.sendall(frame)
        if not frame:
            ours.close()
        try:
            assert child.wait(30) == code
        finally:
            child.kill()
            child.wait()
