"""Limits of a GPU as each sharing scheme writes them into a container: read exactly, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, MIB
from kvarto.memory.budget import resolve_budget
from kvarto.memory.device_limit import DEVICE_OVERHEAD_BYTES, VCUDA_CONFIG, VCUDA_MEMORY_OFFSET, read_device_limit
from kvarto.memory.limits import device_limits

CARD_BYTES = 81_559 * MIB


def limit_of(environ: dict[str, str], *, index: int = 0, root: Path = Path("/nowhere")) -> int | None:
    limit = read_device_limit(environ, CARD_BYTES, device_index=index, root=root)
    return None if limit is None else limit.limit_bytes


@pytest.mark.parametrize(
    ("environ", "limit_bytes"),
    [
        ({}, None),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "16384m"}, 16 * GIB),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "16g", "CUDA_DEVICE_MEMORY_LIMIT": "1g"}, 16 * GIB),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "1048576K"}, GIB),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "1073741825"}, GIB + 1),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "0"}, None),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "0", "CUDA_DEVICE_MEMORY_LIMIT": "1g"}, GIB),
        ({"CUDA_DEVICE_MEMORY_LIMIT_1": "1g"}, None),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M,1=8G"}, 4 * GIB),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=8G"}, None),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "16", "ALIYUN_COM_GPU_MEM_DEV": "79"}, 16 * GIB),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "16000", "ALIYUN_COM_GPU_MEM_DEV": "81559"}, 16_000 * MIB),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "16"}, 16 * GIB),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "160", "ALIYUN_COM_GPU_MEM_UNIT": "MiB"}, 160 * MIB),
        ({"GPU_PORTION": "0.25"}, CARD_BYTES // 4),
        ({"GPU_PORTION": "1"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-5f1c"}, CARD_BYTES),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5f1c", "NVIDIA_VISIBLE_DEVICES": "GPU-1"}, CARD_BYTES),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, None),
        ({"KVARTO_GPU_MEMORY_LIMIT": "8GiB"}, 8 * GIB),
        ({"KVARTO_GPU_MEMORY_LIMIT": "GPU-1=8GiB, 2GiB", "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 8 * GIB),
        ({"KVARTO_GPU_MEMORY_LIMIT": "GPU-2=8GiB, 2GiB", "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 2 * GIB),
        ({"KVARTO_GPU_MEMORY_LIMIT": "GPU-2=8GiB", "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, None),
        ({"KVARTO_GPU_MEMORY_LIMIT": "GPU-1=8GiB,GPU-2=4GiB"}, 4 * GIB),
        ({"KVARTO_GPU_MEMORY_LIMIT": "GPU-1=8GiB", "NVIDIA_VISIBLE_DEVICES": "all"}, 8 * GIB),
        ({"KVARTO_GPU_MEMORY_LIMIT": "GPU-1=8GiB,2GiB", "NVIDIA_VISIBLE_DEVICES": "0"}, 2 * GIB),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "16", "CUDA_DEVICE_MEMORY_LIMIT": "10g"}, 10 * GIB),
        ({"GPU_PORTION": "0.12", "KVARTO_GPU_MEMORY_LIMIT": "10GiB"}, 10 * GIB),
    ],
)
def test_each_scheme_is_read(environ: dict[str, str], limit_bytes: int | None) -> None:
    assert limit_of(environ) == limit_bytes


@pytest.mark.parametrize(
    ("visible", "index", "limit_bytes"),
    [("1", 0, 2 * GIB), ("1,0", 1, GIB), ("GPU-b", 0, 2 * GIB), ("GPU-b,GPU-a", 1, GIB), ("", 1, 2 * GIB)],
)
def test_limits_follow_the_device_when_the_process_renumbers_them(visible: str, index: int, limit_bytes: int) -> None:
    environ = {
        "NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_MEMORY_LIMIT_0": "1g",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "2g",
    }
    assert limit_of(environ, index=index) == limit_bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "16Gi"),
        ("CUDA_DEVICE_MEMORY_LIMIT", "-1"),
        ("CUDA_DEVICE_MEMORY_LIMIT", ""),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "4096M"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=4Gi"),
        ("ALIYUN_COM_GPU_MEM_CONTAINER", "1.5"),
        ("GPU_PORTION", "half"),
        ("KVARTO_GPU_MEMORY_LIMIT", "0=8GB=1"),
        ("KVARTO_GPU_MEMORY_LIMIT", "8 gigs"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"`{name}={value}`")):
        limit_of({name: value})


def test_the_record_of_gpu_manager_is_read(tmp_path: Path) -> None:
    path = tmp_path / VCUDA_CONFIG
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(VCUDA_MEMORY_OFFSET) + (12 * GIB).to_bytes(8, "little") + bytes(24))
    assert limit_of({}, root=tmp_path) == 12 * GIB
    path.write_bytes(bytes(VCUDA_MEMORY_OFFSET + 7))
    with pytest.raises(UsageError, match="too short"):
        limit_of({}, root=tmp_path)


@pytest.mark.parametrize("name", ["etc/kvarto/gpu-memory-limit", VCUDA_CONFIG])
def test_a_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.mkdir(parents=True)  # what a mount leaves whose source is missing
    with pytest.raises(UsageError, match="can't be read: Is a directory"):
        limit_of({}, root=tmp_path)
    path.rmdir()
    path.write_bytes(b"\xff\xfe8GiB")
    with pytest.raises(UsageError, match=re.escape(name)):
        limit_of({}, root=tmp_path)


def test_a_file_of_the_node_comes_before_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "etc/kvarto/gpu-memory-limit"
    path.parent.mkdir(parents=True)
    path.write_text("6GiB\n")
    assert limit_of({"KVARTO_GPU_MEMORY_LIMIT": "8GiB"}, root=tmp_path) == 6 * GIB


def test_the_limit_is_the_budget_in_every_start(tmp_path: Path) -> None:
    environ = {"CUDA_DEVICE_MEMORY_LIMIT_0": "16384m"}
    for free_bytes in (CARD_BYTES, 16 * GIB, 16 * GIB - 500 * MIB):  # with and without the context, limiter or not
        limits = device_limits(CARD_BYTES, free_bytes, 4, environ=environ, root=tmp_path)
        budget = resolve_budget(limits, default_bytes=1)
        assert budget.device_bytes == 16 * GIB - DEVICE_OVERHEAD_BYTES
        assert "`CUDA_DEVICE_MEMORY_LIMIT_0=16384m`" in budget.source
    assert resolve_budget(limits, 1, gpu_memory_utilization=0.5).device_bytes == 8 * GIB


def test_less_is_planned_when_the_card_is_fuller_than_the_limit_says(tmp_path: Path) -> None:
    limits = device_limits(CARD_BYTES, 3 * GIB, 4, environ={"GPU_PORTION": "0.5"}, root=tmp_path)
    assert resolve_budget(limits, default_bytes=1).device_bytes == 3 * GIB
    with pytest.raises(UsageError, match=r"the limit that `GPU_PORTION=0.5` sets"):
        resolve_budget(limits, 1, device_memory=4 * GIB)
