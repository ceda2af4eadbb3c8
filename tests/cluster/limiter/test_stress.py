"""Many processes of many threads, every way to allocate, some killed at random: the card never holds too much."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.fakes.board import MIB
from tests.cluster.limiter.conftest import StartContainer
from tests.cluster.limiter.container import C_FLAGS, FAKES, HERE, LIMITER, Build, Container, compile_c, wide_swap

CONTEXT_BYTES = 40 * MIB


def stress(container: Container, program: Path, processes: int, threads: int, seconds: int) -> dict[str, float]:
    """Run it; check what must hold always; return its counts and times."""
    limit = int(container.env["KVARTO_GPU_MEMORY_LIMIT"])
    container.board.script(context_bytes=CONTEXT_BYTES, watch_bytes=limit)
    container.board.script_driver(fail_every=97)
    results = container.folder / "results"
    results.write_bytes(bytes(4096))
    env = {**container.env, "STRESS_RESULTS": str(results), "KVARTO_GPU_CONTEXT_SIZE": str(CONTEXT_BYTES)}
    pause_us = os.environ.get("KVARTO_STRESS_PAUSE_US", "20000")
    arguments = [str(processes), str(threads), str(seconds), os.environ.get("KVARTO_STRESS_SEED", "1"), pause_us]
    done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=seconds + 120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # a sanitizer would speak here
    answer: dict[str, float] = json.loads(done.stdout)
    truth = container.board.truth()
    assert (truth.num_overshoots, truth.worst_overshoot_bytes) == (0, 0)
    assert container.account().devices[0].peak_bytes <= limit
    assert answer["left_units"] == 0
    assert not any(process.used_bytes for process in container.account().processes)
    assert answer["refused"] > 0  # the limit was reached
    assert all(count > 0 for way, count in answer.items() if way.startswith("cu")), answer
    print(answer)
    return answer


@pytest.fixture
def program(built: Build) -> Path:
    sources = [HERE / "stress.c", HERE / "waits.c", HERE / "ways.c"]
    return compile_c(built.folder / "stress", *sources, f"-L{built.folder}", "-lcuda")


def test_a_few_processes_under_a_tight_limit(start: StartContainer, program: Path) -> None:
    answer = stress(start(str(700 * MIB)), program, processes=8, threads=4, seconds=4)
    assert answer["kills"] > 20


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_64_processes_of_8_threads(start: StartContainer, program: Path) -> None:
    """`KVARTO_STRESS_SECONDS=1200` for the long run. The times hold on a machine that does nothing else; elsewhere
    `KVARTO_STRESS_SHARED=1` leaves them out, and `KVARTO_STRESS_PAUSE_US` makes it gentler."""
    seconds = int(os.environ.get("KVARTO_STRESS_SECONDS", "60"))
    answer = stress(start(str(12_000 * MIB)), program, processes=64, threads=8, seconds=seconds)
    if not os.environ.get("KVARTO_STRESS_SHARED"):
        assert answer["worst_blocked_ms"] < 100
        assert answer["worst_return_ms"] < 100


@pytest.mark.heavy
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(start: StartContainer, tmp_path: Path, sanitize: str) -> None:
    """Limiter, fake and stress as one program, since a sanitizer's own library must come first."""
    sources = [source for source in LIMITER.glob("*.c") if source.name != "interpose.c"]
    folder = tmp_path / "build"
    folder.mkdir()
    rows = (LIMITER / "entries.tsv").read_text().splitlines()
    hooked = sorted(row.split("\t")[:4] for row in rows if not row.startswith("#") and row.split("\t")[1] != "none")
    entries = (f'ENTRY({symbol}, "{base}", {since})\n' for symbol, _, base, since in hooked)
    (folder / "entries.inc").write_text("".join(entries))
    flags = [*C_FLAGS, *wide_swap(), f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", f"-I{folder}", "-O1"]
    fakes = [FAKES / "board.c", *FAKES.glob("cuda_*.c")]
    library = folder / "libcuda.so.1"
    linking = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1,-Bsymbolic"]
    subprocess.run(["cc", *flags, *linking, "-o", library, *fakes], check=True)
    program = folder / "stress"
    own = [HERE / name for name in ("stress.c", "waits.c", "ways.c", "plain_lookup.c")]
    subprocess.run(["cc", *flags, "-o", program, *own, *sources, library, "-ldl"], check=True)
    container = start(str(700 * MIB))
    del container.env["LD_PRELOAD"]
    container.env["LD_LIBRARY_PATH"] = str(folder)
    container.env["TSAN_OPTIONS"] = container.env["ASAN_OPTIONS"] = "halt_on_error=0:detect_leaks=0"
    stress(container, program, processes=6, threads=4, seconds=20)
