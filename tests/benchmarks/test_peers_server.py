from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from benchmarks.peers.client import send_all
from benchmarks.peers.folders import CHECKOUT
from benchmarks.peers.launch import Launch, free_port
from benchmarks.peers.process_tree import CoreUse, cpu_s, peak_rss_bytes, tree
from benchmarks.peers.prompts import Prompt
from benchmarks.peers.server_process import running
from kvarto.core.errors import EngineError

ENGINE = """
import sys
from benchmarks.peers.shim.lines import Answer, Lines

lines, extra = Lines(), int(sys.argv[1])
print("what a library prints must not reach the pipe")
while True:
    for request in lines.take(is_blocking=True):
        num_tokens = request.max_tokens + extra + (request.adapter == "odd")
        for index in range(num_tokens):
            lines.give([Answer(request.id, [index % 4], index + 1 == num_tokens)])
"""
PROMPTS = [Prompt((1, 2, 3), 1 + index % 5) for index in range(16)]


def launch(folder: Path, extra: int = 0) -> Launch:
    """The shim over an engine that answers at once, with `extra` tokens more than asked for; adapter `odd` adds one."""
    vocabulary = {word: index for index, word in enumerate("abcd")}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a")).save(str(folder / "tokenizer.json"))
    (folder / "engine.py").write_text(ENGINE)
    port = free_port()
    front = (sys.executable, "-m", "benchmarks.peers.shim", str(port), str(folder))
    command = (*front, sys.executable, str(folder / "engine.py"), str(extra))
    adapters = {name: {"adapter": name} for name in ("even", "odd")}
    return Launch("fake", command, {"PYTHONPATH": str(CHECKOUT)}, "demo", port, "1", adapters)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


def state(pid: int) -> str:
    """One letter of the kernel's: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_end(pids: list[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_server_answers_every_token_and_ends_with_its_children(tmp_path: Path) -> None:
    with running(launch(tmp_path), tmp_path / "log") as server:
        pids = tree(server.process.pid)
        answers = asyncio.run(send_all(server.launch, PROMPTS, concurrency=4))
        assert server.peak_rss_bytes > 10 << 20
        with server.paused():
            wait_until(lambda: {state(pid) for pid in pids} == {"T"})
        assert asyncio.run(send_all(server.launch, [Prompt((1,), 2, "even")], concurrency=1))
        with pytest.raises(EngineError, match="asked for"):
            asyncio.run(send_all(server.launch, [Prompt((1,), 2, "odd")], concurrency=1))
    assert len(pids) == 2
    assert [answer.num_output_tokens for answer in answers] == [prompt.num_output_tokens for prompt in PROMPTS]
    assert all(answer.sent_s < answer.first_s <= answer.last_s for answer in answers)
    wait_for_end(pids)


def test_an_engine_that_computes_other_work_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="asked for"), running(launch(tmp_path, extra=1), tmp_path / "log"):
        pass


def test_a_server_that_ends_while_it_starts_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    words = Launch("broken", (sys.executable, "-c", "raise SystemExit('no such model')"), {}, "demo", free_port(), "1")
    with pytest.raises(EngineError, match="no such model"), running(words, tmp_path / "log"):
        pass


BURN = "import time\nx = b'x' * (64 << 20)\nwhile time.process_time() < 0.6: pass\ninput()"
BURNT_S = 0.5
"""Less than that: `/proc` counts in ticks."""


def test_what_a_child_uses_is_ours_while_it_lives_and_afterwards() -> None:
    before_s = cpu_s(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE)
    wait_until(lambda: cpu_s(child.pid) >= BURNT_S)
    assert child.pid in tree(os.getpid())
    assert peak_rss_bytes(child.pid) > 64 << 20
    assert cpu_s(os.getpid()) - before_s >= BURNT_S
    child.communicate(b"\n")
    assert cpu_s(os.getpid()) - before_s >= BURNT_S
    assert child.pid not in tree(os.getpid())


def test_what_a_stranger_uses_is_foreign() -> None:
    orphan = [sys.executable, "-c", BURN]
    adopted = f"import subprocess; print(subprocess.Popen({orphan!r}).pid)"  # its parent ends at once
    use, start_s = CoreUse.start(), time.monotonic()
    parent = subprocess.Popen([sys.executable, "-c", adopted], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: cpu_s(pid) >= BURNT_S)
    assert use.foreign_cores() * (time.monotonic() - start_s) > 0.4
    parent.communicate(b"\n")
    wait_for_end([pid])
