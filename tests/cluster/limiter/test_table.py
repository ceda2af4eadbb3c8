"""Every function of every `cuda.h` is classed, and every class is what the library does."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.limiter.container import LIMITER, Build, wide_swap

CLASSES = {"allocates", "frees", "reports", "resolves", "none"}


def table() -> dict[str, list[str]]:
    lines = (LIMITER / "entries.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: row[1:] for row in rows}


def headers() -> list[Path]:
    """Every `cuda.h` around: of the toolkit, and of the runtime packages that a Python environment may hold."""
    roots = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *Path("/usr/local").glob("cuda-*")]
    packaged = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include/cuda.h")
    found = [*(root / "include/cuda.h" for root in roots), *packaged]
    return sorted({path.resolve() for path in found if path.exists()})


def check(header: Path, entries: Path = LIMITER / "entries.tsv") -> subprocess.CompletedProcess[str]:
    command = ["awk", "-f", str(LIMITER / "check_entries.awk"), str(entries), str(header)]
    return subprocess.run(command, capture_output=True, text=True)


def fake_header(folder: Path, *more: str) -> Path:
    """As many declarations as a real one, in its forms: behind a macro, over several lines, in comments."""
    names = [name for name in table() if not name.endswith(("_v2", "_ptsz"))][:320]
    lines = [f"CUresult CUDAAPI {name}(int x);" for name in names]
    lines += ["#define cuMemAlloc cuMemAlloc_v2", "#define cuMemAllocAsync __CUDA_API_PTSZ(cuMemAllocAsync)"]
    lines += ["/* CUresult CUDAAPI cuInAComment(int x);", " * also over lines CUresult CUDAAPI cuHere(void); */"]
    header = folder / "cuda.h"
    header.write_text("\n".join([*lines, *more]) + "\n")
    return header


def test_a_whole_table_passes(tmp_path: Path) -> None:
    done = check(fake_header(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "0 not classed" in done.stdout


@pytest.mark.parametrize("line", [
    "CUresult CUDAAPI cuMemAllocTurbo(void *p);",
    "    CUresult CUDAAPI cuMemAllocTurbo(void *p); /* inside a block */",
    "#define cuMemAllocFast cuMemAllocTurbo",
    "#define cuMemAlloc __CUDA_API_PTSZ(cuMemAllocTurbo)",
    "CUresult CUDAAPI cuMemAllocTurbo_ptsz(void *p);",
])  # fmt: skip
def test_a_name_that_is_not_classed_fails(tmp_path: Path, line: str) -> None:
    done = check(fake_header(tmp_path, line))
    assert done.returncode == 1
    assert "`cuMemAllocTurbo` is not classed" in done.stdout


def test_something_else_than_the_header_fails(tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text("int main(void);\n")
    assert check(tmp_path / "cuda.h").returncode == 1


def test_a_row_without_a_class_or_a_reason_fails(tmp_path: Path) -> None:
    entries = tmp_path / "entries.tsv"
    for row in ("cuNew\tmaybe\t-\t-\tbecause", "cuNew\tnone\t-\t-\t"):
        entries.write_text((LIMITER / "entries.tsv").read_text() + row + "\n")
        assert check(fake_header(tmp_path), entries).returncode == 1


@pytest.mark.skipif(not headers(), reason="no cuda.h is installed here")
def test_every_function_of_the_installed_headers_is_classed() -> None:
    for header in headers():
        done = check(header)
        assert done.returncode == 0, f"{header}: {done.stdout}"


def test_what_is_classed_is_hooked_and_nothing_else(built: Build) -> None:
    exported = subprocess.run(["nm", "-D", "--defined-only", str(built.limiter)], capture_output=True, text=True)
    symbols = {line.split()[2] for line in exported.stdout.splitlines()}
    rows = table()
    assert {row[0] for row in rows.values()} == CLASSES
    hooked = {name for name, row in rows.items() if row[0] != "none"}
    others = {"dlsym", "dlvsym", "dlopen", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"}
    assert {symbol for symbol in symbols if not symbol.startswith("_")} == hooked | others


def test_the_library_needs_the_c_library_alone(built: Build) -> None:
    needed = subprocess.run(["readelf", "-d", str(built.limiter)], capture_output=True, text=True).stdout
    libraries = set(re.findall(r"NEEDED.*\[(.+?)\]", needed))
    assert all(re.match(r"(libc|libdl|libpthread|ld-linux.*)\.so", library) for library in libraries), libraries
    assert ctypes.CDLL(str(built.limiter)) is not None


LAYOUTS = {
    "CUmemAllocationProp": ("location",),
    "CUmemPoolProps": ("location", "maxSize"),
    "CUDA_ARRAY_DESCRIPTOR": ("Width", "Height", "Format", "NumChannels"),
    "CUDA_ARRAY3D_DESCRIPTOR": ("Width", "Height", "Depth", "Format", "NumChannels", "Flags"),
    "CUDA_MEM_ALLOC_NODE_PARAMS": ("poolProps", "bytesize", "dptr"),
    "CUDA_EXTERNAL_MEMORY_HANDLE_DESC": ("type", "handle", "size", "flags"),
    "CUipcMemHandle": ("reserved",),
    "CUuuid": (),
}
CONSTANTS = (
    "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_FOUND",
    "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT", "CU_MEMPOOL_ATTR_USED_MEM_CURRENT",
    "CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT", "CU_STREAM_CAPTURE_MODE_RELAXED",
    "CU_GRAPH_NODE_TYPE_GRAPH", "CU_GRAPH_NODE_TYPE_MEM_ALLOC", "CUDA_ARRAY3D_SPARSE", "CUDA_ARRAY3D_DEFERRED_MAPPING",
    "CU_LIMIT_MALLOC_HEAP_SIZE", "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR", "CU_MEM_LOCATION_TYPE_DEVICE",
    "CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM", "CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND",
)  # fmt: skip


def measured(header: str, folder: Path) -> str:
    """Sizes, offsets and constants as this header gives them."""
    lines = [f'#include "{header}"', "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    for name, fields in LAYOUTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in fields]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in CONSTANTS]
    source = folder / "layout.c"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run(["cc", "-w", *wide_swap(), str(source), "-o", str(folder / "layout")], check=True)
    return subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not headers(), reason="no cuda.h is installed here")
def test_our_layouts_are_the_drivers(built: Build, tmp_path: Path) -> None:
    ours = measured(str(LIMITER / "cuda_api.h"), tmp_path)
    for header in headers():
        assert ours == measured(str(header), tmp_path), header
