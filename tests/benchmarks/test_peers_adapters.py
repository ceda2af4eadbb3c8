"""Adapters are served by each engine in its own way and asked for by one client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import chosen_columns
from benchmarks.peers.client import request_body
from benchmarks.peers.engines.base import AdapterUse, Engine, by_model
from benchmarks.peers.folders import Folders
from benchmarks.peers.launch import Launch
from benchmarks.peers.prompts import Prompt, PromptMaker
from benchmarks.peers.servers import ENGINES, ServerName
from benchmarks.peers.workload import ADAPTERS
from kvarto.core.errors import UsageError

NAMES = ("a", "b", "c")


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """With adapters, and what OpenVINO needs for them."""
    made = Folders(tmp_path, tmp_path / "demo.gguf")
    for name in NAMES:
        (made.adapters / name).mkdir(parents=True)
        made.gguf_adapters.mkdir(exist_ok=True)
        (made.gguf_adapters / f"{name}.gguf").touch()
    for weights in ENGINES["openvino"].formats:
        made.openvino_named_path(weights).mkdir(parents=True)
    return made


@dataclass(frozen=True)
class FakeEngine:
    """Has two flags for adapters."""

    name: str = "fake"
    formats: tuple[str, ...] = ("f32",)

    def install(self, folders: Folders) -> None:
        raise NotImplementedError

    def launch(self, folders: Folders, weights: str, port: int, flags: Sequence[str]) -> Launch:
        return Launch(f"fake:{weights}", ("serve", *flags), {}, "demo", port, "1")

    def adapter_use(self, folders: Folders, weights: str, names: Sequence[str]) -> AdapterUse:
        return AdapterUse(("--lora", str(len(names))), by_model(names))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_every_engine_asks_for_each_adapter_differently(engine: Engine, folders: Folders) -> None:
    use = engine.adapter_use(folders, engine.formats[0], NAMES)
    assert list(use.fields) == list(NAMES)
    launch = Launch("", (), {}, "demo", 1, "", use.fields)
    bodies = [request_body(launch, Prompt((1,), 1, name)) for name in (None, *NAMES)]
    assert len({str(body) for body in bodies}) == len(bodies)
    assert bodies[0]["model"] == "demo"
    assert all(body["prompt"] == [1] for body in bodies)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_adapters_that_are_not_there_are_an_error_with_the_command_that_makes_them(
    engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="benchmarks.peers adapters"):
        engine.adapter_use(Folders(tmp_path, tmp_path), engine.formats[0], NAMES)


def test_llama_cpp_numbers_adapters_in_the_order_of_their_files(folders: Folders) -> None:
    use = ENGINES["llama.cpp"].adapter_use(folders, "q8_0", NAMES)
    paths = [part.removesuffix(":0") for part in use.flags[-1].split(",")]
    assert [Path(path).stem for path in paths] == list(NAMES)
    assert [fields["lora"] for fields in use.fields.values()] == [[{"id": i, "scale": 1.0}] for i in range(len(NAMES))]


def test_flags_for_adapters_come_before_ours_and_not_into_the_label(folders: Folders) -> None:
    server = ServerName(FakeEngine(), "f32", ("--x", "1"), {"A": "2"})
    bare, adapted = server.launch(folders), server.launch(folders, NAMES)
    assert (bare.label, bare.command, bare.adapters) == ("fake:f32 --x 1 A=2", ("serve", "--x", "1"), {})
    assert adapted.label == "fake:f32 +adapters --x 1 A=2"
    assert adapted.command == ("serve", "--lora", "3", "--x", "1")
    assert adapted.environment == {"A": "2"}
    assert list(adapted.adapters) == list(NAMES)


def test_who_names_the_folder_says_all_flags_himself(folders: Folders) -> None:
    launch = ServerName(FakeEngine(), "f32", ("--dir", "{adapters}/a")).launch(folders, NAMES)
    assert launch.command == ("serve", "--dir", f"{folders.adapters}/a")
    assert list(launch.adapters) == list(NAMES)


def test_adapters_are_measured_beside_the_bare_base() -> None:
    bare, adapted = chosen_columns("lora")
    assert [column.name for column in (bare, adapted)] == ["c32", "lora"]
    maker = PromptMaker(range(40_000, 45_000))
    ours, base = adapted.prompts(maker, "salt"), bare.prompts(maker, "salt")
    assert [(prompt.ids, prompt.num_output_tokens) for prompt in ours] == [
        (prompt.ids, prompt.num_output_tokens) for prompt in base
    ]
    assert {prompt.adapter for prompt in ours} == set(ADAPTERS)
    assert [column.name for column in chosen_columns("c8,single")] == ["single", "c8"]
