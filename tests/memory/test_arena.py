"""The arena: alignment, bytes that stay, granules that come and go, views that outlive it, machines that refuse."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvarto.core.errors import MemoryLimitError
from kvarto.core.units import MIB
from kvarto.memory import prefault, system_memory
from kvarto.memory.arena import GRANULE_BYTES, Arena


@pytest.fixture
def arena() -> Arena:
    return Arena(9 * MIB + 100)


def test_starts_on_a_granule_and_holds_zeros(arena: Arena) -> None:
    assert arena.array.ctypes.data == arena.address
    assert arena.address % GRANULE_BYTES == 0
    assert arena.array.shape == (9 * MIB + 100,)
    assert not arena.array.any()


def test_nothing_is_backed_before_it_is_touched(arena: Arena) -> None:
    assert arena.resident_bytes == 0
    assert arena.array.sum(dtype=np.int64) == 0
    assert arena.resident_bytes == 0, "reading shows zeros and takes no memory"
    arena.array[0] = 1
    assert 0 < arena.resident_bytes <= GRANULE_BYTES


def test_views_share_bytes(arena: Arena) -> None:
    arena.view(4096, 16)[:] = 7
    assert arena.array[4096:4112].tolist() == [7] * 16
    assert arena.view(9 * MIB + 100, 0).size == 0


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 2), (0, 9 * MIB + 101), (9 * MIB + 100, 1), (5, -1)])
def test_ranges_outside_are_refused(arena: Arena, offset: int, size_bytes: int) -> None:
    for call in (arena.view, arena.prefault, arena.release):
        with pytest.raises(AssertionError, match="is not inside"):
            call(offset, size_bytes)


def test_prefault_backs_the_range_and_changes_no_byte(arena: Arena) -> None:
    arena.array[3 * MIB] = 9
    arena.prefault(0, 4 * MIB).wait()
    assert arena.resident_bytes == 4 * MIB
    arena.prefault(4 * MIB, arena.size_bytes - 4 * MIB).wait()
    assert arena.resident_bytes >= arena.size_bytes
    assert arena.array[3 * MIB] == 9
    assert np.count_nonzero(arena.array) == 1


def test_prefault_races_with_a_writer_and_loses_no_byte() -> None:
    arena = Arena(64 * MIB)
    pages = arena.array.view(np.uint64).reshape(-1, 512)
    backing = arena.prefault(0, arena.size_bytes)
    for index in np.random.default_rng(0).permutation(len(pages)):  # ahead of the thread and behind it
        pages[index, 0] = index + 1
    backing.wait()
    assert pages[:, 0].tolist() == list(range(1, len(pages) + 1))
    assert not pages[:, 1:].any()
    arena.close()


def _no_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 5.14."""
    real = system_memory.advise

    def advise(address: int, size_bytes: int, advice: int) -> None:
        if advice == system_memory.MADV_POPULATE_WRITE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(address, size_bytes, advice)

    monkeypatch.setattr(system_memory, "advise", advise)


def test_prefault_without_populate(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_populate(monkeypatch)
    arena.array[:100] = 5
    arena.prefault(0, 4 * MIB).wait()
    assert arena.resident_bytes == 4 * MIB
    assert (arena.array[:100] == 5).all()
    assert not arena.array[100 : 4 * MIB].any()


def test_prefault_says_when_the_system_refuses(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size_bytes: int) -> None:
        raise system_memory._refused(size_bytes, OSError(errno.ENOMEM, "Cannot allocate memory"))

    monkeypatch.setattr(prefault, "populate", refuse)
    backing = arena.prefault(0, 4 * MIB)
    with pytest.raises(MemoryLimitError, match=r"did not back 4.00 MiB .* lower `--device-memory`"):
        backing.wait()
    assert backing.done_bytes == 0


def test_prefault_stops_after_the_chunk_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def populate(address: int, size_bytes: int) -> None:
        started.set()
        go_on.wait(10)

    monkeypatch.setattr(prefault, "populate", populate)
    arena = Arena(1024 * MIB)
    backing = arena.prefault(0, arena.size_bytes)
    assert started.wait(10)
    threading.Timer(0.05, go_on.set).start()
    arena.close()
    assert backing.is_done
    assert backing.done_bytes < 1024 * MIB


def test_release_gives_back_whole_granules_only(arena: Arena) -> None:
    arena.array[:] = 1
    before = arena.resident_bytes
    assert arena.release(1, 2 * GRANULE_BYTES) == GRANULE_BYTES
    assert before - arena.resident_bytes == GRANULE_BYTES
    assert (arena.array[:GRANULE_BYTES] == 1).all()
    assert not arena.array[GRANULE_BYTES : 2 * GRANULE_BYTES].any()
    assert (arena.array[2 * GRANULE_BYTES :] == 1).all()


def test_release_of_less_than_a_granule_does_nothing(arena: Arena) -> None:
    arena.array[:] = 1
    assert arena.release(1, GRANULE_BYTES) == 0
    assert arena.release(0, 0) == 0
    assert (arena.array == 1).all()


def test_the_last_granule_goes_with_the_last_byte(arena: Arena) -> None:
    arena.array[:] = 1
    arena.release(0, arena.size_bytes)
    assert arena.resident_bytes == 0


def test_a_released_granule_comes_back_at_its_address(arena: Arena) -> None:
    address = arena.address
    arena.array[:] = 1
    arena.release(0, arena.size_bytes)
    arena.array[:] = 2
    assert arena.array.ctypes.data == address
    assert (arena.array == 2).all()


def test_close_tolerates_views_and_a_second_close(arena: Arena) -> None:
    view = arena.view(0, 100)
    view[:] = 3
    arena.close()
    arena.close()
    assert not view.any(), "memory was not given back"
    with pytest.raises(AssertionError, match="closed"):
        arena.view(0, 1)
    with pytest.raises(AssertionError, match="closed"):
        _ = arena.array


def test_close_unmaps() -> None:
    """Address space, which the system counts at once, is as large after a hundred arenas as before."""

    def mapped_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()

    Arena(64 * MIB).close()
    before = mapped_bytes()
    for _ in range(100):
        Arena(64 * MIB).close()
    assert mapped_bytes() - before < 64 * MIB


def test_a_machine_that_refuses_is_an_error_that_names_the_knob() -> None:
    code = (
        "import resource\n"
        "from kvarto.core.errors import MemoryLimitError\n"
        "from kvarto.memory.arena import Arena\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try: Arena(8 << 30)\n"
        "except MemoryLimitError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "refused to reserve an arena of 8.00 GiB" in done.stdout
    assert "`--device-memory`" in done.stdout


def test_absurd_sizes_are_refused_here_too() -> None:
    with pytest.raises(MemoryLimitError, match="refused to reserve"):
        Arena(1 << 62)


def test_a_fork_does_not_inherit_the_arena(arena: Arena) -> None:
    """A child that touches it is killed (SIGSEGV) rather than doubling memory in silence."""
    code = (
        "import os\n"
        "from kvarto.memory.arena import Arena\n"
        "arena = Arena(4 << 20)\n"
        "arena.array[0] = 1\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    arena.array[0]\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "-11"
