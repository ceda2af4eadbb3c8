"""The commands on a real, tiny model: plan, generate, chat and bench serve, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvarto.cli.local_server import local_server
from kvarto.cli.main import run
from kvarto.core.errors import UsageError
from tests.server.tiny_model import write_tiny_model

BUDGET = ["--device-memory", "32MiB", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
END_S = 20.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_plan_says_by_its_exit_code_whether_it_fits(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", tiny, *BUDGET]) == 0
    shown = capfd.readouterr().out
    assert "weights" in shown
    assert "32.00MiB" in shown
    assert run(["plan", tiny, "--device-memory", "64KiB"]) == 1
    assert "--device-memory" in capfd.readouterr().out
    assert run(["plan", tiny, "--block-size", "17"]) == 2


def test_what_a_refused_plan_suggests_works(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", tiny, "--device-memory", "64KiB"]) == 1
    suggestion = capfd.readouterr().out.partition("What would work: ")[2].split("`")[1]
    assert run(["plan", tiny, *suggestion.split()]) == 0


def test_generate_prints_the_text_and_repeats_itself_with_a_seed(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "Hello", "--model", tiny, *BUDGET, "--max-tokens", "8", "--seed", "5", "--json"]
    outputs = []
    for _ in range(2):
        assert run([*command, "--n", "2"]) == 0
        outputs.append(json.loads(capfd.readouterr().out))
    assert outputs[0] == outputs[1]
    assert [len(choice["token_ids"]) <= 8 for choice in outputs[0]["outputs"]] == [True, True]
    assert outputs[0]["outputs"][0]["token_ids"] != outputs[0]["outputs"][1]["token_ids"]


def test_a_server_of_our_own_answers_a_load_and_ends_with_us(tiny: str, tmp_path: Path) -> None:
    written = tmp_path / "load.json"
    with local_server([tiny, *BUDGET]) as url:
        load = ["--num-prompts", "6", "--input-len", "9", "--output-len", "4", "--max-concurrency", "3"]
        assert run(["bench", "serve", "--url", url, *load, "--json", str(written)]) == 0
    figures = json.loads(written.read_text())
    assert (figures["num_failed"], figures["num_prompt_tokens"], figures["num_output_tokens"]) == (0, 54, 24)
    assert not Path(url.removeprefix("unix:")).exists()


def test_a_model_that_cannot_be_served_is_an_error_and_leaves_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="exit code 2"), local_server(["/no/such/model"]):
        pass
    assert "/no/such/model" in capfd.readouterr().err
    assert subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "/no/such/model"], check=False).returncode == 1


def test_the_server_ends_when_its_parent_is_killed(tiny: str) -> None:
    code = (
        "import sys, time; from kvarto.cli.local_server import local_server\n"
        f"with local_server({[tiny, *BUDGET]!r}) as url: print(url, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    path = parent.stdout.readline().strip().removeprefix("unix:")
    assert _servers(path)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + END_S
    while _servers(path) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not _servers(path)


def _servers(path: str) -> list[str]:
    return subprocess.run(["pgrep", "-f", path], capture_output=True, text=True, check=False).stdout.split()
