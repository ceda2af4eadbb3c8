"""Settings: whose memory the budget is measured against."""

from __future__ import annotations

import msgspec
import pytest

from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, MIB
from kvarto.engine.assemble import open_program
from kvarto.engine.config import EngineConfig
from kvarto.engine.settings import check_settings, open_backend, plan_layout
from kvarto.ops.reference.backend import ReferenceBackend
from tests.engine.tiny_model import write_tiny_model


class OwnMemory(ReferenceBackend):
    """Computes here, and says that it has 40 MiB of its own, of which 30 are free."""

    def device_memory(self) -> tuple[int, int] | None:
        return 40 * MIB, 30 * MIB


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(model=str(write_tiny_model(tmp_path_factory.mktemp("tiny"))), max_num_batched_tokens=64)


def layout_bytes(config: EngineConfig, **changes: object) -> int:
    config = msgspec.structs.replace(config, **changes)
    backend = OwnMemory()
    files, program = open_program(config, backend)
    files.close()
    return plan_layout(config, program, backend).budget.device_bytes


def test_a_share_is_one_of_the_device(config: EngineConfig) -> None:
    assert layout_bytes(config, gpu_memory_utilization=0.5) == 20 * MIB


def test_more_than_the_device_has_free_is_refused(config: EngineConfig) -> None:
    with pytest.raises(UsageError, match="--device-memory"):
        layout_bytes(config, device_memory=GIB)


def test_a_cpu_computes_in_this_machines_memory() -> None:
    assert ReferenceBackend().device_memory() is None


def test_a_cpu_computes_natively_unless_told_otherwise() -> None:
    native = open_backend(EngineConfig(model="m"))
    assert native.fingerprint.startswith("native-")
    assert open_backend(EngineConfig(model="m", backend="native")).fingerprint == native.fingerprint
    assert open_backend(EngineConfig(model="m", backend="reference")).fingerprint.startswith("reference-")
    assert open_backend(EngineConfig(model="m", device="meta")).fingerprint.startswith("reference-")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "native", "device": "cuda:0"}, "--backend native"),
        ({"backend": "reference", "activations": "int8"}, "--activations int8"),
        ({"backend": "reference", "activations": "bf16"}, "--activations bf16"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(settings: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_backend(EngineConfig(model="m", **settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"threads": 0}, "--threads 0"),
        ({"max_model_len": 1}, "--max-model-len 1"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0"),
        ({"max_num_queued": 0}, "--max-num-queued 0"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens 0"),
        ({"max_num_seqs": 600}, "less than `--max-num-seqs 600`"),
        ({"block_size": 24}, "--block-size 24"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy lifo"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"backend": "torch"}, "--backend torch"),
        ({"activations": "f16"}, "--activations f16"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ],
)
def test_what_no_model_could_serve_is_refused_before_one_is_looked_for(settings: dict[str, object], says: str) -> None:
    nowhere = EngineConfig(model="/nowhere")
    check_settings(nowhere)
    with pytest.raises(UsageError, match=says):
        check_settings(msgspec.structs.replace(nowhere, **settings))
    with pytest.raises(UsageError, match=says):
        open_program(msgspec.structs.replace(nowhere, **settings), OwnMemory())
