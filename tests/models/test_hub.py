"""Hub ids against a small local hub: what is fetched, resumed, refused, and how it is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarto.core.errors import UsageError
from kvarto.models.hub import choose_gguf, resolve
from tests.models.fake_hub import FakeHub, serving

FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b'{"x": 1}',
    "generation_config.json": b'{"y": 2}',
    "model-00001-of-00002.safetensors": b"a" * 3000,
    "model-00002-of-00002.safetensors": b"b" * 2000,
    "model.safetensors.index.json": b'{"z": 3}',
    "consolidated.safetensors": b"c" * 5000,
    "pytorch_model.bin": b"d" * 5000,
    "onnx/model.onnx": b"e" * 5000,
    "README.md": b"f",
}
QUANTS = {
    "m-Q4_K_M.gguf": bytes(range(256)) * 50_000,
    "m-Q8_0.gguf": b"r" * 900,
    "m.IQ4_XS.gguf": b"s" * 900,
    "mmproj-m-Q8_0.gguf": b"t",
    "big-Q5_K_M-00001-of-00002.gguf": b"u",
    "README.md": b"v",
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    repos = {
        "org/folder": FOLDER,
        "org/quants": QUANTS,
        "private/one": {"a-Q8_0.gguf": b"x"},
        "org/none": {"x.bin": b""},
    }
    with serving(FakeHub(repos, gated=frozenset({"org/gated"}), token="hf_secret")) as hub:
        yield hub


def run_all(hub: FakeHub, models: list[str], home: Path, **environment: str) -> list[tuple[str | None, str]]:
    """Resolve in a process of its own, as the package reads its environment at import: path or error's text of each."""
    code = (
        "import json, sys\n"
        "from kvarto.core.errors import UsageError\n"
        "from kvarto.models.hub import resolve\n"
        "def one(model):\n"
        "    try: return str(resolve(model, say=lambda line: print(line, file=sys.stderr))), ''\n"
        "    except UsageError as error: return None, str(error)\n"
        "print(json.dumps([one(model) for model in sys.argv[1:]]))\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code, *models]
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=60, check=True)
    return [(path, error) for path, error in json.loads(done.stdout.splitlines()[-1])]


def run(hub: FakeHub, model: str, home: Path, **environment: str) -> tuple[str | None, str]:
    return run_all(hub, [model], home, **environment)[0]


def test_a_folder_without_what_is_not_read(hub: FakeHub, tmp_path: Path) -> None:
    path, error = run(hub, "org/folder", tmp_path)
    assert path is not None, error
    found = {p.relative_to(path).as_posix(): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}
    assert found == {
        name: data for name, data in FOLDER.items()
        if name not in ("consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "README.md")
    }  # fmt: skip
    fetched = [p for method, p, _ in hub.requests if method == "GET" and "/resolve/" in p]
    assert len(fetched) == len(found)
    # Again: nothing is fetched twice; offline: nothing is asked.
    hub.requests.clear()
    assert run(hub, "org/folder", tmp_path) == (path, "")
    assert not [p for method, p, _ in hub.requests if method == "GET" and "/resolve/" in p]
    hub.requests.clear()
    assert run(hub, "org/folder", tmp_path, HF_HUB_OFFLINE="1") == (path, "")
    assert hub.requests == []


def test_one_quantisation(hub: FakeHub, tmp_path: Path) -> None:
    names = {"q8_0": "m-Q8_0.gguf", "IQ4_XS": "m.IQ4_XS.gguf"}
    found = run_all(hub, [f"org/quants:{quant}" for quant in names], tmp_path)
    for (path, error), name in zip(found, names.values(), strict=True):
        assert path is not None, error
        assert Path(path).name == name
        assert Path(path).read_bytes() == QUANTS[name]
    here, absent = run_all(hub, ["org/quants:Q8_0", "org/quants:Q4_K_M"], tmp_path, HF_HUB_OFFLINE="1")
    assert here[0] is not None
    assert absent[0] is None
    assert "Q4_K_M" in absent[1]


def test_an_interrupted_download_resumes(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after_bytes = 11_000_000  # past the 10 MiB that the package writes at a time
    path, error = run(hub, "org/quants:Q4_K_M", tmp_path)
    assert path is not None, error
    assert Path(path).read_bytes() == QUANTS["m-Q4_K_M.gguf"]
    ranges = [r for method, p, r in hub.requests if method == "GET" and p.endswith("m-Q4_K_M.gguf")]
    assert ranges[-1] == f"bytes={10 << 20}-"


REFUSALS = {
    "org/missing": "no model `org/missing` that you may read",
    "org/gated": "accept its terms",
    "private/one:Q8_0": "set `HF_TOKEN` if it is private",
    "org/quants": "`org/quants:Q4_K_M`, `org/quants:Q8_0`, `org/quants:IQ4_XS`",
    "org/quants:Q2_K": "no whole GGUF file of `Q2_K`; there are `org/quants:Q4_K_M`",
    "org/none": "neither `config.json` with safetensors nor a GGUF file",
}


def test_refusals_say_what_would_work(hub: FakeHub, tmp_path: Path) -> None:
    found = run_all(hub, list(REFUSALS), tmp_path)
    for (path, error), says in zip(found, REFUSALS.values(), strict=True):
        assert path is None
        assert says in error


def test_the_token_is_honoured(hub: FakeHub, tmp_path: Path) -> None:
    path, error = run(hub, "private/one:Q8_0", tmp_path, HF_TOKEN="hf_secret")
    assert path is not None, error


def test_no_network_and_no_cache(hub: FakeHub, tmp_path: Path) -> None:
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        path, error = run(hub, "org/folder", tmp_path, **environment)
        assert path is None
        assert "not in the local cache and the hub cannot be reached" in error


def test_local_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "folder").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/folder") == Path("org/folder")
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    for wrong in ("missing.gguf", "./missing", "a/b/c", "/nowhere/at/all", "", "a b/c", "org/../x", "https://x.org/y"):
        with pytest.raises(UsageError, match="there is no folder or file"):
            resolve(wrong)


def test_parts_are_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="llama-gguf-split --merge"):
        choose_gguf("o/n", ["x-Q4_0-00001-of-00003.gguf", "x-Q4_0-00002-of-00003.gguf"], "Q4_0")
    assert choose_gguf("o/n", ["x-UD-Q4_K_XL.gguf", "x-Q4_K_M.gguf"], "UD-Q4_K_XL") == "x-UD-Q4_K_XL.gguf"
    assert choose_gguf("o/n", ["only.gguf"], None) == "only.gguf"
