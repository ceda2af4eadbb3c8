"""One engine in a process of its own: what its plan says, and what it takes from then on.

    python -m tests.acceptance.engine_memory '{"model": "…", "device_memory": 268435456}'

Ends with one line of JSON, or with the refusal. The peak is Linux's (VmHWM), set back when the plan is made, so that
interpreter, libraries and the reading of headers stay out of it.
"""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from kvarto.core.errors import KvartoError
from kvarto.core.sampling import SamplingParams
from kvarto.engine.assemble import build
from kvarto.engine.channel import LocalChannel
from kvarto.engine.config import EngineConfig
from kvarto.engine.engine import Engine
from kvarto.engine.malloc import keep_heap_small
from kvarto.engine.messages import AddRequest, StepOut

PLANNED = "reserve memory"
"""The first phase after the plan."""
FILLS_POOL = 1.5
"""Tokens of the load, as a multiple of what the pages hold: every page is used, and some twice."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes."""

    arena: int
    host: int
    records: int
    """Of the pages that were in use in the end."""
    before: int
    """Resident when the plan was made."""
    loaded: int
    """Peak since then, when the engine was ready and its arena backed."""
    peak: int
    """Peak since then, after the load."""

    @property
    def planned(self) -> int:
        return self.arena + self.host + self.records

    @property
    def taken(self) -> int:
        return self.peak - self.before


def status_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None, f"no {name}"
    return int(match[1]) * 1024


def measure(config: EngineConfig, seed: int) -> EngineMemory:
    """Build, serve a load that fills the pool, and look."""
    before = 0

    def on_phase(name: str) -> None:
        nonlocal before
        if name == PLANNED:
            before = status_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident

    keep_heap_small()
    channel = LocalChannel()
    engine = build(config, channel, on_phase=on_phase)
    loaded = status_bytes("VmHWM")
    serve(engine, channel, random.Random(seed))
    layout, pool = engine.layout, engine.pool
    records = layout.record_bytes * (pool.num_pages - pool.num_free) // pool.num_pages
    return EngineMemory(layout.total_bytes, layout.host_bytes, records, before, loaded, status_bytes("VmHWM"))


def serve(engine: Engine, channel: LocalChannel, rng: random.Random) -> None:
    """Requests of all kinds until the pool was filled; each must be answered."""
    max_len = engine.limits.max_model_len
    num_tokens, num_sent = int(FILLS_POOL * engine.layout.num_cacheable_tokens), 0
    ended: list[str | None] = []
    while num_tokens > 0 or engine.loop.has_work:
        if num_tokens > 0 and len(engine.cache.sequences) < engine.layout.limits.max_seqs:
            length = rng.randrange(1, max_len - 8)
            channel.inbox.append(_request(num_sent, length, engine.limits.vocab_size, rng))
            num_sent, num_tokens = num_sent + 1, num_tokens - length
        engine.loop.step()
        for message in channel.outbox:
            assert not isinstance(message, StepOut) or not message.refused, message
            ended += [out.finish_reason for out in getattr(message, "tokens", ()) if out.finish_reason]
        channel.outbox.clear()
    assert set(ended) <= {"stop", "length"}, f"requests ended otherwise: {set(ended)}"
    assert len(ended) >= num_sent, f"{num_sent} were sent, {len(ended)} choices ended"


def _request(number: int, length: int, vocab_size: int, rng: random.Random) -> AddRequest:
    sampling = SamplingParams(
        max_tokens=rng.randrange(1, 8),
        temperature=rng.choice((0.0, 1.0)),
        n=rng.choice((1, 1, 2)),
        logprobs=rng.choice((None, 5)),
        seed=number,
    )
    prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
    return AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


def main() -> None:
    """Print what was measured."""
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    try:
        print(json.dumps(asdict(measure(config, seed=1))))
    except KvartoError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))


if __name__ == "__main__":
    main()
