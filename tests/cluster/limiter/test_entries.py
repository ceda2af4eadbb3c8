"""Every way to take device memory: counted before the driver is asked, given back after it has, exact in between."""

from __future__ import annotations

import random

import pytest

from tests.cluster.fakes.board import MIB
from tests.cluster.limiter.conftest import StartContainer
from tests.cluster.limiter.container import OUT_OF_MEMORY

EXACT = (
    "cuMemAlloc", "cuMemAllocManaged", "cuMemAllocPitch", "cuMemAllocAsync", "cuMemAllocAsync_ptsz",
    "cuMemAllocFromPoolAsync", "cuMemPoolCreate", "cuArrayCreate", "cuArray3DCreate", "cuMipmappedArrayCreate",
    "cuMemCreate", "cuGraphInstantiate", "cuCtxCreate", "cuCtxSetLimit",
)  # fmt: skip
IMPORTS = ("cuIpcOpenMemHandle", "cuImportExternalMemory", "cuMemPoolImportPointer")
"""Memory that exists already: the importer is charged for it too, so the account is above the card."""


@pytest.mark.parametrize("way", EXACT)
def test_the_account_is_what_the_card_holds(start: StartContainer, way: str) -> None:
    container = start()
    container.board.script(context_bytes=2 * MIB)
    guest = container.opened(KVARTO_GPU_CONTEXT_SIZE="2MiB")
    keys = []
    for size in (1, 5000, 3 * MIB, 20 * MIB + 7):
        result, key = guest.take(way, size)
        assert result == 0
        keys.append(key)
        assert container.counted() == container.held()
    for key in random.Random(1).sample(keys, len(keys)):
        assert guest.give(key) == 0
        guest.call("cuCtxSynchronize")
        guest.info()  # looks at what the pools gave back by themselves
        assert container.counted() == container.held()
    assert container.counted() == 2 * MIB  # the context


@pytest.mark.parametrize("way", IMPORTS)
def test_an_import_is_charged_to_the_importer_too(start: StartContainer, way: str) -> None:
    container = start()
    guest = container.opened()
    result, key = guest.take(way, 20 * MIB)
    assert result == 0
    assert container.counted() >= container.held() + 10 * MIB
    assert guest.give(key) == 0
    guest.call("cuCtxSynchronize")
    guest.info()
    assert container.counted() == container.held() == 0


@pytest.mark.parametrize("way", EXACT + IMPORTS)
def test_the_limit_is_a_clean_out_of_memory(start: StartContainer, way: str) -> None:
    container = start()
    container.board.script(watch_bytes=256 * MIB)
    guest = container.opened()
    taken = 0
    while (result := guest.take(way, 48 * MIB)[0]) == 0 and container.counted() + 40 * MIB < 256 * MIB:
        taken += 1
        assert taken < 9
    if way not in ("cuCtxCreate", "cuCtxSetLimit"):  # a context that stays small is made all the same
        assert taken >= 2
        result = guest.take(way, 200 * MIB)[0]
        assert result == OUT_OF_MEMORY
    assert container.counted() <= 256 * MIB
    assert container.board.truth().num_overshoots == 0
    assert guest.take("cuMemAlloc", 1 << 63)[0] == OUT_OF_MEMORY  # absurd sizes wrap nowhere
    assert guest.take("cuMemAlloc", (1 << 64) - 1)[0] == OUT_OF_MEMORY


@pytest.mark.parametrize("way", EXACT)
def test_what_the_driver_refuses_is_not_charged(start: StartContainer, way: str) -> None:
    container = start()
    guest = container.opened()
    container.board.script(others_bytes=80 << 30)  # a neighbour has taken the whole card
    guest.take(way, 20 * MIB)
    assert container.counted() == container.held() == 0


def test_a_cached_pool_gives_room_to_others(start: StartContainer) -> None:
    container = start()
    container.board.script(watch_bytes=256 * MIB)
    guest = container.opened()
    result, key = guest.take("cuMemAllocAsync", 160 * MIB)
    assert result == 0
    guest.give(key)  # stays in the pool, and on the account
    assert container.counted() == container.held() == 160 * MIB
    assert guest.take("cuMemAlloc", 200 * MIB)[0] == 0
    assert container.counted() == container.held() == 200 * MIB
    assert container.board.truth().num_overshoots == 0


def test_a_pool_that_grows_by_more_than_foreseen_is_charged_or_undone(start: StartContainer) -> None:
    container = start()
    container.board.script(growth_bytes=96 * MIB)
    guest = container.opened()
    assert guest.take("cuMemAllocAsync", 1 * MIB)[0] == 0
    assert container.counted() == container.held() == 96 * MIB
    assert guest.take("cuMemAlloc", 100 * MIB)[0] == 0
    assert guest.take("cuMemAllocAsync", 90 * MIB)[0] == 0  # fits into what the pool has
    assert guest.take("cuMemAllocAsync", 40 * MIB)[0] == OUT_OF_MEMORY
    assert container.counted() == container.held() <= 256 * MIB


def test_memory_of_a_context_goes_with_it(start: StartContainer) -> None:
    container = start()
    guest = container.opened()
    for way in ("cuMemAlloc", "cuMemAllocManaged", "cuArrayCreate", "cuMipmappedArrayCreate"):
        assert guest.take(way, 10 * MIB)[0] == 0
    kept = guest.take("cuMemCreate", 8 * MIB)
    assert guest.call("cuDevicePrimaryCtxReset_v2", 0) == 0
    assert container.counted() == container.held() == 8 * MIB  # belongs to no context
    assert guest.give(kept[1]) == 0
    assert container.counted() == container.held() == 0


def test_an_attached_context_goes_with_its_last_user(start: StartContainer) -> None:
    container = start()
    guest = container.opened()
    assert guest.context(0) == 0
    assert guest.take("cuMemAlloc", 10 * MIB)[0] == 0
    result, context = guest.call_for_value("cuCtxAttach", 0)
    assert result == 0
    assert guest.call("cuCtxDetach", context) == 0
    assert container.counted() == container.held() == 10 * MIB
    assert guest.call("cuCtxDetach", context) == 0
    assert container.counted() == container.held() == 0


def test_a_primary_context_is_charged_once_and_until_its_last_user(start: StartContainer) -> None:
    container = start()
    container.board.script(context_bytes=40 * MIB)
    guest = container.opened(KVARTO_GPU_CONTEXT_SIZE="40MiB")
    guest.call_for_value("cuDevicePrimaryCtxRetain", 0)
    result, green = guest.call_for_value("cuGreenCtxCreate", 0, 0, 0)
    assert result == 0
    assert container.counted() == container.held() == 40 * MIB
    guest.call("cuDevicePrimaryCtxRelease_v2", 0)
    guest.call("cuDevicePrimaryCtxRelease", 0)
    assert container.counted() == container.held() == 40 * MIB
    guest.call("cuGreenCtxDestroy", green)
    assert container.counted() == container.held() == 0


def test_a_context_is_measured_where_no_size_is_named(start: StartContainer) -> None:
    container = start("2GiB")
    container.board.script(context_bytes=300 * MIB)
    container.opened(KVARTO_GPU_CONTEXT_SIZE=None)
    assert container.counted() == container.held() == 300 * MIB


def test_a_context_that_does_not_fit_is_refused(start: StartContainer) -> None:
    container = start("400MiB")
    guest = container.guest(KVARTO_GPU_CONTEXT_SIZE=None)
    assert guest.open() == OUT_OF_MEMORY  # 512 MiB are expected until one was measured


def test_allocations_on_the_host_are_free(start: StartContainer) -> None:
    container = start()
    guest = container.opened()
    assert guest.call_for_value("cuMemHostAlloc", 512 * MIB, 0)[0] == 0
    for host, index in ((2, 0), (3, 1), (4, 0)):
        assert guest.create(host, index, 512 * MIB) == 0
    assert container.counted() == 0


def test_pools_of_the_host_are_free(start: StartContainer) -> None:
    container = start()
    guest = container.opened()
    for host, index in ((2, 0), (3, 1), (4, 0)):
        assert guest.pool(host, index) == 0
        result, key = guest.take("cuMemAllocFromPoolAsync", 512 * MIB)
        assert result == 0
        assert guest.give(key) == 0
    assert container.counted() == 0


def test_a_managed_pool_is_charged_though_it_starts_on_the_host(start: StartContainer) -> None:
    guest = start().opened()
    assert guest.pool(2, 0, 2) == 0
    assert guest.take("cuMemAllocFromPoolAsync", 512 * MIB)[0] == OUT_OF_MEMORY


def test_a_pool_is_charged_on_its_own_device_whatever_the_stream(start: StartContainer) -> None:
    container = start(num_devices=3)
    first, second = container.board.uuid(0), container.board.uuid(1)
    guest = container.opened(KVARTO_GPU_MEMORY_LIMIT=f"{first}=256MiB,{second}=256MiB")  # the stream is on device 0
    assert guest.default_pool(1) == 0
    assert guest.take("cuMemAllocFromPoolAsync", 192 * MIB)[0] == 0
    assert guest.take("cuMemAllocFromPoolAsync", 192 * MIB)[0] == OUT_OF_MEMORY
    assert guest.pool(1, 2) == 0  # a device without a limit
    assert guest.take("cuMemAllocFromPoolAsync", 512 * MIB)[0] == 0
    assert {device.uuid: device.used_bytes for device in container.account().devices if device.used_bytes} == {
        second.removeprefix("GPU-"): 192 * MIB
    }


def test_a_part_of_a_device_is_the_device(start: StartContainer) -> None:
    container = start(num_devices=2)
    guest = container.opened()
    assert guest.create(6, 0x0301, 20 * MIB) == 0  # locality domain 3 of device 1
    assert guest.create(6, 0x0301, 250 * MIB) == OUT_OF_MEMORY
    assert [device.used_bytes for device in container.account().devices] == [0, 20 * MIB]


def test_the_interface_of_32_bits_is_closed(start: StartContainer) -> None:
    guest = start().opened()
    assert guest.call_for_value("cuMemAlloc", 4096)[0] == 801


def test_devices_have_limits_of_their_own(start: StartContainer) -> None:
    container = start("1GiB", num_devices=3)
    first, second = container.board.uuid(0), container.board.uuid(1)
    guest = container.guest(KVARTO_GPU_MEMORY_LIMIT=f"{first}=100MiB, {second}=50MiB")
    assert guest.init() == 0
    fits = {}
    for device in range(3):
        assert guest.context(device) == 0
        fits[device] = [guest.take("cuMemAlloc", size * MIB)[0] == 0 for size in (40, 40, 40)]
    assert fits == {0: [True, True, False], 1: [True, False, False], 2: [True, True, True]}
    assert [device.used_bytes for device in container.account().devices] == [80 * MIB, 40 * MIB]
