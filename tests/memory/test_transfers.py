"""Transfers in every state: on a thread with copies that hang and fail, and on virtual time as a state machine."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvarto.core.clock import MonotonicClock, VirtualClock
from kvarto.core.errors import TransferFailed
from kvarto.memory.executors import VirtualExecutor
from kvarto.memory.transfers import Transfer, Transfers, TransferState

DONE, FAILED, CANCELLED = TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED


class Gate:
    """A copy that stops in the middle until it is let go, so that a test can look at a running transfer."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.copies: list[tuple[int, int]] = []

    def copy(self, source: int, target: int) -> None:
        """Wait for the test, then note the copy."""
        self.has_begun.set()
        assert self.may_end.wait(30)
        self.copies.append((source, target))


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def transfers(gate: Gate) -> Iterator[Transfers]:
    transfers = Transfers(gate.copy, MonotonicClock(), deadline_s=20.0)
    yield transfers
    gate.may_end.set()
    transfers.close()
    transfers.check()
    assert transfers.num_unreported == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvarto-copies"]


def test_copies_in_order_and_reports_each_once(gate: Gate, transfers: Transfers) -> None:
    gate.may_end.set()
    told: list[Transfer] = []
    asked = [transfers.submit(page, page + 100, told.append) for page in range(50)]
    transfers.wait(asked[-1])
    assert gate.copies == [(page, page + 100) for page in range(50)]
    assert transfers.poll() == told == asked
    assert transfers.poll() == []
    assert {t.state for t in asked} == {DONE}


def test_no_report_before_the_copy_ends(gate: Gate, transfers: Transfers) -> None:
    running, queued = transfers.submit(1, 2), transfers.submit(3, 4)
    assert gate.has_begun.wait(10)
    assert (running.state, queued.state) == ("running", "queued")
    assert transfers.poll() == []
    with pytest.raises(TransferFailed, match="page 1 to 2 is running"):
        running.require_done()


def test_cancel_while_queued_settles_at_once_and_copies_nothing(gate: Gate, transfers: Transfers) -> None:
    running, queued = transfers.submit(1, 2), transfers.submit(3, 4)
    assert gate.has_begun.wait(10)
    transfers.cancel(queued)
    assert transfers.poll() == [queued]
    gate.may_end.set()
    transfers.wait(running)
    assert (queued.state, gate.copies) == (CANCELLED, [(1, 2)])


def test_cancel_while_running_keeps_the_pages_until_the_copy_lets_go(gate: Gate, transfers: Transfers) -> None:
    transfer = transfers.submit(1, 2)
    assert gate.has_begun.wait(10)
    transfers.cancel(transfer)
    assert transfer.state is CANCELLED
    assert not transfer.is_settled
    assert transfers.poll() == []
    with pytest.raises(TransferFailed, match="cancelled"):
        transfers.wait(transfer)
    gate.may_end.set()
    transfers.close()
    assert transfer.is_settled
    assert transfer.state is CANCELLED


def test_cancel_after_the_end_changes_nothing(gate: Gate, transfers: Transfers) -> None:
    gate.may_end.set()
    transfer = transfers.submit(1, 2)
    transfers.wait(transfer)
    transfers.cancel(transfer)
    transfers.wait(transfer)
    assert transfers.poll() == [transfer]
    transfers.cancel(transfer)
    assert (transfer.state, transfers.poll()) == (DONE, [])


def test_a_failed_copy_says_why_and_hurts_no_other() -> None:
    def copy(source: int, target: int) -> None:
        if source == 1:
            raise OSError("disk on fire")

    transfers = Transfers(copy, MonotonicClock())
    bad, good = transfers.submit(1, 2), transfers.submit(3, 4)
    with pytest.raises(TransferFailed, match=r"page 1 to 2 is failed: OSError: disk on fire"):
        transfers.wait(bad)
    transfers.wait(good)
    assert transfers.poll() == [bad, good]
    transfers.close()


def test_an_injected_fault_comes_before_the_copy(gate: Gate) -> None:
    def fault(transfer: Transfer) -> None:
        if transfer.source == 1:
            raise RuntimeError("injected")

    gate.may_end.set()
    transfers = Transfers(gate.copy, MonotonicClock(), inject_fault=fault)
    bad, good = transfers.submit(1, 2), transfers.submit(3, 4)
    transfers.wait(good)
    assert (bad.state, bad.error, gate.copies) == (FAILED, "RuntimeError: injected", [(3, 4)])
    transfers.close()


def test_the_sweep_fails_what_hangs_and_what_waits_behind_it(gate: Gate) -> None:
    clock = VirtualClock()
    transfers = Transfers(gate.copy, clock, deadline_s=5.0)
    hanging, waiting = transfers.submit(1, 2), transfers.submit(3, 4)
    assert gate.has_begun.wait(10)
    clock.advance(4.9)
    assert transfers.sweep() == 0
    clock.advance(0.1)
    assert transfers.sweep() == 2
    assert transfers.sweep() == 0
    assert (hanging.state, waiting.state) == (FAILED, FAILED)
    assert transfers.poll() == [waiting], "the hanging copy still writes to its target"
    gate.may_end.set()
    transfers.close()
    assert gate.copies == [(1, 2)]
    assert hanging.is_settled
    assert hanging.state is FAILED


def test_wait_ends_with_the_deadline(gate: Gate) -> None:
    transfers = Transfers(gate.copy, MonotonicClock(), deadline_s=0.05)
    transfer = transfers.submit(1, 2)
    with pytest.raises(TransferFailed, match=r"deadline of 0.05 s has passed"):
        transfers.wait(transfer)
    gate.may_end.set()
    transfers.close()


def test_close_cancels_the_queue_and_reports_all(gate: Gate) -> None:
    told: Counter[int] = Counter()
    transfers = Transfers(gate.copy, MonotonicClock())
    asked = [transfers.submit(page, page + 10, lambda t: told.update([t.source])) for page in range(5)]
    assert gate.has_begun.wait(10)
    threading.Timer(0.05, gate.may_end.set).start()
    transfers.close()
    assert [t.state for t in asked] == [DONE, *[CANCELLED] * 4]
    assert told == Counter(range(5))
    with pytest.raises(TransferFailed, match="after close"):
        transfers.submit(1, 2)


def test_close_says_when_a_copy_hangs(gate: Gate) -> None:
    transfers = Transfers(gate.copy, MonotonicClock(), deadline_s=0.05)
    transfer = transfers.submit(1, 2)
    assert gate.has_begun.wait(10)
    with pytest.raises(TransferFailed, match="1 copies still run"):
        transfers.close()
    assert not transfer.is_settled
    gate.may_end.set()
    transfers.close()
    assert transfer.is_settled


def test_a_callback_that_raises_loses_no_other_report(gate: Gate, transfers: Transfers) -> None:
    def broken(transfer: Transfer) -> None:
        raise ValueError("ours")

    gate.may_end.set()
    first, second = transfers.submit(1, 2, broken), transfers.submit(3, 4)
    transfers.wait(second)
    with pytest.raises(ValueError, match="ours"):
        transfers.poll()
    assert transfers.poll() == [second]
    assert first.is_settled


def test_many_threads_submit_cancel_and_poll() -> None:
    """Each transfer is reported to exactly one caller, whoever polls."""
    reports: Counter[Transfer] = Counter()
    lock = threading.Lock()

    def told(transfer: Transfer) -> None:
        with lock:
            reports[transfer] += 1

    transfers = Transfers(lambda source, target: None, MonotonicClock())
    asked: list[list[Transfer]] = [[] for _ in range(4)]

    def work(index: int) -> None:
        rng = random.Random(index)
        for _ in range(300):
            asked[index].append(transfers.submit(index, index + 10, told))
            if rng.random() < 0.5:
                transfers.cancel(rng.choice(asked[index]))
            if rng.random() < 0.3:
                transfers.poll()
                transfers.sweep()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfers.close()
    assert reports == Counter(transfer for part in asked for transfer in part)
    transfers.check()


# ---- on virtual time ----


class TransferMachine(RuleBasedStateMachine):
    """Page contents are modelled: a copy may touch pages only while their transfer is unreported."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.durations = random.Random(0)
        self.executor = VirtualExecutor(self.clock, lambda: self.durations.choice([0.0, 0.5, 1.0, 6.0]))
        self.transfers = Transfers(
            self._copy, self.clock, deadline_s=5.0, executor=self.executor, inject_fault=self._fault
        )
        self.asked: list[Transfer] = []
        self.copied: Counter[int] = Counter()
        self.told: Counter[int] = Counter()
        self.faulty: set[int] = set()
        self.final: dict[int, TransferState] = {}

    def _copy(self, source: int, target: int) -> None:
        assert self.told[source] == 0, "a copy touched pages whose transfer was reported"
        self.copied[source] += 1

    def _fault(self, transfer: Transfer) -> None:
        if transfer.source in self.faulty:
            raise OSError("injected")

    def _told(self, transfer: Transfer) -> None:
        assert transfer.is_settled
        self.told[transfer.source] += 1

    @rule(is_faulty=st.booleans())
    def submit(self, is_faulty: bool) -> None:
        number = len(self.asked)
        if is_faulty:
            self.faulty.add(number)
        self.asked.append(self.transfers.submit(number, number + 10_000, self._told))

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 5.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.executor.run_due()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.transfers.cancel(data.draw(st.sampled_from(self.asked)))

    @rule()
    def sweep(self) -> None:
        self.transfers.sweep()
        late = [t for t in self.asked if not t.is_final and t.deadline_s <= self.clock.now()]
        assert not late

    @rule()
    def poll(self) -> None:
        before = self.told.total()
        reported = self.transfers.poll()
        assert self.told.total() - before == len(reported)
        assert all(self.told[t.source] == 1 for t in self.asked if t.is_settled)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(self.asked))
        latest_s = max(self.clock.now(), transfer.deadline_s)
        try:
            self.transfers.wait(transfer)
        except TransferFailed:
            assert transfer.state in (FAILED, CANCELLED)
        else:
            assert transfer.state is DONE
        assert self.clock.now() <= latest_s

    @invariant()
    def laws_hold(self) -> None:
        self.transfers.check()
        for transfer in self.asked:
            number = transfer.source
            assert self.told[number] <= 1, "reported twice"
            assert self.copied[number] <= 1, "copied twice"
            if transfer.state is DONE:
                assert self.copied[number] == 1
                assert number not in self.faulty
            if transfer.is_final:
                assert self.final.setdefault(number, transfer.state) is transfer.state, "a final state changed"
            assert transfer.is_final or not transfer.is_settled
        assert self.transfers.num_unreported == len(self.asked) - self.told.total()

    def teardown(self) -> None:
        self.clock.advance(100.0)
        self.executor.run_due()
        self.transfers.close()
        assert self.transfers.num_unreported == 0
        assert self.told == Counter(range(len(self.asked)))


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_every_state_is_cancelled_in_the_machine_s_world() -> None:
    """Virtual time stops between begin and end: a running copy can be cancelled without a thread."""
    clock = VirtualClock()
    executor = VirtualExecutor(clock, lambda: 1.0)
    transfers = Transfers(lambda source, target: None, clock, executor=executor)
    running, queued = transfers.submit(1, 2), transfers.submit(3, 4)
    assert (running.state, queued.state, executor.next_event_s) == ("running", "queued", 1.0)
    transfers.cancel(running)
    transfers.cancel(queued)
    assert transfers.poll() == [queued]
    clock.advance(1.0)
    executor.run_due()
    assert transfers.poll() == [running]
    assert executor.next_event_s is None


@pytest.mark.parametrize("wait_s", [0.5, 2.5])
def test_waiting_moves_virtual_time_no_further_than_needed(wait_s: float) -> None:
    clock = VirtualClock()
    executor = VirtualExecutor(clock, lambda: 1.0)
    transfers = Transfers(lambda source, target: None, clock, deadline_s=wait_s, executor=executor)
    asked = [transfers.submit(page, page + 10) for page in range(2)]
    if wait_s < 2:
        with pytest.raises(TransferFailed, match="deadline"):
            transfers.wait(asked[1])
        assert clock.now() == wait_s
    else:
        transfers.wait(asked[1])
        assert clock.now() == 2.0
