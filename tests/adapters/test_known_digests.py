"""What was read is hashed once, and what is remembered never outlives a change of the files."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from kvarto.adapters.digest import Digests
from kvarto.adapters.known_digests import SETTLED_NS, KnownDigests
from kvarto.adapters.packer import Packer
from kvarto.adapters.source import AdapterFiles
from kvarto.adapters.targets import targets_of
from kvarto.core.errors import BadAdapter
from kvarto.models.raw_file import FileIdentity
from tests.adapters.bases import program_of
from tests.adapters.held import HASHER
from tests.adapters.pages import Bytes, Int32, in_order
from tests.adapters.writer import ALL_LINEAR, Options, Written, write_adapter

BASE = targets_of(program_of())
TENSORS = "adapter_model.safetensors"
PAGE_BYTES = 4096


class Hashes:
    """Counts the calls that hash an adapter's pages."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        digests = Packer.digests

        def counted(packer: Packer, images: Bytes, which: Int32) -> Digests:
            self.count += 1
            return digests(packer, images, which)

        patch.setattr(Packer, "digests", counted)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    return Hashes(monkeypatch)


def later() -> int:
    """As if the files had been left alone for long."""
    return time.time_ns() + 2 * SETTLED_NS


def files_of(folder: Path, now_ns: object = later) -> AdapterFiles:
    return AdapterFiles(BASE, [folder], PAGE_BYTES, now_ns=now_ns, hasher=HASHER)  # type: ignore[arg-type]


def read(files: AdapterFiles, written: Written) -> tuple[Digests, bytes]:
    found = files.find(written.folder)
    images = np.full((found.num_pages, PAGE_BYTES), 7, np.uint8)
    return files.read(found, images, in_order(found)), images.tobytes()


def rewrite(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte]))


def test_files_that_were_read_are_not_hashed_again(hashes: Hashes, tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(ALL_LINEAR))
    files = files_of(tmp_path)
    first = read(files, written)
    assert [read(files, written) for _ in range(3)] == [first] * 3, "another read gives other bytes or digests"
    assert hashes.count == 1
    assert read(files_of(tmp_path), written) == first
    assert hashes.count == 2


def test_a_change_of_any_file_is_hashed(hashes: Hashes, tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE)
    files, rng = files_of(tmp_path), random.Random(1)
    tensors = written.folder / TENSORS
    for count in range(1, 12):
        digests, _ = read(files, written)
        assert hashes.count == count
        assert digests == read(files_of(tmp_path), written)[0], "what is remembered is not what is there"
        hashes.count -= 1
        match rng.randrange(4):
            case 0:
                rewrite(tensors, rng.randrange(60))
            case 1:
                os.utime(tensors, ns=(5, 5))
            case 2:
                (tmp_path / "new").write_bytes(tensors.read_bytes())
                os.replace(tmp_path / "new", tensors)
            case 3:
                config = written.folder / "adapter_config.json"
                config.write_text(config.read_text().replace("{", "{ ", 1))


def test_files_that_were_just_written_are_hashed_each_time(hashes: Hashes, tmp_path: Path) -> None:
    """Another write within one tick of the file system's clock would not show."""
    written = write_adapter(tmp_path / "a", BASE)
    files = files_of(tmp_path, time.time_ns)
    first, _ = read(files, written)
    assert files.find(written.folder).digest == first.content
    assert read(files, written)[0] == first
    assert hashes.count == 2


def test_known_files_are_looked_at_for_changes_all_the_same(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE)
    files = files_of(tmp_path)
    read(files, written)
    found = files.find(written.folder)
    images = np.empty((found.num_pages, PAGE_BYTES), np.uint8)
    os.truncate(written.folder / TENSORS, 900)
    with pytest.raises(BadAdapter, match="changed"):
        files.read(found, images, in_order(found))


def identity(inode: int, ctime_ns: int = 0, mtime_ns: int = 0) -> tuple[FileIdentity, ...]:
    return (FileIdentity(1, inode, 0, mtime_ns, ctime_ns),)


def test_memory_is_bounded_and_what_was_used_least_recently_leaves() -> None:
    one = Digests(bytes(32), tuple(bytes([i]) * 32 for i in range(10)))
    known = KnownDigests(max_bytes=2 * (10 * 32 + 512))
    for inode in (0, 1):
        known.put(identity(inode), one, SETTLED_NS)
    assert known.digests(identity(0)) == one
    known.put(identity(2), one, SETTLED_NS)
    assert [known.digests(identity(inode)) for inode in range(3)] == [one, None, one]
    known.put(identity(3), Digests(bytes(32), (bytes(32),) * 1000), SETTLED_NS)
    assert known.content(identity(3)) is None, "an entry is kept that is larger than all may be"
    known.put(identity(4), one, SETTLED_NS)
    known.put(identity(4), one, SETTLED_NS)
    known.put(identity(5), one, SETTLED_NS)
    assert known.digests(identity(4)) == known.digests(identity(5)) == one


@pytest.mark.parametrize(("ctime_ns", "mtime_ns"), [(1, 0), (0, 1), (1 << 62, 0)])
def test_only_times_that_lie_behind_are_trusted(ctime_ns: int, mtime_ns: int) -> None:
    known, digests = KnownDigests(), Digests(bytes(32), (bytes(32),))
    known.put(identity(1, ctime_ns, mtime_ns), digests, SETTLED_NS)
    assert known.content(identity(1, ctime_ns, mtime_ns)) == bytes(32)
    assert known.digests(identity(1, ctime_ns, mtime_ns)) is None
