"""Settings: whose memory the budget is measured against."""

from __future__ import annotations

import msgspec
import pytest

from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, MIB
from kvarto.engine.assemble import open_program
from kvarto.engine.config import EngineConfig
from kvarto.engine.settings import plan_layout
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
    files, program = open_program(config)
    files.close()
    return plan_layout(config, program, OwnMemory()).budget.device_bytes


def test_a_share_is_one_of_the_device(config: EngineConfig) -> None:
    assert layout_bytes(config, gpu_memory_utilization=0.5) == 20 * MIB


def test_more_than_the_device_has_free_is_refused(config: EngineConfig) -> None:
    with pytest.raises(UsageError, match="--device-memory"):
        layout_bytes(config, device_memory=GIB)


def test_a_cpu_computes_in_this_machines_memory() -> None:
    assert ReferenceBackend().device_memory() is None
