"""How a limit is named, and what happens when it cannot be kept: nothing is given out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.fakes.board import MIB
from tests.cluster.limiter.conftest import StartContainer
from tests.cluster.limiter.container import HERE, OUT_OF_MEMORY, Build, compile_c, make_limiter

OPERATING_SYSTEM = 304


@pytest.mark.parametrize(
    ("text", "limit_bytes"),
    [
        ("1048576", 1 << 20), ("1MiB", 1 << 20), ("1M", 1 << 20), ("1m", 1 << 20), ("1MB", 10**6), ("0.5GiB", 1 << 29),
        ("1.5GiB", 3 << 29), ("1TiB", 1 << 40), ("0", 0), ("1000B", 1000), ("2GB,1GiB", 2 * 10**9),
        ("123456789012345678", 123456789012345678),
    ],
)  # fmt: skip
def test_sizes_are_read_exactly(start: StartContainer, text: str, limit_bytes: int) -> None:
    container = start(text)
    guest = container.opened()
    assert guest.call_for_value("cuDeviceTotalMem_v2", 0) == [0, min(limit_bytes, 80 << 30)]
    assert container.account().devices[0].limit_bytes == limit_bytes


@pytest.mark.parametrize("text", ["8 parsecs", "-1GiB", "0x10", "GiB", "1..5GiB", "1.GiB", ".5GiB", "0=8GiB",
                                  "GPU-12=8GiB", "GPU-zz=1GiB", "1" * 25, "=1GiB"])  # fmt: skip
def test_a_limit_that_cannot_be_read_gives_nothing_out(start: StartContainer, text: str) -> None:
    container = start(text)
    guest = container.guest()
    assert guest.init() == OPERATING_SYSTEM
    assert guest.call_for_value("cuDevicePrimaryCtxRetain", 0)[0] == OPERATING_SYSTEM
    guest.process.kill()
    _, said = guest.process.communicate()
    assert "kvarto limiter: `" in said
    assert "no device memory is given out" in said


def test_a_context_size_that_cannot_be_read_gives_nothing_out(start: StartContainer) -> None:
    assert start().guest(KVARTO_GPU_CONTEXT_SIZE="much").init() == OPERATING_SYSTEM


@pytest.mark.parametrize("kind", ["missing folder", "folder", "another file", "read-only"])
def test_a_ledger_that_cannot_be_kept_gives_nothing_out(start: StartContainer, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "elsewhere"
    if kind == "missing folder":
        path = path / "ledger"
    elif kind == "folder":
        path.mkdir()
    elif kind == "another file":
        path.write_bytes(b"something else".ljust(1 << 20))
    else:
        path = Path("/proc/version")
    guest = start().guest(KVARTO_GPU_MEMORY_LEDGER=str(path))
    assert guest.init() == OPERATING_SYSTEM
    guest.process.kill()
    assert "KVARTO_GPU_MEMORY_LEDGER" in (said := guest.process.communicate()[1]) or str(path) in said


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_a_ledger_without_room_on_its_disk_gives_nothing_out(start: StartContainer, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = f"mount -t tmpfs -o size=64k small {small} && exec \"$@\""
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces are not allowed here")
    guest = start().guest(prefix=prefix, KVARTO_GPU_MEMORY_LEDGER=str(small / "ledger"))
    assert guest.init() == OPERATING_SYSTEM


def test_a_ledger_in_a_sticky_folder_is_for_all_users(built: Build, start: StartContainer) -> None:
    container = start("100MiB")
    first = container.opened()
    assert first.take("cuMemAlloc", 80 * MIB)[0] == 0
    sticky = compile_c(built.folder / "libsticky.so", HERE / "sticky.c", "-shared", "-fPIC")
    second = container.opened(LD_PRELOAD=f"{container.env['LD_PRELOAD']}:{sticky}")
    assert second.take("cuMemAlloc", 80 * MIB)[0] == OUT_OF_MEMORY


def test_a_program_that_lost_its_environment_is_limited_by_the_ledger(start: StartContainer) -> None:
    container = start("100MiB")
    container.opened()
    guest = container.opened(KVARTO_GPU_MEMORY_LIMIT=None)
    assert guest.take("cuMemAlloc", 80 * MIB)[0] == 0
    assert guest.take("cuMemAlloc", 80 * MIB)[0] == OUT_OF_MEMORY


def test_the_smallest_limit_that_anyone_brought_counts(start: StartContainer) -> None:
    container = start("200MiB")
    first = container.opened()
    assert first.take("cuMemAlloc", 150 * MIB)[0] == 0
    second = container.opened(KVARTO_GPU_MEMORY_LIMIT="100MiB")
    assert second.info() == [0, 100 * MIB]  # below what is in use: nothing is free, and nothing wraps
    assert first.take("cuMemAlloc", 1)[0] == OUT_OF_MEMORY
    third = container.opened(KVARTO_GPU_MEMORY_LIMIT="10GiB")
    assert third.info() == [0, 100 * MIB]


def test_the_mounted_file_counts_and_nothing_else(start: StartContainer, tmp_path: Path) -> None:
    mounted, ledger = tmp_path / "mounted", tmp_path / "fixed-ledger"
    container = start("10GiB")
    flags = f"-O0 -DLIMITS_FILE='\"{mounted}\"' -DLEDGER_FILE='\"{ledger}\"'"
    container.env["LD_PRELOAD"] = str(make_limiter(tmp_path / "build", flags))
    container.board.script(context_bytes=40 * MIB)
    mounted.write_text(f"{container.board.uuid()}=640MiB\n")
    for env in ({}, {"KVARTO_GPU_MEMORY_LIMIT": None}, {"KVARTO_GPU_MEMORY_LEDGER": str(tmp_path / "other")}):
        guest = container.opened(**env)
        assert guest.info() == [600 * MIB, 640 * MIB]  # the context was measured, whatever its variable says
        guest.end()
    assert ledger.exists()
    assert not container.ledger.exists()
    mounted.write_text("nonsense")
    assert container.guest().init() == OPERATING_SYSTEM


def test_a_limit_of_nothing_gives_nothing(start: StartContainer) -> None:
    guest = start("0").opened()
    assert guest.info() == [0, 0]
    assert guest.take("cuMemAlloc", 1)[0] == OUT_OF_MEMORY
