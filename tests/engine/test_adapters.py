"""Adapters in the whole engine: loads, sharing, waiting and leaving, with tokens judged by an oracle."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvarto.core.errors import EngineError
from kvarto.core.ids import NO_ADAPTER
from kvarto.core.step import Step
from kvarto.engine.invocation import last_occurrence
from kvarto.engine.loop import STALL_LIMIT_S
from kvarto.engine.messages import AddRequest, Cancel, ListAdapters, LoadAdapter, ResumedChoice, UnloadAdapter
from kvarto.engine.request import Status
from tests.adapters.fake_source import digest_of
from tests.engine.adapted_engine import AdaptedHarness, AdapterShape
from tests.engine.adapted_model import AdaptedBackend
from tests.engine.hashed_engine import Harness, Hooks, Shape

PAGE_BYTES = 16 * 8


@pytest.fixture(autouse=True, params=[True, False], ids=["into pages", "by way of the host"])
def _way_of_loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptedBackend, "are_pages_here", request.param)


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
    assert stats["num_adapter_loads"] == 3
    assert stats["adapter_device_bytes"] == (2 + 3 + 4) * PAGE_BYTES


def test_distinct_adapters_of_each_step_are_counted() -> None:
    steps: list[Step] = []
    h = AdaptedHarness(Shape(num_pages=64, max_seqs=4), Hooks(before_run=steps.append))
    for seed in range(3):
        h.register(f"a{seed}", seed + 1, 2)
    for index in range(9):
        h.add(adapter=f"a{index % 3}" if index % 4 else None, max_tokens=3 + index)
    h.run()
    distinct = [set(step.adapters.tolist()) - {NO_ADAPTER} for step in steps if step.adapters is not None]
    traffic = h.engine.adapters.traffic
    assert (traffic.num_steps, traffic.num_adapters) == (len(distinct), sum(map(len, distinct)))
    assert max(map(len, distinct)) == 3


def test_adapters_that_are_partly_equal_cost_their_difference() -> None:
    h = AdaptedHarness(Shape(num_pages=64))
    h.register("a", 3, 7)
    h.register("b", 6, 7)  # of the same family: every other page is equal
    h.register("c", 9, 9)
    for name, content, num_pages in (("a", (3, 7), 7), ("b", (6, 7), 7 + 4), ("c", (9, 9), 7 + 4 + 6)):
        _run(h, message := h.add(adapter=name))
        h.check_adapted(message, content)
        assert h.engine.adapters.stats()["adapter_device_bytes"] == num_pages * PAGE_BYTES
    h.inbox.append(UnloadAdapter(request_id="m", name="a"))
    _run(h, message := h.add(adapter="b"))
    h.check_adapted(message, (6, 7))
    for name in ("b", "c"):
        h.inbox.append(UnloadAdapter(request_id=name, name=name))
    h.round(3)
    assert h.engine.adapters.stats()["adapter_device_bytes"] == 0


def test_steps_without_adapters_carry_none_though_adapters_are_resident() -> None:
    steps: list[Step] = []
    h = AdaptedHarness(hooks=Hooks(before_run=steps.append))
    h.register("a", 1, 2)
    h.add(adapter="a")
    h.run()
    assert all(step.adapters is not None for step in steps)
    steps.clear()
    h.add()
    h.run()
    assert all(step.adapters is None and step.adapter_starts is None for step in steps)
    steps.clear()
    h.add(adapter="a")
    h.add()
    h.run()
    both = next(step for step in steps if step.num_seqs == 2)
    assert both.adapters is not None
    assert sorted(both.adapters.tolist()) == [NO_ADAPTER, 0]


def test_others_decode_while_an_adapter_loads() -> None:
    h = AdaptedHarness(adapters=AdapterShape(call_duration_s=lambda: 0.05, deadline_s=10.0))
    h.register("slow", 1, 4)
    waiting, running = h.add(adapter="slow"), h.add(max_tokens=100)
    h.round(30)
    assert len(h.heard[running.request_id, 0].tokens) >= 28
    assert (waiting.request_id, 0) not in h.heard
    h.run()
    h.check_adapted(waiting, (1, 4))
    h.check_adapted(running, None)


def test_an_unknown_adapter_is_refused_and_so_is_any_where_none_are_served() -> None:
    h = AdaptedHarness()
    h.register("known", 1, 2)
    message = h.add(adapter="other")
    h.run()
    assert h.refused[message.request_id] == "UnknownAdapter"
    plain = Harness()
    message = plain.add(adapter="other")
    plain.run()
    assert plain.refused[message.request_id] == "UnknownAdapter"


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone() -> None:
    h = AdaptedHarness()
    h.register("good", 1, 2)
    h.register("bad", 2, 2)
    h.files.contents.clear()
    h.files.put("good", 1, 2)
    bad, good = h.add(adapter="bad", n=2), h.add(adapter="good")
    h.run()
    assert h.refused == {bad.request_id: "AdapterRefused"}
    h.check_adapted(good, (1, 2))
    h.engine.check_empty()


def test_an_adapter_that_leaves_no_room_for_its_sequence_is_refused_with_sizes() -> None:
    h = AdaptedHarness(Shape(num_pages=20, max_context=256))
    h.register("big", 1, 19)
    message = h.add(adapter="big", num_prompt_tokens=40)
    h.run()
    assert h.refused == {message.request_id: "ContextLengthExceeded"}
    assert h.engine.adapters.stats()["num_adapter_loads"] == 0
    small = h.add(adapter="big", num_prompt_tokens=10, max_tokens=5)
    h.run()
    h.check_adapted(small, (1, 19))


def test_an_adapter_beyond_what_floors_leave_is_refused_with_both_numbers() -> None:
    h = AdaptedHarness(Shape(num_pages=20), adapters=AdapterShape(kv_floor_pages=12))
    h.register("big", 1, 9)
    h.register("fits", 2, 8)
    big, fits = h.add(adapter="big"), h.add(adapter="fits")
    h.run()
    assert h.refused == {big.request_id: "AdapterRefused"}
    h.check_adapted(fits, (2, 8))


def test_a_floor_keeps_adapters_though_kv_would_take_their_pages() -> None:
    h = AdaptedHarness(Shape(num_pages=24, max_seqs=2), adapters=AdapterShape(adapter_floor_pages=6))
    h.register("kept", 1, 6)
    _run(h, h.add(adapter="kept"))
    for _ in range(8):
        _run(h, h.add(num_prompt_tokens=120, max_tokens=40))
    stats = h.engine.adapters.stats()
    assert (stats["num_adapter_evictions"], stats["adapter_device_bytes"]) == (0, 6 * PAGE_BYTES)
    _run(h, message := h.add(adapter="kept"))
    h.check_adapted(message, (1, 6))
    assert h.engine.adapters.stats()["num_adapter_loads"] == 1


def test_adapters_and_kv_push_each_other_out_of_one_pool() -> None:
    h = AdaptedHarness(Shape(num_pages=24, max_seqs=2))
    for seed in range(6):
        h.register(f"a{seed}", seed, 6)
    for turn in range(12):
        message = h.add(adapter=f"a{turn % 6}", num_prompt_tokens=60, max_tokens=30)
        h.run()
        h.check_adapted(message, (turn % 6, 6))
    stats = h.engine.adapters.stats()
    assert stats["num_adapter_evictions"] > 0
    assert h.engine.pool.num_held == 0


def test_kv_of_one_adapter_serves_neither_another_nor_the_base_but_an_equal_one() -> None:
    h = AdaptedHarness(Shape(num_pages=64))
    h.register("a", 1, 2)
    h.register("b", 2, 2)
    h.register("same", 1, 2)
    prompt = tuple(range(10, 74))
    first = h.add(adapter="a", prompt_token_ids=prompt)
    h.run()
    for name, content, num_cached in (("b", (2, 2), 0), (None, None, 0), ("same", (1, 2), 48), ("a", (1, 2), 48)):
        message = h.add(adapter=name, prompt_token_ids=prompt)
        h.run()
        h.check_adapted(message, content)
        assert h.heard[message.request_id, 0].outputs[0].num_cached_tokens >= num_cached
        assert num_cached or h.heard[message.request_id, 0].outputs[0].num_cached_tokens == 0
    assert h.engine.adapters.stats()["num_adapter_loads"] == 2, "equal contents were loaded twice"
    h.check_adapted(first, (1, 2))


def test_a_replaced_adapter_serves_new_requests_while_old_ones_finish_on_the_old_one() -> None:
    h = AdaptedHarness(Shape(max_seqs=2))
    h.register("a", 1, 2)
    old = h.add(adapter="a", max_tokens=60)
    h.round(20)
    h.files.put("a", 2, 3)
    h.inbox.append(LoadAdapter(request_id="m", name="a", path="a"))
    h.round(3)
    assert h.answers["m"].error is None
    new = h.add(adapter="a")
    h.run()
    h.check_adapted(old, (1, 2))
    h.check_adapted(new, (2, 3))
    assert h.engine.adapters.stats()["adapter_device_bytes"] == 3 * PAGE_BYTES, "the old version is still on the device"


def test_a_request_that_has_not_begun_goes_on_with_files_that_changed_unnoticed() -> None:
    h = AdaptedHarness()
    h.register("a", 1, 2)
    h.inbox.append(LoadAdapter(request_id="m", name="a", path="a"))
    h.round(3)
    h.files.contents.clear()
    h.files.put("a", 2, 3)
    message = h.add(adapter="a")
    h.run()
    h.check_adapted(message, (2, 3))


def test_an_unloaded_adapter_finishes_its_requests_and_leaves_all_tiers() -> None:
    h = AdaptedHarness(adapters=AdapterShape(host_pages=16))
    h.register("a", 1, 2)
    old = h.add(adapter="a", max_tokens=60)
    h.round(20)
    h.inbox.append(UnloadAdapter(request_id="m", name="a"))
    new = h.add(adapter="a")
    h.round(2)
    assert h.answers["m"].adapters[0].tier == "device"
    assert h.refused == {new.request_id: "UnknownAdapter"}
    h.run()
    h.check_adapted(old, (1, 2))
    stats = h.engine.adapters.stats()
    assert (stats["adapter_device_bytes"], stats["adapter_host_bytes"]) == (0, 0)
    assert h.engine.pool.num_evictable == 0, "KV of an adapter that is gone is kept"
    h.inbox.append(UnloadAdapter(request_id="again", name="a"))
    h.round(2)
    assert h.answers["again"].error == "UnknownAdapter"


def test_a_list_says_where_each_adapter_is() -> None:
    h = AdaptedHarness(adapters=AdapterShape(host_pages=16))
    for name, seed in (("used", 1), ("never", 2)):
        h.register(name, seed, 2)
    h.add(adapter="used")
    h.run()
    h.inbox.append(ListAdapters(request_id="m"))
    h.round()
    used, never = h.answers["m"].adapters
    assert (used.name, used.tier, used.num_pages, used.parent) == ("used", "device", 2, "base")
    assert (never.tier, never.num_pages, never.digest) == ("disk", None, None)
    assert used.digest is not None


def test_a_line_of_large_adapters_makes_none_of_them_late() -> None:
    """The deadline of a read, 0.5 s, begins with it."""
    shape = AdapterShape(pages_per_copy=3, filling_pages=4, call_duration_s=lambda: 0.2)
    h = AdaptedHarness(Shape(num_pages=64), adapters=shape)
    for seed in range(1, 5):
        h.register(f"a{seed}", seed, 3)
        h.inbox.append(LoadAdapter(request_id=f"m{seed}", name=f"a{seed}", path=f"a{seed}"))
        h.run()
        h.clock.advance(0.3)
        h.round(2)
    messages = [(h.add(adapter=f"a{seed}"), seed) for seed in range(1, 5)]
    h.run(4000)
    for message, seed in messages:
        h.check_adapted(message, (seed, 3))


def test_small_adapters_do_not_pass_a_large_one_for_whose_read_there_is_no_room() -> None:
    h = AdaptedHarness(Shape(num_pages=64), adapters=AdapterShape(filling_pages=3, call_duration_s=lambda: 0.01))
    sizes = (1, 4, 1, 1, 1, 1)
    for seed, num_pages in enumerate(sizes, 1):
        h.register(f"a{seed}", seed, num_pages)
        h.inbox.append(LoadAdapter(request_id=f"m{seed}", name=f"a{seed}", path=f"a{seed}"))
    h.round(200)
    messages = [h.add(adapter=f"a{seed}", max_tokens=2) for seed, _ in enumerate(sizes, 1)]
    h.run()
    served = list(dict.fromkeys(name for step in h.steps for name in step))
    assert served == [message.request_id for message in messages]


def test_nobody_waits_for_his_turn_behind_a_read_that_hangs_for_good() -> None:
    durations = iter([0.0, 0.0])  # both are opened
    shape = AdapterShape(staging_pages=8, filling_pages=4, call_duration_s=lambda: next(durations, 1e9))
    h = AdaptedHarness(Shape(num_pages=64), adapters=shape)
    for seed, name in enumerate("ab", 1):
        h.register(name, seed, 4)
        h.inbox.append(LoadAdapter(request_id=name, name=name, path=name))
    h.round(3)
    for name in "ab":
        h.add(adapter=name)
        h.run()
    assert list(h.refused.values()) == ["TransferFailed", "TransferFailed"]


def test_a_write_of_pages_that_hangs_for_good_ends_the_engine_when_others_need_them() -> None:
    """As a copy of KV does: a thread may still write them, and a fresh engine has pages of its own."""
    durations = iter([0.0] if AdaptedBackend.are_pages_here else [0.0, 0.0])  # it is opened, and read
    shape = AdapterShape(pages_per_copy=5, call_duration_s=lambda: next(durations, 1e9))
    h = AdaptedHarness(Shape(num_pages=16), adapters=shape)
    h.register("a", 1, 5)
    lost = h.add(adapter="a")
    h.run()
    assert h.refused == {lost.request_id: "TransferFailed"}
    h.add(200, max_tokens=20)
    h.round(20)
    h.clock.advance(STALL_LIMIT_S - 1)
    h.round()
    h.clock.advance(1)
    with pytest.raises(EngineError, match=r"no step in \d+ s, though 1 choices run"):
        h.round()
    assert h.engine.scheduler.requests, "who waited is not refused, but resumed on a fresh engine"


@pytest.mark.parametrize("num_rounds", range(8))
def test_a_cancel_in_any_state_leaves_nothing(num_rounds: int) -> None:
    h = AdaptedHarness(adapters=AdapterShape(call_duration_s=lambda: 0.0015))
    h.register("a", 1, 3)
    message = h.add(adapter="a", n=3, max_tokens=50)
    h.round(num_rounds)
    h.inbox.append(Cancel(message.request_id))
    h.run()
    for _ in range(20):
        h.round()
    h.engine.check_empty()
    assert not h.engine.parts.parking.choices


def test_many_waiting_adapters_never_stop_the_engine_in_a_small_pool() -> None:
    h = AdaptedHarness(Shape(num_pages=16, max_seqs=4, max_context=96))
    for seed in range(8):
        h.register(f"a{seed}", seed, 5)
    messages = [(h.add(adapter=f"a{i % 8}", num_prompt_tokens=30 + i, max_tokens=20), i % 8) for i in range(24)]
    h.run(6000)
    for message, seed in messages:
        h.check_adapted(message, (seed, 5))


def test_a_load_is_wanted_once_for_all_that_wait_and_the_queue_keeps_its_order() -> None:
    h = AdaptedHarness(Shape(max_seqs=1), adapters=AdapterShape(call_duration_s=lambda: 0.002))
    h.register("a", 1, 3)
    messages = [h.add(adapter="a", max_tokens=3) for _ in range(5)]
    h.round()
    states = [choice.status for request in h.engine.scheduler.requests.values() for choice in request.choices]
    assert states == [Status.PARKED] * 5
    h.run()
    assert h.engine.adapters.stats()["num_adapter_loads"] == 1
    served = list(dict.fromkeys(name for step in h.steps for name in step))
    assert served == [message.request_id for message in messages]


def test_whoever_would_wait_too_long_for_an_adapter_is_refused_at_once_and_told_when_to_come_again() -> None:
    h = AdaptedHarness(
        Shape(num_pages=64, max_seqs=8), adapters=AdapterShape(call_duration_s=lambda: 0.1, max_adapter_wait_s=0.5)
    )
    for index in range(40):
        h.register(f"a{index}", index + 1, 1)
    _run(h, h.add(adapter="a0", max_tokens=2))
    for index in range(1, 7):
        _run(h, h.add(adapter=f"a{index}", max_tokens=2))
    assert not h.refused, "whoever comes to an empty line waits for nobody"
    asked = [h.add(adapter=f"a{index % 40}", max_tokens=2) for index in range(7, 47)]
    taken = h.add(adapter="a30", max_tokens=2, is_taken=True)
    h.run()
    assert set(h.refused.values()) == {"Overloaded"}
    assert 5 < len(h.refused) < 38
    refusal = next(each for each in h.refusals if each.error == "Overloaded")
    assert (refusal.code, refusal.param) == ("adapter_wait_too_long", "model")
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1
    assert taken.request_id not in h.refused, "it was taken before"
    refused = [message for message in asked if message.request_id in h.refused]
    assert refused == asked[len(asked) - 7 - len(refused) : -7], "the last of those whose adapter is not there"
    _run(h, again := h.add(adapter=refused[0].adapter))
    assert again.request_id not in h.refused, "the line is empty again"


def _alora(h: AdaptedHarness, prompt: list[int]) -> AddRequest:
    return h.add(adapter="a", prompt_token_ids=tuple(prompt), max_tokens=8)


def test_an_adapter_that_is_called_by_tokens_begins_at_their_last_place_and_nowhere_without_them() -> None:
    h = AdaptedHarness(Shape(num_pages=64))
    h.register("a", 1, 2)
    h.files.invocation[1] = (7, 8)
    filler = list(range(20, 60))
    for prompt, start in (
        ([*filler, 7, 8, 30], 40),
        ([*filler, 7, 8, 30, 7, 8, 31, 32], 43),
        ([*filler, 7, 8, 30, 33], 40),
        ([*filler, 7, 30], 1 << 20),
    ):
        h.check_adapted(_run(h, _alora(h, prompt)), (1, 2), start)
    h.check_adapted(_run(h, h.add(prompt_token_ids=(*filler, 7, 30))), None)


def test_what_the_base_computed_before_the_call_is_not_computed_again_and_the_other_way_round() -> None:
    h = AdaptedHarness(Shape(num_pages=64))
    h.register("a", 1, 2)
    h.files.invocation[1] = (7, 8)
    document = list(range(20, 60))
    h.check_adapted(_run(h, h.add(prompt_token_ids=tuple(document))), None)
    called = [*document, 7, 8, 30]
    for prompt, num_cached in ((called, 32), ([*called, 33], 43), ([*document[:30], 7, 8], 30)):
        h.check_adapted(_run(h, message := _alora(h, prompt)), (1, 2), prompt.index(7))
        assert h.heard[message.request_id, 0].outputs[0].num_cached_tokens == num_cached
    h.check_adapted(_run(h, message := h.add(prompt_token_ids=(*document[:30], 7, 8, 9))), None)
    assert h.heard[message.request_id, 0].outputs[0].num_cached_tokens == 30


def _run(h: AdaptedHarness, message: AddRequest) -> AddRequest:
    h.run()
    return message


def test_the_last_occurrence_is_that_of_a_plain_search() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        prompt = rng.integers(0, 3, rng.integers(1, 30)).astype(np.int32)
        tokens = tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist())
        places = [i for i in range(len(prompt)) if tuple(prompt[i : i + len(tokens)].tolist()) == tokens]
        assert last_occurrence(prompt, tokens) == (places[-1] if places else None)


def test_choices_that_began_elsewhere_go_on_with_the_content_that_they_began_with_and_no_other() -> None:
    h = AdaptedHarness()
    h.register("a", 1, 2)
    whole = _run(h, h.add(adapter="a", max_tokens=12))
    heard = h.heard[whole.request_id, 0]
    assert heard.outputs[0].adapter_digest == digest_of(1).hex()
    begun = (ResumedChoice(0, tuple(heard.tokens[:5])),)
    for digest, name in ((digest_of(1), "same"), (digest_of(2), "other")):
        h.inbox.append(msgspec.structs.replace(whole, request_id=name, resumed=begun, adapter_digest=digest.hex()))
    h.run()
    assert h.heard["same", 0].tokens == heard.tokens[5:]
    assert h.refused == {"other": "EngineError"}
    assert ("other", 0) not in h.heard


def test_a_large_adapter_gets_its_pages_though_small_ones_keep_coming() -> None:
    h = AdaptedHarness(Shape(num_pages=24, max_seqs=4, max_context=96))
    for index in range(4):
        h.register(f"small{index}", index + 1, 3)
    h.register("large", 9, 14)
    for index in range(8):
        h.add(adapter=f"small{index % 4}", num_prompt_tokens=30, max_tokens=30)
    h.round(5)
    large = h.add(adapter="large", max_tokens=5)
    for turn in range(600):
        if turn % 6 == 0:
            h.add(adapter=f"small{turn % 4}", num_prompt_tokens=30, max_tokens=30)
        h.round()
        if (large.request_id, 0) in h.heard:
            break
    assert (large.request_id, 0) in h.heard, "the large one starved"
    h.run(6000)
    h.check_adapted(large, (9, 14))


def test_a_repeated_step_keeps_its_adapters() -> None:
    h = AdaptedHarness()
    h.register("a", 1, 2)
    messages = [h.add(adapter="a", max_tokens=60), h.add(max_tokens=60)]
    h.run()
    h.check_adapted(messages[0], (1, 2))
    h.check_adapted(messages[1], None)
