"""The small structures of the scheduler against plain models: waiting queue, deadlines, seen tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.core.sampling import SamplingParams
from kvarto.engine.deadlines import Deadlines
from kvarto.engine.messages import AddRequest
from kvarto.engine.penalties import SeenTokens, seen_tokens
from kvarto.engine.request import Choice, Status, make_request
from kvarto.engine.waiting import WaitingQueue


def make_choice(priority: int, arrival: int) -> Choice:
    message = AddRequest(request_id=str(arrival), prompt_token_ids=(1,), sampling=SamplingParams(seed=1))
    request = make_request(message, priority=priority, arrival=arrival, max_tokens=4, vocab_size=9, now=0.0)
    return request.choices[0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "take", "cancel", "back"]), st.integers(0, 30)), max_size=200))
def test_the_queue_is_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    queue, model, taken, arrivals = WaitingQueue(), [], [], 0
    for name, number in operations:
        if name == "push":
            arrivals += 1
            choice = make_choice(number % 3, arrivals)
            queue.push(choice)
            model.append(choice)
        elif name == "take" and model:
            choice = queue.head
            queue.remove(choice, Status.RUNNING)
            model.remove(choice)
            taken.append(choice)
        elif name == "cancel" and model:
            choice = model.pop(number % len(model))
            queue.remove(choice, Status.FINISHED)
        elif name == "back" and taken:
            choice = taken.pop(number % len(taken))
            queue.push(choice)
            model.append(choice)
        assert queue.head is min(model, key=lambda each: each.order, default=None)
        assert len(queue) == len(model)
        queue.check()


def test_cancelled_entries_do_not_pile_up() -> None:
    queue = WaitingQueue()
    first = make_choice(0, 0)
    queue.push(first)
    for arrival in range(1, 10_000):
        choice = make_choice(0, arrival)
        queue.push(choice)
        queue.remove(choice, Status.FINISHED)
    assert len(queue._heap) < 200
    assert queue.head is first


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=300), st.integers(0, 110))
def test_deadlines_expire_in_time_and_once(entries: list[tuple[int, int]], now: int) -> None:
    deadlines, live = Deadlines(), {}
    for index, (deadline, ends_at) in enumerate(entries):
        live[str(index)] = deadline
        deadlines.add(str(index), deadline, live)
        if ends_at < 50:
            del live[str(index)]
    expired = [request_id for request_id in deadlines.take_expired(now) if request_id in live]
    assert Counter(expired) == Counter(request_id for request_id, deadline in live.items() if deadline <= now)
    assert deadlines.take_expired(now) == []


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.add(str(index), 1e9, {str(index)})
    assert len(deadlines._heap) < 200


tokens = st.lists(st.integers(0, 30), max_size=300)


@settings(deadline=None)
@given(tokens, tokens, st.booleans())
def test_seen_tokens_count_the_output(prompt: list[int], output: list[int], includes_prompt: bool) -> None:
    seen = SeenTokens(np.array(prompt, dtype=np.int32), includes_prompt=includes_prompt)
    for token in output:
        seen.add(token)
    expected = Counter(output)
    if includes_prompt:
        expected.update(dict.fromkeys(prompt, 0))
    assert len(set(seen.ids.tolist())) == len(seen.ids)
    assert dict(zip(seen.ids.tolist(), seen.output_counts.tolist(), strict=True)) == dict(expected)


def test_without_penalties_nothing_is_counted() -> None:
    prompt = np.array([1, 2], dtype=np.int32)
    assert seen_tokens(SamplingParams(), prompt, [3]) is None
    presence = seen_tokens(SamplingParams(presence_penalty=0.5), prompt, [3])
    assert presence is not None
    assert presence.ids.tolist() == [3]
    repetition = seen_tokens(SamplingParams(repetition_penalty=1.5), prompt, [3])
    assert repetition is not None
    assert repetition.ids.tolist() == [1, 2, 3]
