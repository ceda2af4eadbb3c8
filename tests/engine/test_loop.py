"""The loop: heartbeat, suspects named in time, ends, cancels in every state, faults of the backend, resumption."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvarto.core.errors import EngineError
from kvarto.core.step import Step
from kvarto.engine.loop import HEARTBEAT_S, STALL_LIMIT_S
from kvarto.engine.messages import Cancel, ResumedChoice, Shutdown, Stats, StatsRequest, StepOut
from tests.engine.fake_model import Oracle
from tests.engine.hashed_engine import EOS, Harness, Hooks, Shape

SLOW = Shape(max_tokens=16, num_pages=64)


def test_an_idle_engine_says_each_second_that_it_lives() -> None:
    harness = Harness()
    for _ in range(12):
        assert harness.engine.loop.step()
    assert 10 <= len(harness.frames) <= 12
    assert all(frame == StepOut(step=0) for frame in harness.frames)
    assert harness.clock.now() == pytest.approx(1000 + 12 * HEARTBEAT_S, abs=HEARTBEAT_S)


def test_who_is_on_board_is_said_before_the_step_runs() -> None:
    said: list[tuple[str, ...] | None] = []

    def look(_: Step) -> None:
        last = harness.frames[-1]
        assert isinstance(last, StepOut)
        said.append(last.running)

    harness = Harness(hooks=Hooks(before_run=look))
    harness.add(10, max_tokens=3)
    harness.add(10, max_tokens=5, n=2)
    harness.run()
    assert said[0] == ("r1", "r2")
    assert said[-1] == ("r2",)
    assert None not in said
    steps = [frame.step for frame in harness.frames if isinstance(frame, StepOut)]
    assert steps == sorted(steps)
    assert steps[-1] == len(said)


def test_of_most_tokens_nothing_is_said_but_what_they_are() -> None:
    """The first output and the last say more, as do all with log-probabilities and those of further choices."""
    harness = Harness()
    plain, wordy = harness.add(10, max_tokens=6), harness.add(10, max_tokens=6, logprobs=1)
    forked = harness.add(10, max_tokens=6, n=2)
    harness.run()
    steps = [frame for frame in harness.frames if isinstance(frame, StepOut)]
    going_on = [request_id for step in steps for request_id in step.going_on]
    full = [(out.request_id, out.choice) for step in steps for out in step.tokens]
    assert [going_on.count(each.request_id) for each in (plain, wordy, forked)] == [4, 0, 4]
    assert [full.count((each.request_id, 0)) for each in (plain, wordy, forked)] == [2, 6, 2]
    assert full.count((forked.request_id, 1)) == 6
    for message in (plain, wordy, forked):
        harness.check_tokens(message)


def test_shutdown_ends_the_loop_at_once() -> None:
    harness = Harness()
    harness.add(10)
    harness.inbox.append(Shutdown())
    assert not harness.engine.loop.step()


def test_stats_are_exact() -> None:
    harness = Harness(Shape(max_seqs=1))
    harness.add(10, max_tokens=3)
    harness.add(7, max_tokens=3)
    harness.round()
    harness.inbox.append(StatsRequest())
    harness.round()
    (stats,) = [frame for frame in harness.frames if isinstance(frame, Stats)]
    assert (stats.num_running, stats.num_waiting, stats.num_prompt_tokens) == (1, 1, 17)
    assert (stats.num_steps, stats.num_generation_tokens, stats.num_preemptions) == (1, 1, 0)


def stages() -> list[int]:
    """Rounds after which a request of `SLOW` is queued, in mid-prompt, decoding, and long over."""
    return [0, 1, 2, 4, 6, 9, 40]


@pytest.mark.parametrize("rounds", stages())
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 4}, {"prompt_logprobs": 1, "logprobs": 2}, {"runs_alone": True}, {"presence_penalty": 1.0, "n": 2}],
)
def test_cancel_is_legal_in_every_state(rounds: int, fields: dict[str, object]) -> None:
    harness = Harness(SLOW)
    beside = harness.add(30, max_tokens=20)
    harness.add(50, max_tokens=10, **fields)
    harness.round(rounds)
    harness.inbox += [Cancel("r2"), Cancel("r2"), Cancel("unknown")]
    harness.round()
    heard = {key: len(each.tokens) for key, each in harness.heard.items() if key[0] == "r2"}
    harness.run()
    assert {key: len(each.tokens) for key, each in harness.heard.items() if key[0] == "r2"} == heard
    harness.check_tokens(beside)
    harness.engine.check_empty()


@pytest.mark.parametrize("rounds", stages())
@pytest.mark.parametrize("choices", [[0], [2], [0, 1], [3, 0, 9], [0, 1, 2, 3]])
def test_one_choice_goes_and_the_others_go_on(rounds: int, choices: list[int]) -> None:
    """Also the one that computes the prompt for all, and one that has ended or never was."""
    harness = Harness(SLOW)
    request = harness.add(50, max_tokens=10, n=4)
    harness.round(rounds)
    harness.inbox += [Cancel("r1", choice) for choice in choices]
    harness.run()
    for index in set(range(4)) - set(choices):
        heard = harness.heard["r1", index]
        assert (len(heard.tokens), heard.reason) == (10, "length")
    harness.check_tokens(request, without=choices)
    harness.engine.check_empty()


@pytest.mark.parametrize("rounds", range(8))
def test_cancel_with_copies_in_flight(rounds: int) -> None:
    """Forks copy their tail; slow copies are running when the request goes."""
    durations = itertools.cycle([0.0, 0.01, 0.3])
    harness = Harness(Shape(page_size=16), Hooks(copy_duration_s=lambda: next(durations)))
    harness.add(21, n=6, max_tokens=10)
    harness.round(1 + rounds)
    harness.inbox.append(Cancel("r1"))
    harness.run()
    harness.engine.check_empty()


@pytest.mark.parametrize("runs", [True, False])
def test_a_deadline_ends_what_waits_and_what_runs(runs: bool) -> None:
    harness = Harness(Shape(max_seqs=1))
    if not runs:
        harness.add(10, max_tokens=100)
    late = harness.add(10, max_tokens=100, deadline_s=0.02, n=2)
    harness.run()
    for index in range(2):
        heard = harness.heard[late.request_id, index]
        assert heard.reason == "deadline"
        assert len(heard.tokens) < 100
    harness.engine.check_empty()


def test_a_deadline_that_has_passed_at_arrival() -> None:
    harness = Harness()
    harness.add(10, deadline_s=0.0)
    harness.round()
    harness.run()
    assert harness.heard["r1", 0].reason == "deadline"
    assert harness.heard["r1", 0].tokens == []


def test_ends() -> None:
    harness = Harness(Shape(windows=(None,)))
    oracle = Oracle((None,))
    plain = harness.add(10, max_tokens=20)
    expected = oracle.choice(plain.prompt_token_ids, plain.sampling, EOS, 20, 0)
    token = expected.tokens[4]
    first = expected.tokens.index(token)
    stopped = harness.add(10, max_tokens=20, prompt_token_ids=plain.prompt_token_ids, seed=1, stop_token_ids=(token,))
    harness.run()
    harness.check_tokens(plain)
    heard = harness.heard[stopped.request_id, 0]
    assert tuple(heard.tokens) == expected.tokens[: first + 1]
    assert heard.reason == "stop"
    assert heard.outputs[-1].stop_token_id == token


def test_min_tokens_forbids_every_end_before() -> None:
    harness = Harness()
    every_other = tuple(range(0, 211, 14))[:16]
    messages = [
        harness.add(10, max_tokens=30, min_tokens=20, ignore_eos=False, stop_token_ids=every_other) for _ in range(8)
    ]
    harness.run()
    for message in messages:
        harness.check_tokens(message)
        assert len(harness.heard[message.request_id, 0].tokens) >= 20


def test_a_step_that_fails_once_is_tried_again_and_nobody_notices() -> None:
    fails = iter([False, True, False, False, True] + [False] * 1000)

    def fail(_: Step) -> None:
        if next(fails):
            raise MemoryError("injected")

    harness = Harness(hooks=Hooks(before_run=fail))
    messages = [harness.add(30, n=2) for _ in range(3)]
    harness.run()
    for message in messages:
        harness.check_tokens(message)
    harness.engine.check_empty()


@pytest.mark.parametrize("poison", [0, 40])
def test_only_the_culprit_of_failing_steps_ends(poison: int) -> None:
    """`poison` is the position of the token that no step survives: in the first chunk, or deep in the prompt."""

    def fail(step: Step) -> None:
        if (step.token_ids[step.positions == poison] == 0).any():
            raise RuntimeError("injected")

    harness = Harness(SLOW, hooks=Hooks(before_run=fail))
    good = [harness.add(45, max_tokens=12) for _ in range(2)]
    prompt = [9] * 50
    prompt[poison] = 0
    harness.add(50, prompt_token_ids=tuple(prompt), n=2)
    good.append(harness.add(45, max_tokens=12))
    harness.run()
    assert [harness.heard["r3", index].reason for index in range(2)] == ["error", "error"]
    assert [harness.heard["r3", index].tokens for index in range(2)] == [[], []]
    for message in good:
        harness.check_tokens(message)
    harness.engine.check_empty()


def test_a_device_that_is_past_use_ends_the_engine() -> None:
    def fail(_: Step) -> None:
        raise RuntimeError("sticky")

    harness = Harness(hooks=Hooks(before_run=fail))
    for _ in range(8):
        harness.add(10)
    with pytest.raises(EngineError, match="no step succeeds any more.*sticky"):
        harness.run()
    assert sum(heard.reason == "error" for heard in harness.heard.values()) <= 1  # the others can be resumed


def test_a_copy_that_hangs_for_good_ends_the_engine_when_others_need_its_pages() -> None:
    """No deadline frees a page that a thread may still write to, and a fresh engine has pages of its own."""
    harness = Harness(Shape(num_pages=16, max_context=256), Hooks(copy_duration_s=lambda: 1e9))
    forked = harness.add(60, n=3)  # their copies are given up after the deadline, and they are computed again
    for _ in range(60):
        harness.round()
        harness.clock.advance(0.1)
    harness.check_tokens(forked)
    harness.add(200, max_tokens=50)
    harness.round(20)
    harness.clock.advance(STALL_LIMIT_S - 1)
    harness.round()
    harness.clock.advance(1)
    with pytest.raises(EngineError, match=r"no step in \d+ s, though 1 choices run and 0 wait; 1 copies are in flight"):
        harness.round()
    assert harness.engine.scheduler.requests, "who waited is not refused, but resumed on a fresh engine"


def test_an_engine_bug_is_not_taken_for_a_bad_request() -> None:
    class Bug(BaseException):
        pass

    def fail(_: Step) -> None:
        raise Bug

    harness = Harness(hooks=Hooks(before_run=fail))
    harness.add(10)
    with pytest.raises(Bug):
        harness.run()


@pytest.mark.parametrize("begun", [0, 1, 5, 7])
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(begun: int) -> None:
    first = Harness()
    message = first.add(40, n=3, max_tokens=8, temperature=1.0, presence_penalty=0.5, logprobs=1)
    first.run()
    full = [first.heard["r1", index].tokens for index in range(3)]
    second = Harness(Shape(page_size=8, max_tokens=24))
    resumed = tuple(ResumedChoice(index, tuple(full[index][: begun + index])) for index in range(2))
    second.inbox.append(msgspec.structs.replace(message, resumed=resumed))
    second.run()
    assert ("r1", 2) not in second.heard
    for index in range(2):
        heard = second.heard["r1", index]
        assert full[index][: begun + index] + heard.tokens == full[index]
        assert heard.reason == "length"


def test_a_resumed_choice_that_was_over_hears_its_end() -> None:
    harness = Harness()
    for resumed, ignores in (((4, 5, 6), True), ((4, 1), False)):
        harness.add(10, max_tokens=3, ignore_eos=ignores, resumed=(ResumedChoice(0, resumed),))
    harness.run()
    assert [harness.heard[f"r{number}", 0].reason for number in (1, 2)] == ["length", "stop"]
    assert all(not heard.tokens for heard in harness.heard.values())


def test_a_bad_or_repeated_request_is_refused_and_the_others_go_on() -> None:
    harness = Harness()
    good = harness.add(10)
    harness.add(10, request_id="r1")
    harness.add(10, prompt_token_ids=(5, 4000))
    harness.add(10, temperature=float("nan"))
    harness.add(300)
    harness.run()
    assert harness.refused == {
        "r1": "InvalidRequest", "r3": "InvalidRequest", "r4": "InvalidRequest", "r5": "ContextLengthExceeded",
    }  # fmt: skip
    harness.check_tokens(good)
