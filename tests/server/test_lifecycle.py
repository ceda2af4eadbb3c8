"""A server process from bind to exit: what it says, how it refuses to start, how it drains, how it ends at once."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from kvarto.core.errors import UsageError
from kvarto.engine.config import EngineConfig
from kvarto.engine.messages import Ready
from kvarto.server.config import ServerConfig
from kvarto.server.listening import ListeningSocket
from kvarto.server.startup import Phases, capacity_line
from tests.server.process import serving
from tests.server.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return EngineConfig(model=str(folder), threads=1, max_num_seqs=4)


class LongStream(threading.Thread):
    """A client that reads a long stream in the background."""

    def __init__(self, client: httpx.Client, max_tokens: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.has_begun = threading.Event()
        self._client = client
        self._body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}

    def run(self) -> None:
        try:
            with self._client.stream("POST", "/v1/completions", json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
                    self.has_begun.set()
        except httpx.HTTPError as error:
            self.error = error


def test_start_drain_and_exit(tmp_path: Path, engine: EngineConfig) -> None:
    with serving(tmp_path, engine) as up, httpx.Client(base_url=up.url) as client:
        said = up.text
        assert re.search(r"^  load weights +\d+\.\d s$", said, re.MULTILINE)
        assert re.search(r"^CPU KV cache size: [\d,]+ tokens, Maximum concurrency for 2,048 tokens per request: ", said,
                         re.MULTILINE)  # fmt: skip
        if shutil.which("curl"):
            command = next(line for line in said.splitlines() if line.startswith("curl "))
            answer = subprocess.run(command, shell=True, capture_output=True, check=True, timeout=60).stdout
            assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"
        refuse_the_same_port(tmp_path, engine, int(up.url.rpartition(":")[2]))
        stream = LongStream(client, max_tokens=600)
        stream.start()
        assert stream.has_begun.wait(30)
        up.process.send_signal(signal.SIGTERM)
        up.wait_for("finishing 1 requests")
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        stream.join(60)
        assert stream.lines[-2:] == ["data: [DONE]", ""]
        assert up.process.wait(20) == 0
        assert up.text.count("\n") <= said.count("\n") + 1  # it was silent in between


def refuse_the_same_port(tmp_path: Path, engine: EngineConfig, port: int) -> None:
    """Said before the model is even looked at."""
    folder = tmp_path / "second"
    folder.mkdir()
    with serving(folder, engine, ServerConfig(port=port)) as second:
        assert second.process.wait(60) == 1
        assert second.text.strip() == (
            f"UsageError: port {port} on 127.0.0.1 is in use; stop who uses it, or choose another, such as "
            f"`--port {port + 1}`"
        )


def test_a_second_signal_ends_at_once(tmp_path: Path, engine: EngineConfig) -> None:
    path = tmp_path / "kvarto.sock"
    config = ServerConfig(uds=str(path), served_model_name=("small", "tiny"))
    with serving(tmp_path, engine, config) as up:
        assert up.url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(base_url="http://x", transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["small", "tiny"]
            stream = LongStream(client, max_tokens=2000)
            stream.start()
            assert stream.has_begun.wait(30)
            up.process.send_signal(signal.SIGTERM)
            up.wait_for("finishing 1 requests")
            up.process.send_signal(signal.SIGINT)
            started_s = time.monotonic()
            assert up.process.wait(20) == 0
            assert time.monotonic() - started_s < 10
            stream.join(20)
            assert "data: [DONE]" not in stream.lines
        assert not path.exists()


def test_what_cannot_start_says_why_in_one_line(tmp_path: Path, engine: EngineConfig) -> None:
    tiny = engine.model
    unreadable = write_tiny_model(tmp_path / "unreadable")
    (unreadable / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    for number, (config, error) in enumerate(
        [
            (EngineConfig(model=str(tmp_path / "nothing")), "UsageError"),
            (EngineConfig(model=tiny, device_memory=1000, threads=1), "BudgetTooSmall"),
            (EngineConfig(model=str(unreadable), threads=1), "BadFile: the model's chat template does not parse"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serving(folder, config) as up:
            assert up.process.wait(90) == 1
            assert up.text.strip().splitlines()[-1].startswith(f"{error}")
            assert "Traceback" not in up.text


def test_a_signal_while_loading_ends_it(tmp_path: Path, engine: EngineConfig) -> None:
    with serving(tmp_path, engine) as up:
        up.wait_for("find ")
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(30) == 0
        assert "Traceback" not in up.text


def test_addresses_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for config, text in (
        (ServerConfig(port=70000), "not a TCP port"),
        (ServerConfig(host="host.invalid"), "not an address"),
        (ServerConfig(uds=str(tmp_path / "file")), "not a socket"),
    ):
        with pytest.raises(UsageError, match=text):
            ListeningSocket(config)
    nowhere = ListeningSocket(ServerConfig(uds=str(tmp_path / "no" / "folder")))
    with pytest.raises(UsageError, match="cannot be used"):
        nowhere.listen()
    nowhere.close()


def test_a_stale_socket_file_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "socket"))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "socket"))
    first = ListeningSocket(config)
    first.listen()
    with pytest.raises(UsageError, match="another server"):
        ListeningSocket(config)
    first.close()
    assert not (tmp_path / "socket").exists()


def test_the_capacity_line_is_vllms_letter_for_letter() -> None:
    ready = Ready(
        model_name="m", fingerprint="f", vocab_size=10, max_model_len=8192, page_size=16, num_pages=768,
        max_concurrency=1.5, layout="", phases=(),
    )  # fmt: skip
    want = " KV cache size: 12,288 tokens, Maximum concurrency for 8,192 tokens per request: 1.50x"
    assert capacity_line(ready, "cpu") == "CPU" + want
    assert capacity_line(ready, "cuda:0") == "GPU" + want


def test_phases_are_told_with_seconds() -> None:
    said: list[str] = []
    now = iter([0.0, 0.0, 1.25, 1.25, 3.0, 3.5])
    phases = Phases(said.append, lambda: next(now))
    phases.begin("find")
    phases.begin("read")
    phases.end()
    assert said == ["  find                1.2 s", "  read                1.8 s"]
    assert phases.total_s == 3.5


def test_a_bar_is_drawn_on_a_terminal_and_wiped_off_again() -> None:
    said: list[str] = []
    terminal = io.StringIO()
    phases = Phases(said.append, lambda: 0.0, terminal)
    phases.begin("load weights")
    phases.advance(0.5)
    assert terminal.getvalue() == "\r  load weights     " + "█" * 15 + "·" * 15 + "  50%"
    phases.begin("warm up")
    assert terminal.getvalue().endswith("\r\x1b[K"), "wiped before the line with the seconds comes"
    assert said == ["  load weights        0.0 s"]
    before = terminal.getvalue()
    phases.end()
    assert terminal.getvalue() == before


def test_a_log_has_no_bars(capfd: pytest.CaptureFixture[str]) -> None:
    phases = Phases(lambda line: None)
    phases.begin("load weights")
    phases.advance(0.5)
    phases.end()
    assert capfd.readouterr() == ("", "")
