"""The command line as a person meets it: quick help, one sentence per error, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvarto.cli.flags import ALIASES, flag_parameters
from kvarto.cli.main import run
from kvarto.cli.refused_flags import REFUSED, refuse_foreign
from kvarto.core.errors import BudgetTooSmall, EngineDied, UsageError
from kvarto.engine.config import EngineConfig
from kvarto.server.config import ServerConfig

HELP_CPU_S = 0.3

VLLM_FLAGS = """
gpu-memory-utilization kv-cache-memory-bytes kv-cache-memory max-model-len block-size kv-cache-dtype
num-gpu-blocks-override enforce-eager enable-sleep-mode cpu-offload-gb kv-offloading-size kv-offloading-backend
offload-group-size offload-num-in-group offload-prefetch-step swap-space enable-lora lora-modules max-loras
max-lora-rank max-cpu-loras lora-dtype max-num-seqs max-num-batched-tokens enable-prefix-caching
no-enable-prefix-caching enable-chunked-prefill scheduling-policy stream-interval served-model-name tokenizer revision
download-dir load-format dtype quantization trust-remote-code seed generation-config chat-template config host port uds
api-key root-path allowed-origins ssl-keyfile ssl-certfile enable-request-id-headers enable-force-include-usage
enable-prompt-tokens-details disable-access-log-for-endpoints enable-log-requests max-log-len otlp-traces-endpoint
enable-auto-tool-choice tool-call-parser reasoning-parser kv-events-config kv-cache-metrics kv-cache-metrics-sample
""".split()
SGLANG_FLAGS = """
model-path mem-fraction-static context-length page-size max-running-requests max-queued-requests max-total-tokens
chunked-prefill-size schedule-policy radix-eviction-policy lora-paths max-loras-per-batch max-loaded-loras
lora-eviction-policy enable-lora-overlap-loading enable-metrics
""".split()


def accepted_flags() -> set[str]:
    """All that `kvarto serve` takes."""
    parameters = flag_parameters(EngineConfig) + flag_parameters(ServerConfig)
    names = {parameter.name.replace("_", "-") for parameter in parameters}
    aliases = {alias.removeprefix("--") for group in ALIASES.values() for alias in group}
    return names | aliases | {f"no-{name}" for name in names}


@pytest.mark.parametrize("flag", VLLM_FLAGS + SGLANG_FLAGS)
def test_a_flag_of_other_servers_is_accepted_or_answered(flag: str) -> None:
    assert (flag in accepted_flags()) != (flag in REFUSED)


def test_no_flag_is_both_accepted_and_refused() -> None:
    assert not accepted_flags() & set(REFUSED)


@pytest.mark.parametrize("spelling", ["--swap-space", "--swap_space", "--swap-space=4"])
def test_a_refused_flag_is_named_with_a_reason(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", spelling]) == 2
    shown = capsys.readouterr().err
    assert spelling.partition("=")[0] in shown
    assert "preempted" in shown


def test_what_follows_two_dashes_is_text() -> None:
    refuse_foreign(["generate", "--", "--swap-space"])
    with pytest.raises(UsageError):
        refuse_foreign(["generate", "--swap-space"])


@pytest.mark.parametrize(
    ("tokens", "names"),
    [
        (["frobnicate"], "frobnicate"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "many"], "--port"),
        (["serve", "--device-memory", "8 elephants"], "8 elephants"),
        (["serve", "a", "b"], "`b` is left over"),
        (["serve", "org/none", "--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["serve", "org/none", "--max-num-seqs", "4.5"], "not a whole count"),
        (["serve", "--served-model-name", ""], "--served-model-name"),
        (["plan", "org/none", "--block-size", "12"], "--block-size 12"),
        (["generate", "a", "--model", "org/none", "--dtype", "int8"], "--dtype int8"),
        (["generate", "a", "--model", ""], "there is no folder or file ``"),
        (["bench", "memory"], "--trace"),
        (["bench", "memory", "--trace", "/no/such/file.csv"], "/no/such/file.csv"),
        (["bench", "memory", "--trace", "x", "--plot", "/no/such/waste.png"], "--plot /no/such/waste.png"),
        (["bench", "memory", "--trace", "x", "--json", "/"], "--json /"),
        (["bench", "memory", "--trace", "x", "--num-requests", "0"], "--num-requests 0"),
        (["bench", "serve", "--json", "/no/such/figures.json"], "--json /no/such/figures.json"),
        (["bench", "serve", "--request-rate", "0"], "--request-rate"),
        (["bench", "serve", "--url", "ftp://x"], "ftp://x"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], "kvarto serve"),
        (["chat", "--url", "http://127.0.0.1:9", "--device-memory", "1GiB"], "--device-memory"),
    ],
)
def test_a_wrong_command_line_is_one_message_and_exit_code_2(
    tokens: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tokens) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert names in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 8


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BudgetTooSmall("does not fit; `--device-memory 9GiB` would"), 2),
        (EngineDied("gone"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("ours"), 1),
    ],
)
def test_an_error_of_a_command_becomes_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str) -> None:
        raise error

    monkeypatch.setattr("kvarto.models.hub.resolve", lambda model, say: fail(model))
    assert run(["pull", "demo"]) == code
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert str(error) in shown
    if code not in (0, 130):
        with pytest.raises(type(error)):
            run(["pull", "demo", "-v"])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("command", ["", "serve", "chat", "generate", "plan", "pull", "bench serve"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        f"import sys; from kvarto.cli.main import run; run({[*command.split(), '--help']!r}); "
        "print([m for m in ('torch', 'numpy', 'fastapi', 'aiohttp', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    assert python(code).stdout.endswith("[]\n")


def test_help_answers_at_once() -> None:
    """Within 0.3 s, or, on a machine busy with other things, 2.5 × the import that it can't do without."""
    seconds = min(_cpu_seconds([sys.executable, "-m", "kvarto", "--help"]) for _ in range(5))
    import_seconds = min(_cpu_seconds([sys.executable, "-c", "import cyclopts"]) for _ in range(5))
    assert seconds <= max(HELP_CPU_S, 2.5 * import_seconds)


def _cpu_seconds(command: list[str]) -> float:
    """Of the child alone: a busy machine makes the wall clock say nothing."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert run(["--version"]) == 0
    assert version("kvarto") in capsys.readouterr().out


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["serve"], ["chat"], ["generate"], ["plan"], ["pull"], ["bench", "serve"], ["bench", "memory"]):
        assert run([*command, "--help"]) == 0
        assert f"Usage: kvarto {' '.join(command)}" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_crash(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    command = f"{sys.executable} -m kvarto serve --help 2>{log} | head -1"
    subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.DEVNULL)
    assert "Traceback" not in log.read_text()
