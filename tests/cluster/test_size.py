"""Sizing: what `kvarto k8s size` says is what the server's ledger holds, and what a limited server takes."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import transformers

from kvarto.cli.k8s_flags import OverheadConfig
from kvarto.cli.k8s_render import engine_flags
from kvarto.cli.k8s_size import size_need
from kvarto.cluster.advice import advise
from kvarto.cluster.cards import CARDS, find_card
from kvarto.cluster.deployment import Workload, serve_arguments
from kvarto.cluster.need import GPU_PROCESS_BYTES, PROCESS_BYTES, Need, need_of
from kvarto.cluster.quantity import parse_quantity
from kvarto.cluster.render import render
from kvarto.cluster.schemes import SCHEMES, ClusterOptions
from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, MIB, parse_bytes
from kvarto.engine import sizing
from kvarto.engine.assemble import build, open_program
from kvarto.engine.channel import LocalChannel
from kvarto.engine.config import EngineConfig
from kvarto.engine.settings import plan_layout
from kvarto.memory import device_limit
from kvarto.memory.device_limit import DEVICE_OVERHEAD_BYTES
from kvarto.ops.reference.backend import ReferenceBackend
from kvarto.planning.page_count import pages_for_sequence
from tests.acceptance.serving import Served, peak_bytes
from tests.cluster.environments import Environment, environment
from tests.cluster.manifests import GPU_SCHEMES, NEED, OPTIONS, container
from tests.engine.tiny_model import write_tiny_model

TOLERANCE = 0.02
SIZES = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma3": (transformers.Gemma3TextConfig, {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64}),
    "gpt2": (
        transformers.GPT2Config, {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024, "vocab_size": 4096}
    ),
    "mistral": (transformers.MistralConfig, {"num_key_value_heads": 4, "sliding_window": 128}),
}
COMBINATIONS = [
    ("llama", 512, 4, {}),
    ("llama", 2048, 1, {"block_size": 64}),
    ("llama", 1024, 32, {"dtype": "bf16", "kv_cache_dtype": "bf16"}),
    ("qwen3", 2048, 8, {"kv_cache_dtype": "f16"}),
    ("qwen3", 300, 64, {"max_num_batched_tokens": 256, "block_size": 8}),
    ("gemma3", 1024, 8, {"max_num_batched_tokens": 64}),
    ("gemma3", 2048, 3, {"block_size": 32, "dtype": "bf16"}),
    ("gpt2", 1024, 16, {}),
    ("mistral", 2048, 4, {"max_num_batched_tokens": 128}),
    ("mistral", 1777, 16, {"block_size": 128}),
]
"""Model, context, concurrency, and further settings."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family."""
    folders = {}
    for name, (config, settings) in FAMILIES.items():
        sizes = settings if name == "gpt2" else {**SIZES, "max_position_embeddings": 2048, **settings}
        folders[name] = tmp_path_factory.mktemp(name)
        model = transformers.AutoModelForCausalLM.from_config(config(bos_token_id=1, eos_token_id=2, **sizes))
        model.save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda each: f"{each[0]}-{each[1]}-{each[2]}")
def test_the_size_is_what_the_servers_ledger_holds(
    combination: tuple[str, int, int, dict[str, object]], models: dict[str, Path]
) -> None:
    name, context, concurrency, settings = combination
    config = EngineConfig(
        model=str(models[name]), max_model_len=context, max_num_seqs=concurrency, threads=1,
        **{"max_num_batched_tokens": 128, **settings},
    )  # fmt: skip
    layout, need = size_need(config, OverheadConfig(), None, on_gpu=False)
    engine = build(msgspec.structs.replace(config, device_memory=need.arena_bytes), LocalChannel())
    try:
        engine.ledger.check()
        held_bytes = sum(row.size_bytes for row in engine.ledger.rows())
        assert held_bytes <= need.arena_bytes
        assert need.arena_bytes - held_bytes <= TOLERANCE * need.arena_bytes
        groups, page_size = engine.program.layer_groups, engine.layout.kv_format.page_size
        each = pages_for_sequence(groups, page_size, context, engine.layout.limits.max_tokens)
        assert engine.pool.num_pages >= concurrency * each
        assert engine.layout.total_bytes <= layout.total_bytes + engine.layout.kv_format.page_bytes
    finally:
        engine.close()


def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        ready = re.search(r"ready in .* http://\S+:(\d+)", log.read_text(errors="replace"))
        if ready:
            return f"http://127.0.0.1:{ready[1]}"
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')}")


@pytest.mark.heavy
def test_a_pod_for_the_demo_model_holds_its_server(demo_model: Path, tmp_path: Path) -> None:
    """A real server, started with the arguments of the manifest: its ledger, and its memory against the limit."""
    engine = EngineConfig(model=str(demo_model), max_model_len=1024, max_num_seqs=8, dtype="bf16", prefault=True)
    _, need = size_need(engine, OverheadConfig(), None, on_gpu=False)
    workload = Workload(model=str(demo_model), flags=engine_flags(engine))
    documents = list(render(SCHEMES["cpu"], workload, need, OPTIONS).documents)
    args = container(documents)["args"]
    args[args.index("--port") + 1] = "0"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-u", "-m", "kvarto", *args], stdout=output, stderr=output)
    try:
        server = Served(process, wait_for_url(process, log), log)
        text = httpx.get(f"{server.url}/metrics", timeout=30).text
        held_bytes = sum(float(each) for each in re.findall(r"^kvarto:pool_bytes{.*} (\S+)$", text, re.M))
        assert abs(held_bytes - need.arena_bytes) <= TOLERANCE * need.arena_bytes
        limit = int(parse_quantity(container(documents)["resources"]["limits"]["memory"]))
        assert limit == need.host_bytes
        assert peak_bytes(server.processes) <= limit
        peak = peak_bytes(server.processes)
        print(f"limit {limit / MIB:.0f} MiB, peak {peak / MIB:.0f}, arena {held_bytes / MIB:.0f}")
    finally:
        process.terminate()
        process.wait(30)


def test_a_gpu_that_is_not_here_needs_the_same_arena(models: dict[str, Path]) -> None:
    config = EngineConfig(model=str(models["llama"]), max_model_len=512, max_num_seqs=4, backend="reference")
    here, need = size_need(config, OverheadConfig(), None, on_gpu=False)
    there, gpu_need = size_need(config, OverheadConfig(overhead_memory=512 * MIB), None, on_gpu=True)
    assert there.total_bytes == here.total_bytes
    assert gpu_need.limit_bytes == need.arena_bytes + 512 * MIB
    assert need.host_bytes - PROCESS_BYTES == gpu_need.host_bytes - GPU_PROCESS_BYTES + need.arena_bytes
    with pytest.raises(UsageError, match="`--device-memory` is what `kvarto k8s` works out"):
        size_need(msgspec.structs.replace(config, device_memory=GIB), OverheadConfig(), None, on_gpu=True)


def test_more_load_never_needs_less(models: dict[str, Path]) -> None:
    config = EngineConfig(model=str(models["gemma3"]), max_num_seqs=8)
    sizes = [sizing.size_engine(config, num_tokens)[1].total_bytes for num_tokens in (16, 100, 500, 1000, 2048)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


class ReportedDevice(ReferenceBackend):
    """Computes here, and reports the memory that a driver would."""

    def __init__(self, seen: Environment) -> None:
        super().__init__("cpu", 1)
        self._seen = seen

    def device_memory(self) -> tuple[int, int] | None:
        return self._seen.total_bytes, self._seen.free_bytes


def enter(seen: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give this process the container's variables and files."""
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in seen.variables.items():
        monkeypatch.setenv(name, value)
    record = tmp_path / "vcuda.config"
    if seen.vcuda is not None:
        record.write_bytes(seen.vcuda)
    monkeypatch.setattr(device_limit, "VCUDA_CONFIG", str(record))


def budget_under(seen: Environment, config: EngineConfig) -> int:
    """Bytes that a server in that container would plan with."""
    backend = ReportedDevice(seen)
    files, program = open_program(config, backend)
    files.close()
    return plan_layout(config, program, backend).budget.device_bytes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(model=str(folder), max_num_batched_tokens=64, device="cuda:0")


SMALL_NEED = Need(arena_bytes=48 * MIB, overhead_bytes=768 * MIB, host_bytes=3 * GIB)


@pytest.mark.parametrize("scheme", GPU_SCHEMES)
def test_a_rendered_server_takes_exactly_what_was_planned(
    scheme: str, tiny: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    documents = list(render(SCHEMES[scheme], Workload(), SMALL_NEED, OPTIONS).documents)
    args = container(documents)["args"]
    said = parse_bytes(args[args.index("--device-memory") + 1])
    seen = environment(scheme, documents, find_card("H100-80"))
    enter(seen, monkeypatch, tmp_path)
    engine = build(msgspec.structs.replace(tiny, device_memory=said), LocalChannel(), backend=ReportedDevice(seen))
    try:
        assert engine.layout.budget.device_bytes == SMALL_NEED.arena_bytes
        held_bytes = sum(row.size_bytes for row in engine.ledger.rows())
        assert 0 <= SMALL_NEED.arena_bytes - held_bytes < engine.layout.kv_format.page_bytes
    finally:
        engine.close()


@pytest.mark.parametrize("scheme", [name for name in GPU_SCHEMES if name not in ("whole", "vgpu")])
def test_a_server_that_is_told_nothing_takes_the_limit_that_it_finds(
    scheme: str, tiny: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whole cards and vGPUs set no limit: there the default of an unlimited server holds."""
    rendered = render(SCHEMES[scheme], Workload(), NEED, OPTIONS)
    seen = environment(scheme, list(rendered.documents), find_card("H100-80"))
    enter(seen, monkeypatch, tmp_path)
    budget_bytes = budget_under(seen, tiny)
    granted = rendered.parts.granted_bytes // MIB * MIB  # an equal part of a card need not be whole MiB
    assert budget_bytes == granted - DEVICE_OVERHEAD_BYTES


def test_the_flags_of_the_engine_reach_the_container() -> None:
    config = EngineConfig(
        model="demo", max_model_len=4096, max_num_seqs=7, enable_prefix_caching=False, prefault=True, dtype="bf16",
        seed=3,
    )  # fmt: skip
    flags = engine_flags(config)
    args = serve_arguments(Workload(model="demo", flags=flags), NEED)
    assert args[:2] == ["serve", "demo"]
    assert {"--no-enable-prefix-caching", "--prefault"} <= set(flags)
    pairs = dict(itertools.pairwise(flags))
    names = ("--max-model-len", "--max-num-seqs", "--dtype", "--seed")
    assert [pairs[name] for name in names] == ["4096", "7", "bf16", "3"]


def every_need() -> Iterator[Need]:
    for gib in (1, 3, 5, 9, 13, 19, 30, 39, 45, 60, 78):
        yield Need(gib * GIB, 768 * MIB, 3 * GIB)


@pytest.mark.parametrize("card", CARDS)
def test_advice_can_be_followed(card: str) -> None:
    options = ClusterOptions(card=find_card(card))
    for need in every_need():
        advice = advise(need, find_card(card))
        assert advice.reasons
        if advice.scheme is None:
            assert need.limit_bytes > find_card(card).memory_bytes
        else:
            assert render(SCHEMES[advice.scheme], Workload(), need, options).parts.granted_bytes >= need.limit_bytes


def test_a_need_is_whole_mebibytes(models: dict[str, Path]) -> None:
    _, layout = sizing.size_engine(EngineConfig(model=str(models["llama"]), max_num_seqs=3), 100)
    for on_gpu in (False, True):
        need = need_of(layout, on_gpu=on_gpu)
        assert need.arena_bytes % MIB == need.host_bytes % MIB == need.overhead_bytes % MIB == 0
        assert need.arena_bytes >= layout.total_bytes
