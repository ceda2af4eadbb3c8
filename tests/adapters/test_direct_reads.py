"""Read past the page cache or through it, a file gives the same bytes, and the same refusals."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvarto.adapters import source
from kvarto.adapters.source import AdapterFiles
from kvarto.adapters.targets import targets_of
from kvarto.core import _native
from kvarto.core.errors import BadAdapter
from tests.adapters.bases import program_of
from tests.adapters.pages import in_order, pack_whole
from tests.adapters.writer import ALL_LINEAR, Options, write_adapter

BASE = targets_of(program_of())
SIZES = (1, 2, 511, 512, 513, 4095, 4096, 4097, 65_537, (4 << 20) - 1, (4 << 20) + 4098, (9 << 20) + 3)
NOTHING = np.empty(0, np.uint8)
ISA = _native.ops.isas()[-1]
WAITS_S = (0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Before tries of which one must find the file out of the page cache: the kernel keeps what another holds just then."""


def put_on_disk(path: Path) -> None:
    """Out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """On file systems that do it differently."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no file system in memory")
    path = Path("/dev/shm") / f"kvarto-test-{os.getpid()}"
    path.mkdir()
    yield path
    for each in path.iterdir():
        each.unlink()
    path.rmdir()


def can_be_direct(path: Path) -> bool:
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def tensor(offset: int, num_rows: int, num_columns: int, start: int, *, is_transposed: bool) -> object:
    return _native.adapters.FileTensor(
        offset=offset, num_rows=num_rows, num_columns=num_columns, start=start, type=1, strips=1,
        is_transposed=is_transposed, is_beside=False, num_heads=0,
    )  # fmt: skip


def packed(path: Path, tensors: list[object], size: int, *, may_be_direct: bool) -> tuple[bytes, int]:
    put_on_disk(path)
    plan = _native.adapters.PackPlan(tensors, path.stat().st_size, size, 0)  # type: ignore[arg-type]
    stream = np.full(size, 7, np.uint8)
    with path.open("rb") as file:
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        bad, num_direct_bytes = pack_whole(plan, ISA, file.fileno(), stream, NOTHING, may_be_direct)
        assert bad is None
        assert file.tell() == 0
        assert fcntl.fcntl(file.fileno(), fcntl.F_GETFL) == flags, "the descriptor is left as it was not"
    return stream.tobytes(), num_direct_bytes


@pytest.mark.parametrize("size", SIZES)
def test_wherever_a_tensor_begins_and_the_file_ends(size: int, folder: Path) -> None:
    rng, path = random.Random(size), folder / "file"
    for start in (0, 1, 511, 4095, rng.randrange(5000)):
        data = bytearray(rng.randbytes(start + size + rng.choice((0, 1, 511, 4096))))
        data[start + 1 : start + size : 2] = bytes(len(range(start + 1, start + size, 2)))  # finite, whatever else
        path.write_bytes(data)
        count = size // 2
        tensors = [tensor(start, 1, count, 0, is_transposed=False)] if count else []
        expected = bytes(data[start : start + 2 * count])
        assert packed(path, tensors, 2 * count, may_be_direct=False) == (expected, 0)
        most = 0
        for wait_s in WAITS_S:
            time.sleep(wait_s)
            found, num_direct_bytes = packed(path, tensors, 2 * count, may_be_direct=True)
            assert found == expected
            most = max(most, num_direct_bytes)
            if folder.parts[1] == "dev" or not can_be_direct(path) or most >= 2 * count:
                break
        else:
            pytest.fail("it was read through the page cache")


@pytest.mark.parametrize("seed", range(6))
def test_many_tensors_in_any_order_with_anything_between(seed: int, folder: Path) -> None:
    rng, path = random.Random(seed), folder / "file"
    data, tensors, want = bytearray(), [], bytearray()
    for _ in range(rng.randint(1, 12)):
        data += rng.randbytes(rng.choice((0, 1, 3, 64, 5000, 700_000)))
        rows, columns = rng.choice((1, 7, 64, 900)), rng.choice((1, 8, 33, 1000))
        raw = np.frombuffer(rng.randbytes(2 * rows * columns), np.uint16).reshape(rows, columns) & 0xBBFF
        is_transposed = rng.random() < 0.5
        want += bytes(-len(want) % 4)
        tensors.append(tensor(len(data), rows, columns, len(want), is_transposed=is_transposed))
        data += raw.tobytes()
        want += (raw.T if is_transposed else raw).tobytes()
    path.write_bytes(data + rng.randbytes(rng.choice((0, 1, 9000))))
    rng.shuffle(tensors)
    assert packed(path, tensors, len(want), may_be_direct=True)[0] == want
    assert packed(path, tensors, len(want), may_be_direct=False)[0] == want


def test_what_is_in_memory_is_copied_from_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert len(path.read_bytes()) == 1 << 20
    plan = _native.adapters.PackPlan([tensor(0, 1, 1 << 19, 0, is_transposed=False)], 1 << 20, 1 << 20, 0)  # type: ignore[list-item]
    with path.open("rb") as file:
        assert pack_whole(plan, ISA, file.fileno(), np.empty(1 << 20, np.uint8), NOTHING, True) == (None, 0)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 4096, (4 << 20) + 1, (5 << 20) - 2])
def test_a_file_that_became_shorter_is_refused_either_way(size: int, folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(size))
    put_on_disk(path)
    plan = _native.adapters.PackPlan([tensor(0, 5, 1 << 19, 0, is_transposed=False)], 5 << 20, 5 << 20, 0)  # type: ignore[list-item]
    for may_be_direct in (True, False):
        with path.open("rb") as file, pytest.raises(EOFError):
            pack_whole(plan, ISA, file.fileno(), np.empty(5 << 20, np.uint8), NOTHING, may_be_direct)


def test_first_reads_go_past_the_page_cache_and_later_ones_leave_the_file_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LEAST_DIRECT_BYTES", 0)
    written = write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR))
    path = written.folder / "adapter_model.safetensors"
    if not can_be_direct(path):
        pytest.skip("this file system reads through the page cache only")
    files = AdapterFiles(BASE, [tmp_path], 4096)
    found = files.find(written.folder)
    images = [np.empty((found.num_pages, 4096), np.uint8) for _ in range(2)]
    put_on_disk(path)
    first = files.read(found, images[0], in_order(found))
    put_on_disk(path)
    assert files.read(found, images[1], in_order(found)) == first
    assert images[0].tobytes() == images[1].tobytes()
    with path.open("rb") as file:
        assert os.preadv(file.fileno(), [bytearray(64)], path.stat().st_size - 64, os.RWF_NOWAIT) == 64


def test_a_file_that_was_replaced_or_cut_since_it_was_found_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LEAST_DIRECT_BYTES", 0)
    written = write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR))
    path = written.folder / "adapter_model.safetensors"
    data, files = path.read_bytes(), AdapterFiles(BASE, [tmp_path], 4096)
    found = files.find(written.folder)
    (tmp_path / "new").write_bytes(data)
    os.replace(tmp_path / "new", path)
    put_on_disk(path)
    with pytest.raises(BadAdapter, match="changed"):
        files.read(found, np.empty((found.num_pages, 4096), np.uint8), in_order(found))
    found = files.find(written.folder)
    os.truncate(path, len(data) - 2)
    put_on_disk(path)
    with pytest.raises(BadAdapter, match="changed"):
        files.read(found, np.empty((found.num_pages, 4096), np.uint8), in_order(found))
