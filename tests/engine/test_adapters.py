"""Adapters in the whole engine: loads, sharing, waiting and leaving, with tokens judged by an oracle."""

from __future__ import annotations

from tests.engine.adapted_engine import AdaptedHarness
from tests.engine.hashed_engine import Shape


def test_requests_of_many_adapters_and_the_base_run_in_one_batch() -> None:
    h = AdaptedHarness(Shape(num_pages=64, max_seqs=8))
    for seed in range(3):
        h.register(f"a{seed}", seed + 1, 2 + seed)
    messages = [(h.add(adapter=f"a{i % 4}" if i % 4 < 3 else None, max_tokens=20), i % 4) for i in range(8)]
    h.run()
    for message, which in messages:
        h.check_adapted(message, (which + 1, 2 + which) if which < 3 else None)
    assert max(len(step) for step in h.steps) == 8
    stats = h.engine.adapters.stats()
    assert stats.num_loads == 3
    assert stats.device_bytes == (2 + 3 + 4) * 16 * 8


def test_an_unknown_adapter_is_refused() -> None:
    h = AdaptedHarness()
    h.register("known", 1, 2)
    message = h.add(adapter="other")
    h.run()
    assert h.refused[message.request_id] == "UnknownAdapter"


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone() -> None:
    h = AdaptedHarness()
    h.register("good", 1, 2)
    h.engine.adapters.register("bad", h.files.put("bad", 2, 2))
    del h.files.contents[h.files.put("bad", 2, 2)]
    bad, good = h.add(adapter="bad", n=2), h.add(adapter="good")
    h.run()
    assert h.refused == {bad.request_id: "AdapterRefused"}
    h.check_adapted(good, (1, 2))
    h.engine.check_empty()
