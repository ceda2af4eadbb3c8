"""However a program finds the driver's functions, it finds the limiter's, and only those that need one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.cluster.fakes.board import MIB
from tests.cluster.limiter.conftest import StartContainer
from tests.cluster.limiter.container import HERE, OUT_OF_MEMORY, Build, compile_c

OURS = "libkvarto-limiter.so"
DRIVERS = "libcuda.so.1"
PER_THREAD = 2


@pytest.mark.parametrize("name", ["cuMemAlloc_v2", "cuMemFree_v2", "cuGetProcAddress", "cuMemAllocAsync_ptsz"])
def test_dlsym_finds_the_hook(start: StartContainer, name: str) -> None:
    guest = start().guest()
    for way, address in guest.addresses(name).items():
        assert guest.where_is(address) == [OURS, name], way


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemcpyHtoD_v2", "cuMemHostAlloc", "cuStreamSynchronize"])
def test_launches_and_copies_are_the_drivers_own(start: StartContainer, name: str) -> None:
    guest = start().guest()
    assert guest.where_is(guest.addresses(name)["dlsym"]) == [DRIVERS, name]
    for address in guest.proc_address(name.removesuffix("_v2"), 13000)[1::2]:
        assert guest.where_is(address) == [DRIVERS, name]


def test_what_the_driver_lacks_stays_absent(start: StartContainer) -> None:
    guest = start().guest()
    found = guest.addresses("cuArrayCreate")  # hooked, and not in the fake driver
    assert (found["dlsym"], found["dlvsym"]) == (0, 0)
    assert set(guest.addresses("cuNoSuchThing").values()) == {0}


@pytest.mark.parametrize(
    ("base", "version", "flags", "symbol"),
    [
        ("cuMemAlloc", 11080, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 13050, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 14000, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 3000, 0, "cuMemAlloc"),
        ("cuMemAllocAsync", 12000, 0, "cuMemAllocAsync"),
        ("cuMemAllocAsync", 12000, PER_THREAD, "cuMemAllocAsync_ptsz"),
        ("cuCtxCreate", 11080, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
        ("cuGraphInstantiate", 11080, 0, "cuGraphInstantiate_v2"),
        ("cuGraphInstantiate", 12000, 0, "cuGraphInstantiateWithFlags"),
        ("cuDevicePrimaryCtxRelease", 12000, 0, "cuDevicePrimaryCtxRelease_v2"),
        ("cuGetProcAddress", 11080, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuMemGetInfo", 12000, 0, "cuMemGetInfo_v2"),
    ],
)  # fmt: skip
def test_cu_get_proc_address_finds_the_version_that_was_asked_for(
    start: StartContainer, base: str, version: int, flags: int, symbol: str
) -> None:
    guest = start().guest()
    first, one, second, two = guest.proc_address(base, version, flags)
    assert (first, second) == (0, 0)
    assert guest.where_is(one) == guest.where_is(two) == [OURS, symbol]


def test_a_driver_that_gives_out_other_addresses_is_understood_by_name(start: StartContainer) -> None:
    container = start()
    container.board.script_driver(other_addresses=1)
    guest = container.opened()
    _, one, _, two = guest.proc_address("cuMemAlloc", 13000)
    assert guest.where_is(one) == guest.where_is(two) == [OURS, "cuMemAlloc_v2"]
    first, one, second, two = guest.proc_address("cuMemAlloc", 14000)
    assert (first, one, second, two) == (500, 0, 500, 0)  # of a version that nobody knows yet: withheld
    for version, symbol in ((11080, "cuGraphInstantiate_v2"), (12000, "cuGraphInstantiateWithFlags")):
        _, one, _, two = guest.proc_address("cuGraphInstantiate", version)
        assert guest.where_is(one) == guest.where_is(two) == [OURS, symbol]


def test_a_library_that_is_linked_with_the_driver_is_limited(built: Build, start: StartContainer) -> None:
    library = compile_c(built.folder / "liblinked.so", HERE / "linked.c", "-shared", "-fPIC",
                        f"-L{built.folder}", "-lcuda")  # fmt: skip
    guest = start().opened()
    assert guest.deep_bind(str(library), 100 * MIB) == 0
    assert guest.deep_bind(str(library), 200 * MIB) == OUT_OF_MEMORY


def test_without_a_limit_nothing_is_in_the_way(start: StartContainer) -> None:
    container = start()
    guest = container.opened(KVARTO_GPU_MEMORY_LIMIT=None)
    assert guest.where_is(guest.addresses("cuMemAlloc_v2")["dlsym"]) == [DRIVERS, "cuMemAlloc_v2"]
    assert guest.take("cuMemAlloc", 40 << 30)[0] == 0
    assert not container.ledger.exists()


def test_programs_without_cuda_never_load_the_driver(start: StartContainer) -> None:
    env = {**start().env, "LD_DEBUG": "files"}
    done = subprocess.run([shutil.which("true") or "/bin/true"], env=env, capture_output=True, text=True, check=True)
    assert OURS in done.stderr
    assert DRIVERS not in done.stderr


def test_a_driver_that_calls_itself_while_it_is_loaded_does_not_hang(start: StartContainer) -> None:
    container = start()
    env = {**container.env, "KVARTO_FAKE_CALLS_ITSELF": "1"}
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import guest; print(guest.Guest.nvml(None)['v1'][0])"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], env=env, capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == [str(256 * MIB)], done.stderr
