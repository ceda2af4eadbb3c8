"""Adapters under random load, evict, replace, rename, unload, abort and generate, with faults, from one seed.

Each request is judged by an oracle that knows which content its version has: a page that is wrong, stale, poisoned or
half copied, KV of another adapter, or a step that names the wrong handle, each makes a wrong token. After every round
all laws are checked; in the end nothing may be held, pinned or on its way.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvarto.adapters.registry import AdapterVersion
from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Step
from kvarto.engine.messages import (
    AdapterAnswer,
    AdapterNames,
    AddRequest,
    Cancel,
    FromEngine,
    ListAdapters,
    LoadAdapter,
    Stats,
    StepOut,
    ToEngine,
    TokensOut,
    UnloadAdapter,
)
from kvarto.engine.request import Choice, Request
from kvarto.memory.calls import Call
from kvarto.memory.transfers import Transfer
from kvarto.planning.page_count import pages_for_sequence
from tests.adapters.fake_source import FakeFiles
from tests.engine.adapted_engine import AdaptedEngine, AdapterShape
from tests.engine.adapted_model import NUMBER_BYTES, AdaptedOracle, Content
from tests.engine.fake_model import VOCAB_SIZE
from tests.engine.hashed_engine import EOS, Hooks, Shape, VirtualClock

REFUSALS = ("Overloaded", "UnknownAdapter", "AdapterRefused", "TransferFailed", "ContextLengthExceeded")
MAX_QUIET_ROUNDS = 5000


@dataclass(frozen=True)
class Faults:
    """Probabilities, of an allocation, a copy of KV, a call, a step."""

    allocation: float = 0.02
    copy_fails: float = 0.06
    call_fails: float = 0.03
    call_is_slow: float = 0.03
    source_fails: float = 0.02
    step_fails: float = 0.01


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0)


@dataclass
class Record:
    """What the client knows of one request."""

    message: AddRequest
    request: Request | None = None
    is_cancelled: bool = False
    refused: str | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    @property
    def version(self) -> AdapterVersion | None:
        return None if self.request is None else self.request.adapter

    @property
    def is_open(self) -> bool:
        return not self.is_cancelled and self.refused is None and len(self.reasons) < self.message.sampling.n


class StepFault(RuntimeError):
    """What a backend raises when a step fails."""


class AdapterEpisode:
    """One engine and its client, for a number of rounds."""

    def __init__(self, seed: int, faults: Faults = Faults()) -> None:
        self.rng = rng = random.Random(seed)
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self.records: dict[str, Record] = {}
        self.clock = VirtualClock()
        self.inbox: list[ToEngine] = []
        self.files = FakeFiles(fails=lambda: rng.random() < faults.source_fails)
        self._step_failed = False
        self._quiet_rounds = 0
        self._num_messages = 0
        self._pending: set[str] = set()
        page_size = rng.choice([8, 16])
        windows: tuple[int | None, ...] = rng.choice([(None,), (None,), (None,), (None, 24), (20,)])
        max_seqs, max_context = rng.choice([2, 4, 8]), rng.choice([64, 96])
        max_tokens = max(max_seqs, rng.choice([16, 48]))
        self._largest = rng.choice([3, 6])
        least = pages_for_sequence(Shape(windows=windows).groups, page_size, max_context, max_tokens)
        self.shape = Shape(
            page_size=page_size,
            windows=windows,
            num_pages=self._largest + round(least * rng.choice([1.0, 1.5, 2.5, 4.0])),
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_context=max_context,
            max_num_queued=20,
            is_caching=rng.random() < 0.9,
            num_lookup_tokens=rng.choice((0, 0, 3)),
        )
        self._bases = [[rng.randrange(3, VOCAB_SIZE) for _ in range(max_context)] for _ in range(2)]
        self._oracles: dict[tuple[int, int, int], AdaptedOracle] = {}
        hooks = Hooks(
            before_run=self._before_run,
            before_copy=self._before_copy,
            copy_duration_s=lambda: rng.uniform(0.0, 0.02),
            allocation_fails=lambda: rng.random() < faults.allocation,
        )
        adapters = AdapterShape(
            host_pages=rng.choice([0, 4, 12]) * (seed % 2),
            staging_pages=(staging_pages := rng.choice([0, 0, 8, 100])),
            filling_pages=staging_pages,
            pages_per_copy=rng.choice([1, 2, 100]),
            max_adapters=rng.choice([0, 0, 1, 2]),
            max_adapter_wait_s=0.02 if seed % 4 == 0 else 0.0,
            before_call=self._before_call,
            call_duration_s=self._call_duration_s,
        )
        self.engine = AdaptedEngine(
            self.shape, self, self.clock, hooks, source=self.files, adapters=adapters, seed=rng.randrange(1 << 32)
        )
        self.engine.backend.are_pages_here = seed % 4 != 3
        self._names = [f"a{index}" for index in range(rng.choice([2, 6, 12]))]
        for name in self._names:
            self._change_files(name)
            self.engine.adapters.register(name, Path(name))
        self._spy_on_requests()

    # ---- faults ------------------------------------------------------------------------------------------------

    def _before_run(self, step: Step) -> None:
        self.counts["adapters in a step, most"] = max(
            self.counts["adapters in a step, most"],
            0 if step.adapters is None else len(set(step.adapters.tolist()) - {-1}),
        )
        self._step_failed = not self._step_failed and self.rng.random() < self.faults.step_fails
        if self._step_failed:
            self.counts["step faults"] += 1
            raise StepFault("injected")

    def _before_copy(self, transfer: Transfer) -> None:
        if self.rng.random() < self.faults.copy_fails:
            self.counts["copy faults"] += 1
            raise OSError("injected")

    def _before_call(self, call: Call) -> None:
        self.counts["calls"] += 1
        if self.rng.random() < self.faults.call_fails:
            self.counts["call faults"] += 1
            raise OSError("injected")

    def _call_duration_s(self) -> float:
        if self.rng.random() < self.faults.call_is_slow:
            self.counts["slow calls"] += 1
            return self.rng.uniform(0.2, 1.5)  # the deadline is 0.5 s
        return self.rng.uniform(0.0, 0.01)

    # ---- the channel -------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> list[ToEngine]:
        if not self.inbox and timeout_s > 0:
            self.clock.advance(timeout_s)
            self.engine.run_due()
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, AdapterAnswer):
            self._pending.remove(message.request_id)
            self.counts["refused loads" if message.error else "answers"] += 1
            return
        if isinstance(message, Stats | AdapterNames):
            return
        assert isinstance(message, StepOut)
        for refused in message.refused:
            record = self.records[refused.request_id]
            assert refused.error in REFUSALS, refused
            if not record.is_cancelled:
                assert record.is_open, f"{refused} came after the end"
                record.refused = refused.error
                self.counts[refused.error] += 1
        for out in message.outputs():
            self._hear(out)
        if message.going_on or message.tokens or message.refused:
            self._quiet_rounds = 0

    def _hear(self, out: TokensOut) -> None:
        record = self.records[out.request_id]
        if record.is_cancelled:
            return
        assert record.refused is None, f"{out} came after a refusal"
        assert out.choice not in record.reasons, f"{out} came after the end"
        record.tokens.setdefault(out.choice, []).extend(out.token_ids)
        if out.finish_reason is not None:
            record.reasons[out.choice] = out.finish_reason

    def _spy_on_requests(self) -> None:
        scheduler = self.engine.scheduler
        add = scheduler.add

        def spy(request: Request) -> None:
            add(request)
            self.records[request.request_id].request = request

        scheduler.add = spy  # type: ignore[method-assign]
        take_starved = scheduler.take_starved

        def none_starves() -> list[Choice]:
            starved = take_starved()
            assert not starved, f"a choice had the pool to itself and found no page: {self.engine.describe()}"
            return starved

        scheduler.take_starved = none_starves  # type: ignore[method-assign]

    # ---- what clients and operators do -------------------------------------------------------------------------

    def _act(self) -> None:
        rng = self.rng
        still_open = [record for record in self.records.values() if record.is_open]
        if rng.random() < (0.35 if len(still_open) < 12 else 0.02):
            self._submit()
        if still_open and rng.random() < 0.02:
            record = rng.choice(still_open)
            record.is_cancelled = True
            self.counts["cancels"] += 1
            self.inbox.append(Cancel(record.message.request_id))
        if rng.random() < 0.06:
            rng.choice([self._replace, self._replace, self._rename, self._unload, self._refresh, self._list])()

    def _submit(self) -> None:
        rng = self.rng
        base = rng.choice(self._bases)[: rng.randrange(self.shape.max_context - 20)]
        called = self._bases[0][2:4] if rng.random() < 0.3 else []
        prompt = base + called + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
        max_tokens = rng.randrange(1, min(20, self.shape.max_context - len(prompt)) + 1)
        # A few names are wanted often, others rarely, some not at all.
        weights = [1.0 / (1 + rank) for rank in range(len(self._names))]
        name = rng.choices([*self._names, "unknown"], [*weights, 0.02])[0]
        message = AddRequest(
            request_id=f"r{len(self.records)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                n=rng.choice([1, 1, 1, 1, 3]),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(1 << 63),
                max_tokens=max_tokens,
            ),
            eos_token_ids=EOS,
            cache_salt=rng.choice([None, None, "tenant"]),
            priority=rng.choice([0, 0, 0, -1]),
            deadline_s=rng.uniform(0.01, 3.0) if rng.random() < 0.03 else None,
            adapter=None if rng.random() < 0.25 else name,
        )
        self.records[message.request_id] = Record(message)
        self.inbox.append(message)

    def _change_files(self, name: str) -> None:
        """Other bytes at a path; a few contents are there under several names."""
        seed = self.rng.choice([self.rng.randrange(1, 4), self.rng.randrange(1, 1 << 20)])
        self.files.put(name, seed, 1 + seed % self._largest)
        if self.rng.random() < 0.2:
            self.files.invocation[seed] = (self._bases[0][2], self._bases[0][3])

    def _replace(self) -> None:
        name = self.rng.choice(self._names)
        self._change_files(name)
        self._load(name, name)

    def _rename(self) -> None:
        self._load(self.rng.choice(self._names), self.rng.choice(self._names))

    def _load(self, name: str, path: str) -> None:
        self.counts["loads asked"] += 1
        self.inbox.append(LoadAdapter(request_id=self._next_id(), name=name, path=path))

    def _unload(self) -> None:
        name = self.rng.choice(self._names)
        self.inbox.append(UnloadAdapter(request_id=self._next_id(), name=name))
        self.inbox.append(LoadAdapter(request_id=self._next_id(), name=name, path=name))

    def _refresh(self) -> None:
        self._change_files(self.rng.choice(self._names))
        self.engine.adapters.refresh()

    def _list(self) -> None:
        self.inbox.append(ListAdapters(request_id=self._next_id()))

    def _next_id(self) -> str:
        self._num_messages += 1
        self._pending.add(f"m{self._num_messages}")
        return f"m{self._num_messages}"

    # ---- rounds ------------------------------------------------------------------------------------------------

    def run(self, num_rounds: int) -> None:
        """So many rounds with actions, then to the end, then `judge`."""
        for _ in range(num_rounds):
            self._act()
            self._round()
        while self.engine.loop.has_work or self.inbox or self.engine.adapters.is_busy or self._copies_left:
            self._round()
        self._judge()

    @property
    def _copies_left(self) -> int:
        return self.engine.transfers.num_unreported

    def _round(self) -> None:
        assert self.engine.loop.step()
        self.clock.advance(self.rng.uniform(0.0, 0.01))
        self.engine.run_due()
        self.engine.check()
        self.counts["rounds"] += 1
        residents = self.engine.parts.residency.residents
        common = sum(len(resident.pages) - len(resident.own) for resident in residents)
        self.counts["pages in common, most"] = max(self.counts["pages in common, most"], common)
        self._quiet_rounds += 1
        assert self._quiet_rounds < MAX_QUIET_ROUNDS, f"nothing moves: {self.engine.describe()}"

    def _judge(self) -> None:
        self.engine.check_empty()
        assert not self._pending, f"{self._pending} were never answered"
        for record in self.records.values():
            assert not record.is_open, f"{record} never ended"
            for index in range(record.message.sampling.n):
                self._judge_choice(record, index)
        for version in self.engine.parts.registry.versions:
            assert not version.num_requests, f"{version} is held by nobody"
        stats = self.engine.adapters.stats()
        self.counts["loads"] += stats["num_adapter_loads"]
        self.counts["loads into pages"] += stats["num_adapter_loads"] * self.engine.parts.writes.reads_into_pages
        self.counts["evictions"] += stats["num_adapter_evictions"]
        self.counts["hits"] += stats["num_adapter_hits"]
        self.counts["host hits"] += self.engine.parts.host.num_hits
        self.counts["preemptions"] += self.engine.scheduler.num_preemptions
        self._drop_all()

    def _drop_all(self) -> None:
        """Unload everything: no tier keeps a byte."""
        for name in [version.name for version in self.engine.parts.registry]:
            self.engine.parts.registry.unload(name)
        self.engine.check()
        assert self.engine.adapters.stats()["adapter_device_bytes"] == 0, "unloaded adapters keep pages"
        assert self.engine.parts.host.used_bytes == 0, "unloaded adapters keep host memory"

    def _judge_choice(self, record: Record, index: int) -> None:
        message, reason, got = record.message, record.reasons.get(index), record.tokens.get(index, [])
        assert message.sampling.max_tokens is not None
        if not got and reason in (None, "deadline", "error"):
            return
        oracle = self._oracle_of(record)
        expected = oracle.choice(message.prompt_token_ids, message.sampling, EOS, message.sampling.max_tokens, index)
        assert tuple(got) == expected.tokens[: len(got)], f"{message.request_id}/{index} of {record.version}: {got}"
        self.counts["tokens"] += len(got)
        if reason in ("stop", "length"):
            assert (tuple(got), reason) == (expected.tokens, expected.reason)
            self.counts["ended with adapter" if record.version else "ended without"] += 1

    def _oracle_of(self, record: Record) -> AdaptedOracle:
        if record.version is None:
            return AdaptedOracle(self.shape.windows, None)
        found = record.version.found
        assert found is not None, "tokens came from an adapter that was never opened"
        seed, num_pages = found.identity[0].inode, found.num_pages
        invocation, prompt = found.adapter.invocation_tokens, record.message.prompt_token_ids
        places = [i for i in range(len(prompt)) if prompt[i : i + len(invocation)] == invocation] if invocation else [0]
        if not places:
            return AdaptedOracle(self.shape.windows, None)
        key = (seed, num_pages, places[-1])
        if key not in self._oracles:
            content = Content(seed, num_pages, self.shape.page_size * NUMBER_BYTES, places[-1])
            self._oracles[key] = AdaptedOracle(self.shape.windows, content)
        return self._oracles[key]


def simulate(num_rounds: int, seed: int, faults: Faults, rounds_per_episode: int = 250) -> Counter[str]:
    """Episodes until so many rounds were run. The seed of a failing episode is in its error."""
    counts: Counter[str] = Counter()
    number = 0
    while counts["rounds"] < num_rounds:
        episode = AdapterEpisode(seed * 1_000_003 + number, faults)
        try:
            episode.run(rounds_per_episode)
        except BaseException as error:
            error.add_note(f"episode {number} of seed {seed}: {episode.engine.describe()}")
            raise
        most = {
            name: max(counts[name], episode.counts.pop(name))
            for name in ("adapters in a step, most", "pages in common, most")
        }
        counts += episode.counts
        counts |= Counter(most)
        number += 1
    return counts
