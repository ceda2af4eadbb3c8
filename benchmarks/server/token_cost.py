"""What does the server add to a token? Microseconds of its CPU time per streamed token, the engine's not counted.

`python -m benchmarks.server.token_cost [--model MODEL] [--streams 32] [--tokens 256]`: starts `kvarto serve`, reads so
many streams at once over raw sockets, and divides what the server process used meanwhile by the tokens. Baseline:
sending as many chunks of the same size to as many sockets, which is what the kernel takes for that alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CHUNK_BYTES = 200
START_TIMEOUT_S = 120.0
LIMIT_US = 50.0


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, its children's not counted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server did not become ready within {START_TIMEOUT_S:.0f} s")


async def read_stream(port: int, model: str, num_tokens: int) -> int:
    """One streamed completion; returns its events."""
    body = json.dumps(
        {"model": model, "prompt": "Once upon a time", "max_tokens": num_tokens, "stream": True, "ignore_eos": True,
         "temperature": 1.0}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", ""))
    writer.write(head.encode() + body)
    num_events = 0
    while data := await reader.read(1 << 16):
        num_events += data.count(b"data: {")
    writer.close()
    return num_events


def kernel_cost_us(num_streams: int, num_chunks: int) -> float:
    """CPU time of sending a chunk to a socket, nothing else."""
    pairs = [socket.socketpair() for _ in range(num_streams)]
    chunk = b"x" * CHUNK_BYTES
    before = resource.getrusage(resource.RUSAGE_SELF)
    spent = 0.0
    for _ in range(num_chunks):
        start = time.thread_time()
        for left, _ in pairs:
            left.send(chunk)
        spent += time.thread_time() - start
        for _, right in pairs:
            right.recv(CHUNK_BYTES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime >= before.ru_utime
    for pair in pairs:
        for end in pair:
            end.close()
    return spent / num_streams / num_chunks * 1e6


async def measure(pid: int, port: int, model: str, num_streams: int, num_tokens: int) -> tuple[float, int, float]:
    """Microseconds per token, events, and tokens per second."""
    before, start = cpu_s(pid), time.monotonic()
    events = await asyncio.gather(*(read_stream(port, model, num_tokens) for _ in range(num_streams)))
    total = num_streams * num_tokens
    return (cpu_s(pid) - before) / total * 1e6, sum(events), total / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="more flags for `kvarto serve`, as one string")
    arguments = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "kvarto", "serve", arguments.model, "--port", str(port)]
    command += ["--served-model-name", "bench", *arguments.flags.split()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port)
        asyncio.run(measure(process.pid, port, "bench", arguments.streams, 16))
        rounds = [
            asyncio.run(measure(process.pid, port, "bench", arguments.streams, arguments.tokens))
            for _ in range(arguments.rounds)
        ]
    finally:
        process.terminate()
        process.wait()
    costs = sorted(cost for cost, _, _ in rounds)
    result = {
        "model": arguments.model,
        "streams": arguments.streams,
        "server_us_per_token": round(costs[len(costs) // 2], 1),
        "limit_us": LIMIT_US,
        "kernel_us_per_chunk": round(kernel_cost_us(arguments.streams, 1000), 1),
        "events_per_token": round(sum(e for _, e, _ in rounds) / len(rounds) / arguments.streams / arguments.tokens, 2),
        "tokens_per_s": round(max(rate for _, _, rate in rounds)),
    }
    print(
        f"server: {result['server_us_per_token']} µs of CPU per streamed token ({arguments.streams} streams, "
        f"{result['tokens_per_s']} tokens/s); the kernel's share of sending is about {result['kernel_us_per_chunk']} µs"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
