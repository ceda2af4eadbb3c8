"""Adapters through `kvarto.LLM`, on a tiny model, real files, and real backends."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvarto import LLM, SamplingParams
from kvarto.adapters.targets import BaseTargets, targets_of
from kvarto.core.errors import AdapterRefused, UnknownAdapter, UsageError
from kvarto.engine.adapter_plan import adapter_table, plan_adapters
from kvarto.engine.adapter_watch import LOOK_EVERY_S
from kvarto.engine.assemble import open_program, plan_engine
from kvarto.engine.config import EngineConfig
from kvarto.engine.settings import open_backend
from tests.adapters.writer import ALL_LINEAR, QV, Options, write_adapter
from tests.server.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 8], [12] * 20]
LIMITS = {"max_num_seqs": 4, "max_num_queued": 8, "max_model_len": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def base(model: Path) -> BaseTargets:
    config = EngineConfig(model=str(model), backend="reference")
    files, program = open_program(config, open_backend(config))
    files.close()
    return targets_of(program)


@pytest.fixture(scope="module", params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(backend: str, base: BaseTargets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, options) in enumerate(
        {
            "qv": Options(rank=4, modules=QV),
            "all": Options(rank=7, modules=ALL_LINEAR, dtypes=("BF16", "F16")),
            "twin": Options(rank=4, modules=QV),
        }.items()
    ):
        write_adapter(folder / name, base, replace(options, seed=0 if name == "twin" else seed))
    (folder / "broken").mkdir()
    (folder / "broken" / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def llm(backend: str, model: Path, folder: Path) -> Iterator[LLM]:
    with LLM(
        str(model), backend=backend, threads=1, seed=1, adapter_dir=(str(folder),), max_lora_rank=8, **LIMITS
    ) as llm:
        yield llm


def tokens(llm: LLM, adapter: object) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, adapter=adapter)  # type: ignore[arg-type]
    return [output.outputs[0].token_ids for output in outputs]


def test_adapters_in_one_batch_say_what_each_says_alone(llm: LLM) -> None:
    alone = {name: tokens(llm, name) for name in (None, "qv", "all", "twin")}
    assert alone["twin"] == alone["qv"]
    assert alone["qv"] != alone[None] != alone["all"] != alone["qv"]
    mixed = tokens(llm, ["qv", None, "all", "twin"])
    assert mixed == [alone["qv"][0], alone[None][1], alone["all"][2], alone["twin"][3]]


def test_steps_count_the_bytes_of_their_adapters(llm: LLM) -> None:
    assert llm._engine.adapters is not None
    for name in ("qv", "all"):
        tokens(llm, name)
    sizes = {info.name: info.size_bytes for info in llm._engine.adapters.infos()}
    traffic = llm._engine.adapters.traffic
    for names, num_adapters in ((["qv"], 12), (["qv", "all"], 24), ([None, None], 0)):
        before = traffic.num_steps, traffic.num_adapters, traffic.num_bytes
        llm.generate([[5] * 8, [6] * 8][: len(names)], GREEDY, adapter=names)
        assert traffic.num_adapters - before[1] == num_adapters
        assert num_adapters / 2 <= traffic.num_steps - before[0] <= num_adapters
        assert traffic.num_bytes - before[2] == 12 * sum(sizes[name] or 0 for name in names if name)


def test_the_ledger_has_what_the_plan_said(llm: LLM, backend: str, model: Path, folder: Path) -> None:
    config = EngineConfig(
        model=str(model), backend=backend, threads=1, adapter_dir=(str(folder),), max_lora_rank=8, **LIMITS
    )
    program, layout = plan_engine(config)
    planned = {each.name: each for each in plan_adapters(config, program, layout)}
    for name in ("qv", "all", "twin"):
        tokens(llm, name)
    page_bytes = layout.kv_format.page_bytes
    # `twin` is `qv` under another name and takes no page of its own.
    expected = (planned["qv"].num_pages + planned["all"].num_pages) * page_bytes
    assert llm._engine.ledger.region_bytes()["pages_adapter"] == expected
    assert (llm._engine.layout.num_pages, llm._engine.layout.total_bytes) == (layout.num_pages, layout.total_bytes)
    assert planned["broken"].refusal is not None
    table = adapter_table(list(planned.values()), layout, 0)
    assert "3 adapters take" in table
    assert "broken: refused" in table


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_codes_take_what_the_plan_said(dtype: str, llm: LLM, backend: str, model: Path, folder: Path) -> None:
    config = EngineConfig(
        model=str(model), backend=backend, threads=1, adapter_dir=(str(folder),), max_lora_rank=8,
        adapter_dtype=dtype, **LIMITS,
    )  # fmt: skip
    program, layout = plan_engine(config)
    planned = {each.name: each for each in plan_adapters(config, program, layout)}
    as_filed = msgspec.structs.replace(config, adapter_dtype="auto")
    whole = {each.name: each for each in plan_adapters(as_filed, program, layout)}
    assert planned["qv"].size_bytes < whole["qv"].size_bytes / 2
    assert planned["qv"].dtype == f"f32+{dtype}"  # columns of B of v_proj are no whole blocks
    with LLM(
        str(model),
        backend=backend,
        threads=1,
        seed=1,
        adapter_dir=(str(folder),),
        max_lora_rank=8,
        adapter_dtype=dtype,
        **LIMITS,
    ) as coded:
        for name in ("qv", "all"):
            said = tokens(coded, name)
            assert said == tokens(coded, name)
            assert said != tokens(llm, None)
        infos = {info.name: info for info in coded._engine.adapters.infos()}  # type: ignore[union-attr]
        expected = (planned["qv"].num_pages + planned["all"].num_pages) * layout.kv_format.page_bytes
        assert coded._engine.ledger.region_bytes()["pages_adapter"] == expected
        for name in ("qv", "all"):
            assert (infos[name].size_bytes, infos[name].dtype) == (planned[name].size_bytes, planned[name].dtype)
        before = {info.name: info.digest for info in llm._engine.adapters.infos()}  # type: ignore[union-attr]
        assert infos["qv"].digest not in (None, *before.values())


def test_names_that_are_unknown_and_files_that_are_broken_are_refused_and_others_go_on(llm: LLM) -> None:
    expected = tokens(llm, "qv")
    with pytest.raises(UnknownAdapter, match="`all`"):
        tokens(llm, "nobody")
    with pytest.raises(AdapterRefused, match="adapter_model.safetensors"):
        tokens(llm, "broken")
    assert tokens(llm, "qv") == expected


def test_the_folder_is_watched(llm: LLM, folder: Path, base: BaseTargets) -> None:
    before = tokens(llm, "qv")
    shutil.copytree(folder / "all", folder / "late")
    shutil.rmtree(folder / "qv")
    write_adapter(folder / "qv", base, Options(rank=5, modules=QV, seed=77))
    deadline = time.monotonic() + 60 * LOOK_EVERY_S
    names: set[str] = set()
    while "late" not in names or tokens(llm, "qv") == before:
        assert time.monotonic() < deadline
        llm._engine.loop.step()
        assert llm._engine.adapters is not None
        names = {info.name for info in llm._engine.adapters.infos()}
    assert tokens(llm, "late") == tokens(llm, "all")
    shutil.rmtree(folder / "late")
    while "late" in names:
        assert time.monotonic() < deadline
        llm._engine.loop.step()
        names = {info.name for info in llm._engine.adapters.infos()}


def test_an_adapter_of_zeros_changes_nothing(backend: str, folder: Path, base: BaseTargets, model: Path) -> None:
    written = write_adapter(folder.parent / "zeros", base, Options(modules=ALL_LINEAR))
    for name, (dtype, array) in written.tensors.items():
        if ".lora_B" in name:
            written.tensors[name] = (dtype, np.zeros_like(array))
    written.save()
    with LLM(
        str(model), backend=backend, threads=1, seed=1, lora_modules=(f"zeros={written.folder}",), **LIMITS
    ) as other:
        assert tokens(other, "zeros") == tokens(other, None)


def test_kv_before_an_adapter_is_called_is_the_bases_and_changes_no_token(
    backend: str, base: BaseTargets, model: Path, tmp_path: Path
) -> None:
    options = Options(modules=ALL_LINEAR, config={"alora_invocation_tokens": [5, 6]})
    written = write_adapter(tmp_path / "called", base, options)
    document = [7 + index * index % 90 for index in range(70)]
    asked = [(document, None), (document + [5, 6, 8], "called"), (document + [5, 6, 8, 9], "called"), (document, None)]
    said: list[list[list[int]]] = []
    for is_caching in (False, True):
        with LLM(
            str(model), backend=backend, threads=1, seed=1, lora_modules=(f"called={written.folder}",),
            enable_prefix_caching=is_caching, **LIMITS,
        ) as llm:  # fmt: skip
            outputs = [llm.generate([prompt], GREEDY, adapter=name)[0] for prompt, name in asked]
        said.append([output.outputs[0].token_ids for output in outputs])
        assert [output.num_cached_tokens for output in outputs] == ([0, 70, 73, 69] if is_caching else [0] * 4)
    assert said[0] == said[1]
    assert said[0][0] != said[0][1]


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_modules": ("nameonly",)},
        {"lora_modules": ("a=/x", "a=/y")},
        {"max_lora_rank": 513},
        {"max_requests_per_adapter": -1},
        {"max_adapter_wait_s": -1.0},
        {"max_adapter_wait_s": float("nan")},
        {"adapter_dtype": "int3"},
        {"adapter_dtype": "bf16"},
        {"adapter_dir": ("/nowhere/at/all",)},
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(model: Path, settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        LLM(str(model), backend="reference", threads=1, **settings, **LIMITS)
