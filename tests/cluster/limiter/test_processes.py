"""Processes that fork, exec, are killed, stopped, or close what they did not open; and many that start at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.fakes.board import MIB
from tests.cluster.limiter.conftest import StartContainer
from tests.cluster.limiter.container import HERE, OUT_OF_MEMORY, Build, Container, compile_c

NUM_STARTS = 300


@pytest.fixture
def container(start: StartContainer) -> Container:
    return start("256MiB")


def test_a_killed_process_gives_back_within_100_ms(container: Container) -> None:
    """The least of a few, so that a busy machine proves nothing wrong; the stress measures the most, on a quiet one."""
    guest, reader = container.opened(), container.opened()
    took = []
    for _ in range(5):
        victim = container.opened()
        assert victim.take("cuMemAlloc", 200 * MIB)[0] == 0
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        while reader.info()[0] < 256 * MIB:
            assert time.monotonic() - killed < 5
        took.append(time.monotonic() - killed)
        result, key = guest.take("cuMemAlloc", 200 * MIB)
        assert result == 0
        guest.give(key)
    assert min(took) <= 0.1, took


def test_bytes_of_the_dead_are_there_for_whoever_needs_them(container: Container) -> None:
    guest, victim = container.opened(), container.opened()
    assert victim.take("cuMemAlloc", 200 * MIB)[0] == 0
    victim.end()
    assert guest.take("cuMemAlloc", 200 * MIB)[0] == 0  # the first thing that anyone does


def test_a_stopped_process_keeps_its_bytes_and_holds_nobody_up(container: Container) -> None:
    guest, stopped = container.opened(), container.opened()
    assert stopped.take("cuMemAlloc", 200 * MIB)[0] == 0
    os.kill(stopped.pid, signal.SIGSTOP)
    start = time.monotonic()
    assert guest.take("cuMemAlloc", 100 * MIB)[0] == OUT_OF_MEMORY
    assert guest.take("cuMemAlloc", 50 * MIB)[0] == 0
    assert time.monotonic() - start < 1


def test_a_child_has_an_account_of_its_own(container: Container) -> None:
    guest = container.opened()
    assert guest.take("cuMemAlloc", 50 * MIB)[0] == 0
    child, result = guest.fork(60 * MIB)
    assert result == 0
    holders = {process.pid: sum(process.used_bytes.values()) for process in container.account().processes}
    assert holders == {guest.pid: 50 * MIB, child: 60 * MIB}
    guest.end_child(child)
    assert guest.take("cuMemAlloc", 200 * MIB)[0] == 0


def test_a_child_does_not_keep_its_parent_alive(container: Container) -> None:
    guest, other = container.opened(), container.opened()
    assert guest.take("cuMemAlloc", 150 * MIB)[0] == 0
    child, result = guest.fork(10 * MIB)
    assert result == 0
    guest.process.kill()
    guest.process.wait()
    try:
        assert other.take("cuMemAlloc", 200 * MIB)[0] == 0
    finally:
        os.kill(child, signal.SIGKILL)


def test_another_program_in_the_same_process_holds_nothing(container: Container) -> None:
    guest, other = container.opened(), container.opened()
    assert guest.take("cuMemAlloc", 150 * MIB)[0] == 0
    guest.replace()
    deadline = time.monotonic() + 2
    while other.info()[0] < 256 * MIB:
        assert time.monotonic() < deadline
    assert guest.process.poll() is None


def test_closing_every_descriptor_loses_nothing(container: Container) -> None:
    guest, other = container.opened(), container.opened()
    assert guest.take("cuMemAlloc", 150 * MIB)[0] == 0
    guest.close_descriptors()
    assert other.take("cuMemAlloc", 150 * MIB)[0] == OUT_OF_MEMORY
    assert guest.take("cuMemAlloc", 100 * MIB)[0] == 0


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_containers_with_pid_namespaces_of_their_own_share_one_limit(container: Container) -> None:
    prefix = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces are not allowed here")
    first, second = container.guest(prefix=prefix), container.guest(prefix=prefix)
    assert first.open() == second.open() == 0
    assert first.take("cuMemAlloc", 150 * MIB)[0] == 0
    assert second.take("cuMemAlloc", 150 * MIB)[0] == OUT_OF_MEMORY
    first.end()
    deadline = time.monotonic() + 2
    while second.take("cuMemAlloc", 150 * MIB)[0] != 0:
        assert time.monotonic() < deadline


@pytest.fixture
def starter(built: Build) -> Path:
    return compile_c(built.folder / "starter", HERE / "starter.c", f"-L{built.folder}", "-lcuda")


def test_300_processes_start_within_a_second(container: Container, starter: Path) -> None:
    """What the limiter adds to as many starts; the processes themselves are the machine's."""
    container.board.script(context_bytes=0)
    took = {}
    for preload in (None, container.env["LD_PRELOAD"]):
        env = {name: value for name, value in {**container.env, "LD_PRELOAD": preload}.items() if value}
        done = subprocess.run([starter, str(NUM_STARTS)], env=env, capture_output=True, text=True, check=True)
        took[preload] = float(done.stdout)
    living = [process for process in container.account().processes if process.is_alive]
    assert living == []
    assert took[container.env["LD_PRELOAD"]] - took[None] <= 1.0, took
