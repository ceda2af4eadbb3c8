"""A world around one KVCache: sequences that compute, fork, are preempted and closed, copies that take time and fail,
and adapters that want the same pages. An independent judge watches every step.

Pages have a content here: instead of KV each slot holds a number that stands for (root, all tokens up to this one,
group). A step writes its tokens' numbers and then reads everything that attention would read; one wrong number is
wrong output for somebody. The judge counts users, pins and states from what the world itself handed out.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

import numpy as np

from kvarto.cache.kv_cache import KV_OWNER, KVCache
from kvarto.cache.sequence import Sequence
from kvarto.core.clock import VirtualClock
from kvarto.core.digest_fields import DIGEST_BYTES
from kvarto.core.dtype import DType
from kvarto.core.errors import OutOfPages, TransferFailed
from kvarto.core.ids import NO_PAGE
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.executors import VirtualExecutor
from kvarto.memory.page_pool import NO_OWNER, PagePool
from kvarto.memory.transfers import Transfer, Transfers
from tests.cache.adapters import ADAPTERS, FakeAdapters

MODULUS = (1 << 61) - 1
Windows = tuple[int | None, ...]
ADAPTER_PAGES = 2
"""Of an adapter that computes KV."""


@dataclass(frozen=True)
class Scene:
    """Sizes of a world."""

    page_size: int = 16
    windows: Windows = (None,)
    num_pages: int = 48
    fault_rate: float = 0.0
    copy_s: float = 0.1
    """At most; transfers are overdue after 3 s."""
    kv_floor: int = 0
    adapter_floor: int = 0
    has_adapters: bool = False
    is_caching: bool = True


class RecordingTransfers(Transfers):
    """Knows which transfers are not reported yet, without looking into the base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unreported: dict[Transfer, None] = {}

    def submit(self, source: int, target: int, on_settled: Callable[[Transfer], None] | None = None) -> Transfer:
        def report(transfer: Transfer) -> None:
            assert transfer.is_settled, "a transfer was reported while a thread may touch its pages"
            del self.unreported[transfer]
            if on_settled is not None:
                on_settled(transfer)

        transfer = super().submit(source, target, report)
        self.unreported[transfer] = None
        return transfer


@dataclass(eq=False)
class Choice:
    """The world's own record of a sequence."""

    sequence: Sequence
    salt: str | None
    adapter: bytes
    start: int
    """The first token that the adapter computes."""
    tokens: list[int]
    """Prompt, and what was generated so far."""
    kv: list[int] = field(default_factory=list)
    """What each token's slot must hold, group 0; as long as `tokens`."""

    @property
    def num_computed(self) -> int:
        return self.sequence.num_computed_tokens


class World:
    """One pool, one cache, perhaps adapters. Every method is legal at any time."""

    def __init__(self, scene: Scene, seed: int = 0) -> None:
        self.scene = scene
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.pool = PagePool(scene.num_pages)
        self.arbiter = Arbiter(self.pool)
        self.content = np.full((scene.num_pages, scene.page_size), -1, dtype=np.int64)
        self.executor = VirtualExecutor(self.clock, lambda: scene.copy_s * self.random.random())
        self.transfers = RecordingTransfers(
            self._copy, self.clock, deadline_s=3.0, executor=self.executor, inject_fault=self._maybe_fail
        )
        self.groups = tuple(LayerGroup((g,), 1, 1, 8, window) for g, window in enumerate(scene.windows))
        self.cache = KVCache(
            pool=self.pool,
            arbiter=self.arbiter,
            transfers=self.transfers,
            groups=self.groups,
            kv_format=KVFormat(DType.F32, scene.page_size, 1, 1, 8),
            identity=b"model",
            key=b"secret",
            enable_prefix_caching=scene.is_caching,
            recompute_cost_s=lambda first, num: num * (1.0 + first / 100),
            floor_pages=scene.kv_floor,
        )
        self.adapters = FakeAdapters(self.pool, self.arbiter, floor_pages=scene.adapter_floor)
        self.choices: list[Choice] = []
        self.num_preempted = 0
        self.counts: dict[str, int] = {}

    # What can happen

    def open(
        self, tokens: list[int], salt: str | None = None, adapter: bytes = b"", use_prefix: bool = True, start: int = 0
    ) -> Choice:
        """Where there are adapters, one that finds no room computes nothing: it is the base that does."""
        if adapter and self.scene.has_adapters and not self.use_adapter(adapter.decode(), ADAPTER_PAGES):
            adapter = b""
        start = start if adapter else 0
        before = self._held()
        sequence = self.cache.open(
            tokens,
            salt=salt,
            adapter_digest=adapter,
            adapter_start=start,
            adapter=self.adapters.loaded[adapter.decode()] if adapter and self.scene.has_adapters else None,
            use_prefix=use_prefix,
        )
        choice = Choice(sequence, salt, adapter, start, list(tokens))
        self._extend_kv(choice)
        self.choices.append(choice)
        assert sequence.num_computed_tokens == sequence.num_cached_tokens <= len(tokens) - 1
        assert use_prefix or not sequence.num_cached_tokens
        assert self._held() - before <= self._num_kept(sequence)
        self._count("hit tokens", sequence.num_cached_tokens)
        if start:
            self._count("turns")
            self._count("hit tokens before a turn", min(start, sequence.num_cached_tokens))
            self._count("hit tokens behind a turn", max(0, sequence.num_cached_tokens - start))
        self._count("partial matches", bool(sequence.copies))
        return choice

    def advance(self, choice: Choice, num_tokens: int) -> str:
        """One step of a scheduler for one sequence: `waits`, `failed`, `no pages` or `computed`."""
        if not self._is_ready(choice):
            return "waits" if choice in self.choices else "failed"
        sequence = choice.sequence
        need = sequence.num_computed_tokens + num_tokens
        if not self._grow(choice, need):
            return "no pages"
        if not self._is_ready(choice):
            return "waits" if choice in self.choices else "failed"
        while len(choice.tokens) < need:
            choice.tokens.append(self.random.randrange(2))
        self._extend_kv(choice)
        self._write(choice, need)
        self._read(choice, need)
        self.cache.commit(sequence, choice.tokens[sequence.num_computed_tokens : need])
        self._count("computed tokens", num_tokens)
        return "computed"

    def fork(self, choice: Choice) -> Choice:
        child = Choice(
            self.cache.fork(choice.sequence), choice.salt, choice.adapter, choice.start, choice.tokens[:], choice.kv[:]
        )
        if choice.adapter and self.scene.has_adapters:
            self.use_adapter(choice.adapter.decode(), ADAPTER_PAGES)
        self.choices.append(child)
        self._count("forks")
        return child

    def close(self, choice: Choice) -> None:
        self.choices.remove(choice)
        self._count("closed with copies", bool(choice.sequence.copies))
        self.cache.close(choice.sequence)
        if choice.adapter and self.scene.has_adapters:
            self.release_adapter(choice.adapter.decode())

    def preempt(self, choice: Choice, use_prefix: bool = True) -> Choice:
        """Recompute: close, and open again with all tokens."""
        self.close(choice)
        self._count("preemptions")
        return self.open(choice.tokens, choice.salt, choice.adapter, use_prefix, choice.start)

    def tick(self, seconds: float) -> None:
        """Time passes; copies end, some too late."""
        self.clock.advance(seconds)
        if self.random.random() < 0.5:  # deadlines are swept before or after the executor's thread came to it
            self.executor.run_due()
        self.cache.sweep()
        self.executor.run_due()
        self.cache.sweep()

    def use_adapter(self, name: str, num_pages: int) -> bool:
        kv_before = self.pool.counts(KV_OWNER).total
        has_room = self.adapters.load(name, num_pages, reload_cost_s=num_pages * 10.0)
        self._count("adapter loads", has_room)
        kv_after = self.pool.counts(KV_OWNER).total
        assert kv_after >= min(kv_before, self.scene.kv_floor), "KV was pushed below its floor"
        return has_room

    def release_adapter(self, name: str) -> None:
        self.adapters.release(name)

    def drop_adapter(self, name: str) -> None:
        """Its name means nothing any more, and nobody uses it: its KV goes, and then it."""
        self.cache.forget_adapter(self.adapters.loaded[name])
        self.adapters.drop(name)
        self._count("adapter drops")

    def drain(self) -> None:
        """Close everything and take every page back: nothing that nobody uses may stay."""
        for choice in self.choices[:]:
            self.close(choice)
        for name, num_users in self.adapters.num_users.items():
            for _ in range(num_users):
                self.release_adapter(name)
        for _ in range(1000):
            if not self.transfers.unreported:
                break
            self.tick(1.0)
        assert not self.pool.num_held, "pages are held by nobody"
        assert not self.pool.num_draining, "pages drain for ever"
        self.check()
        for owner in (KV_OWNER, ADAPTERS):
            self.arbiter.reclaim(self.pool.num_pages - self.pool.num_free, owner)
        if not (self.scene.kv_floor or self.scene.adapter_floor):
            assert self.pool.num_free == self.pool.num_pages, "evictable pages could not be evicted"
            assert not any(True for _ in self.cache._index.entries()), "entries without pages are left"
            assert not self.cache._index._roots, "roots without entries are left"
        self.check()

    # The judge

    def judge(self) -> None:
        """Counts from what the world handed out, against the pool's."""
        users, owner = self._users()
        pins = np.zeros(self.scene.num_pages, dtype=np.int64)
        for transfer in self.transfers.unreported:
            pins[transfer.source] += 1
            pins[transfer.target] += 1
        cached = self.pool.is_cached
        held = users > 0
        draining = ~held & (pins > 0)
        evictable = ~held & ~draining & cached
        assert np.array_equal(users, self.pool.ref_count), "ref_count"
        assert np.array_equal(pins, self.pool.pin_count), "pin_count"
        assert np.array_equal(owner[held], self.pool.owner[held]), "owner"
        counts = [int(state.sum()) for state in (held, evictable, draining)]
        pool = self.pool
        assert counts == [pool.num_held, pool.num_evictable, pool.num_draining], "states"
        assert pool.num_free + sum(counts) == self.scene.num_pages, "free + held + evictable + draining != total"
        assert ((self.pool.owner == NO_OWNER) == ~(held | evictable | draining)).all(), "owners of free pages"

    def check(self) -> None:
        """The judge's count, and every structure's own laws."""
        self.judge()
        self.cache.check()
        self.transfers.check()

    # How it is done

    def _users(self) -> tuple[np.ndarray, np.ndarray]:
        users = np.zeros(self.scene.num_pages, dtype=np.int64)
        owner = np.full(self.scene.num_pages, NO_OWNER)
        for choice in self.choices:
            for group in range(len(self.groups)):
                table = choice.sequence.page_table(group)
                kept = table[table != NO_PAGE]
                users[kept] += 1
                owner[kept] = KV_OWNER
        for name, unit in self.adapters.loaded.items():
            if self.adapters.num_users[name]:
                users[list(unit.pages)] += 1
                owner[list(unit.pages)] = ADAPTERS
        return users, owner

    def _held(self) -> int:
        return self.pool.num_held

    def _num_kept(self, sequence: Sequence) -> int:
        return sum(int((sequence.page_table(g) != NO_PAGE).sum()) for g in range(len(self.groups)))

    def _is_ready(self, choice: Choice) -> bool:
        """After a failed copy the engine closes and recomputes."""
        try:
            return self.cache.is_ready(choice.sequence)
        except TransferFailed:
            self._count("failed copies")
            self.preempt(choice, use_prefix=self.random.random() < 0.5)
            return False

    def _grow(self, choice: Choice, need: int) -> bool:
        sequence = choice.sequence
        wanted = self.cache.pages_to_grow(sequence, need)
        available, draining = self.cache.num_available_pages, self.pool.num_draining
        before = [sequence.page_table(g).copy() for g in range(len(self.groups))]
        try:
            self.cache.grow(sequence, need)
        except OutOfPages:
            # A floor may stop the arbiter short of `available`: units leave whole.
            excused = draining or self.scene.adapter_floor
            assert wanted > available or excused, f"refused {wanted} pages with {available} available"
            for group, table in enumerate(before):
                assert np.array_equal(table, sequence.page_table(group)), "a refused `grow` changed a table"
            self._count("refusals")
            return False
        changed = sum(
            int((table != sequence.page_table(g)[: len(table)]).sum())
            + int((sequence.page_table(g)[len(table) :] != NO_PAGE).sum())
            for g, table in enumerate(before)
        )
        assert changed == wanted, f"`pages_to_grow` said {wanted}, `grow` took {changed}"
        assert not self.cache.pages_to_grow(sequence, need), "`grow` left something to do"
        self._count("copies on write", len(sequence.copies))
        return True

    def _extend_kv(self, choice: Choice) -> None:
        kv = choice.kv
        state = kv[-1] if kv else hash((choice.salt, b"" if choice.start else choice.adapter)) % MODULUS
        for token in choice.tokens[len(kv) :]:
            if choice.start and len(kv) == choice.start:
                state ^= hash(choice.adapter) % MODULUS
            state = (state * 6364136223846793005 + token + 1442695040888963407) % MODULUS
            kv.append(state)

    def _slots(self, choice: Choice, group: int, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(first, stop)
        pages = choice.sequence.page_table(group)[positions // self.scene.page_size]
        assert (pages != NO_PAGE).all(), f"tokens {first}..{stop} of group {group} have no pages"
        return pages, positions % self.scene.page_size

    def _write(self, choice: Choice, stop: int) -> None:
        first = choice.num_computed
        for group in range(len(self.groups)):
            pages, offsets = self._slots(choice, group, first, stop)
            assert (self.pool.ref_count[pages] == 1).all(), "a step writes pages that others use"
            self.content[pages, offsets] = np.array(choice.kv[first:stop]) ^ group

    def _read(self, choice: Choice, stop: int) -> None:
        for group, layers in enumerate(self.groups):
            first = 0 if layers.window is None else max(0, choice.num_computed - layers.window + 1)
            pages, offsets = self._slots(choice, group, first, stop)
            expected = np.array(choice.kv[first:stop]) ^ group
            assert np.array_equal(self.content[pages, offsets], expected), "attention would read other tokens' KV"

    def _copy(self, source: int, target: int) -> None:
        self.content[target] = self.content[source]

    def _maybe_fail(self, transfer: Transfer) -> None:
        if self.random.random() < self.scene.fault_rate:
            raise OSError("injected")

    def _count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by


@contextmanager
def truncated_digests(num_values: int) -> Iterator[None]:
    """Only `num_values` different digests exist: collisions everywhere."""

    class Truncated:
        def __init__(self, data: bytes, **kwargs: Any) -> None:
            self._value = int.from_bytes(blake2b(data, **kwargs).digest()[:8], "little") % num_values

        def digest(self) -> bytes:
            return self._value.to_bytes(DIGEST_BYTES, "little")

    with patch("kvarto.cache.digests.blake2b", Truncated):
        yield


@contextmanager
def confused_digests(a: list[int], b: list[int]) -> Iterator[None]:
    """A hash that takes the tokens `b` for `a`, and is sound otherwise."""

    def confused(data: bytes, **kwargs: Any) -> Any:
        return blake2b(data.replace(array("i", b).tobytes(), array("i", a).tobytes()), **kwargs)

    with patch("kvarto.cache.digests.blake2b", confused):
        yield
