"""What programs and `nvidia-smi` are told: the limit, to the byte, and never more than the card has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvarto.cli.k8s_limiter import k8s_limiter_status
from kvarto.cluster.limiter_ledger import (
    ACCOUNT,
    DEVICE,
    DEVICES_OFFSET,
    FILE_BYTES,
    MAGIC,
    SLOT,
    SLOT_BYTES,
    SLOTS_OFFSET,
    UNIT_BYTES,
    read_account,
)
from kvarto.core.errors import BadFile, UsageError
from tests.cluster.fakes.board import GIB, MIB
from tests.cluster.limiter.conftest import StartContainer
from tests.cluster.limiter.container import HERE, Container

LIMIT = 1_000_000_123


@pytest.fixture
def container(start: StartContainer) -> Container:
    return start(str(LIMIT))


def test_free_and_total_are_the_limits(container: Container) -> None:
    guest = container.opened()
    assert guest.info() == [LIMIT, LIMIT]
    guest.take("cuMemAlloc", 300 * MIB)
    assert guest.info() == [LIMIT - 300 * MIB, LIMIT]
    assert guest.call_for_value("cuDeviceTotalMem_v2", 0) == [0, LIMIT]


def test_a_full_card_shows_through(container: Container) -> None:
    guest = container.opened()
    container.board.script(others_bytes=80 * GIB - 5 * MIB)
    assert guest.info() == [5 * MIB, LIMIT]
    assert guest.nvml()["v1"] == [LIMIT, 5 * MIB, 0]


def test_a_limit_above_the_card_is_the_card(start: StartContainer) -> None:
    container = start("100GiB", capacity_bytes=16 * GIB)
    assert container.opened().info() == [16 * GIB, 16 * GIB]


def test_places_that_nobody_wants_an_answer_in_may_be_null(container: Container) -> None:
    guest = container.opened()
    assert guest.call("cuMemGetInfo_v2", 0, 0) == 0


def test_nvml_tells_the_same_in_both_versions(container: Container) -> None:
    guest = container.opened()
    guest.take("cuMemAlloc", 300 * MIB)
    free = LIMIT - 300 * MIB
    assert guest.nvml() == {"v1": [LIMIT, free, 300 * MIB], "v2": [LIMIT, 0, free, 300 * MIB]}
    assert container.guest().nvml()["v1"] == [LIMIT, free, 300 * MIB]  # also to one that never touches CUDA


def test_the_status_is_the_account(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = container.opened(), container.opened()
    first.take("cuMemAlloc", 100 * MIB)
    second.take("cuMemAlloc", 200 * MIB)
    second.take("cuMemAlloc", 2 * GIB)
    second.end()
    k8s_limiter_status(ledger=container.ledger, json=True)
    answer = json.loads(capsys.readouterr().out)
    uuid = container.board.uuid().removeprefix("GPU-")
    assert answer["devices"] == [
        {
            "uuid": uuid, "limit_bytes": LIMIT, "used_bytes": 300 * MIB, "free_bytes": LIMIT - 300 * MIB,
            "peak_bytes": 300 * MIB, "num_refused": 1,
        }
    ]  # fmt: skip
    holders = {process["pid"]: process for process in answer["processes"]}
    assert holders[first.pid]["used_bytes"] == {uuid: 100 * MIB}
    assert holders[first.pid]["is_alive"]
    assert not holders[second.pid]["is_alive"]
    k8s_limiter_status(ledger=container.ledger)
    text = capsys.readouterr().out
    assert "100.00 MiB" in text
    assert "ended; given back when needed" in text


@pytest.mark.parametrize(("is_release", "sequence", "expected"), [(0, 9, 110), (1, 9, 90), (0, 8, 100)])
def test_a_change_that_is_not_carried_over_yet_is_read(
    tmp_path: Path, is_release: int, sequence: int, expected: int
) -> None:
    """As a process leaves it that is killed between its two steps. The account has seen change 8."""
    slot = 3
    data = bytearray(FILE_BYTES)
    data[:8] = MAGIC.to_bytes(8, "little")
    total = (500 | 10 << 32, sequence << 16 | slot << 1 | is_release)
    DEVICE.pack_into(data, DEVICES_OFFSET, bytes(range(1, 17)), *total, LIMIT + 1, 500, 0, 0, 0)
    SLOT.pack_into(data, SLOTS_OFFSET + slot * SLOT_BYTES, 2, 77, 0, 0, b"killed")
    ACCOUNT.pack_into(data, SLOTS_OFFSET + slot * SLOT_BYTES + SLOT.size, 100, 8)
    (tmp_path / "ledger").write_bytes(data)
    (process,) = read_account(tmp_path / "ledger").processes
    assert (process.pid, process.name, process.is_alive) == (77, "killed", False)
    assert list(process.used_bytes.values()) == [expected * UNIT_BYTES]


def test_a_name_in_the_ledger_cannot_steer_a_terminal(tmp_path: Path) -> None:
    data = bytearray(FILE_BYTES)
    data[:8] = MAGIC.to_bytes(8, "little")
    DEVICE.pack_into(data, DEVICES_OFFSET, bytes(range(1, 17)), 100, 0, LIMIT + 1, 100, 0, 0, 0)
    SLOT.pack_into(data, SLOTS_OFFSET, 2, 77, 0, 0, b"\x1b]0;x\x07\n\xffname")
    ACCOUNT.pack_into(data, SLOTS_OFFSET + SLOT.size, 100, 0)
    (tmp_path / "ledger").write_bytes(data)
    (process,) = read_account(tmp_path / "ledger").processes
    assert process.name == "?]0;x??\ufffdname"


def test_no_ledger_and_no_such_file_are_said(container: Container) -> None:
    with pytest.raises(UsageError, match="--ledger"):
        k8s_limiter_status(ledger=container.ledger)
    with pytest.raises(BadFile, match="no ledger"):
        k8s_limiter_status(ledger=HERE / "guest.py")
