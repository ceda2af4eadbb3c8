"""Parking: choices whose adapter is not on the device, and who holds an adapter that is.

    arrives, or is made to wait ──> adapter on the device? ── yes ──> holds it, waits in the queue ──> runs
                                          │ no                             │ pages are short
                                          └──> parked: the load goes on <──┘
                                                 └── arrived, and its pages fit beside the claims ──> queue

A parked choice is in no queue, so nobody behind it waits for its load. Pages are taken in order: the first that finds
none keeps those behind it from taking any. A choice that waits in the queue holds its adapter, so that it can run when
its turn comes, but it lets go before anybody who runs has to give way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvarto.adapters.load import Load, Stage
from kvarto.adapters.registry import AdapterVersion, Registry
from kvarto.adapters.residency import Residency
from kvarto.adapters.resident import Resident
from kvarto.core.errors import AdapterError, AdapterRefused, BadAdapter, EngineError, KvartoError
from kvarto.engine.invocation import set_start
from kvarto.engine.load_pace import LoadPace
from kvarto.engine.request import Choice, Request, Status

if TYPE_CHECKING:
    from kvarto.engine.admission import AdmissionGate

MAX_DENIED_STEPS = 64
"""Steps in which the first parked choice finds no pages for its adapter, after which nobody behind it is admitted."""


class Parking:
    """Adapters of choices. Without a residency there are none, and everything here is free."""

    def __init__(
        self, residency: Residency | None = None, registry: Registry | None = None, pace: LoadPace | None = None
    ) -> None:
        self.refusal: Callable[[Request], KvartoError | None] = lambda request: None
        """Why a request can never run, once the size of its adapter is known."""
        self.kv_floor_pages = 0
        """That adapters cannot push KV below."""
        self.adapter_floor_pages = 0
        """That KV cannot push adapters below."""
        self._residency = residency
        self._registry = registry
        self._pace = pace
        self._sized: set[Request] = set()
        self._rechecks: set[Load] = set()
        """Loads that failed, whose files are being looked at again."""
        self._parked: dict[Choice, Load] = {}
        self._ready: dict[Choice, Resident] = {}
        """Choices in the queue that hold their adapter."""
        self._failed: list[tuple[Request, KvartoError]] = []
        self._num_denied = 0
        self._denied: Choice | None = None

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def choices(self) -> list[Choice]:
        """Parked ones, in order."""
        return sorted(self._parked, key=lambda choice: choice.order)

    @property
    def barrier(self) -> Choice | None:
        """A choice that waited for pages too long: nobody behind it is admitted, or keeps an adapter while it waits."""
        return self._denied if self._num_denied > MAX_DENIED_STEPS else None

    # ---- requests ----------------------------------------------------------------------------------------------

    def wait_s(self, version: AdapterVersion) -> float:
        """Until it would be the turn of an adapter that is asked for now, as far as can be said."""
        if self._residency is None or self._pace is None or self._residency.find(version) is not None:
            return 0.0
        line = list(dict.fromkeys(self._parked[choice].version for choice in self.choices))
        return self._pace.wait_s(line.index(version) if version in line else len(line))

    def add(self, request: Request) -> None:
        """A request was queued: it holds its version until `remove`."""
        if request.adapter is not None:
            assert self._registry is not None
            self._registry.hold(request.adapter)

    def remove(self, request: Request) -> None:
        """It ended, and with it all its choices."""
        if request.adapter is not None:
            assert self._registry is not None
            self._sized.discard(request)
            self._registry.release(request.adapter)

    # ---- choices -----------------------------------------------------------------------------------------------

    def may_wait(self, choice: Choice) -> bool:
        """Whether the choice can wait in the queue, with its adapter held; otherwise it is parked now."""
        version = choice.request.adapter
        if version is None:
            return True
        assert self._residency is not None
        resident = choice.resident or self._residency.find(version)
        if resident is None or _has_changed(choice.request):
            self.park(choice)
            return False
        if choice.resident is None:
            self._residency.num_hits += 1
            self._hold(choice, resident)
        self._ready[choice] = resident
        return True

    def park(self, choice: Choice) -> None:
        """Let a choice wait for its adapter, or for room to hold it."""
        version = choice.request.adapter
        assert version is not None
        assert self._residency is not None
        choice.status = Status.PARKED
        self._parked[choice] = self._residency.want(version)

    def start(self, choice: Choice) -> None:
        """A choice leaves the queue for a slot; it keeps its adapter."""
        self._ready.pop(choice, None)

    def share(self, leader: Choice, fork: Choice) -> None:
        """A choice that forks from `leader` uses its adapter."""
        if leader.resident is not None:
            self._hold(fork, leader.resident)

    def release(self, choice: Choice) -> None:
        """A choice ended, or will not fork: it lets go of its adapter, or stops waiting for it."""
        self._ready.pop(choice, None)
        load = self._parked.pop(choice, None)
        if load is not None:
            assert self._residency is not None
            self._residency.unwant(load)
        if choice.resident is not None:
            assert self._residency is not None
            resident, choice.resident = choice.resident, None
            self._residency.release(resident)

    # ---- each step ---------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Loads go on; those that failed end their requests (`take_failed`)."""
        if self._residency is None:
            return
        self._residency.advance()
        if self._pace is not None:
            self._pace.note(is_waiting=bool(self._parked), num_loads=self._residency.num_loads)
        for choice, load in list(self._parked.items()):
            error: KvartoError | None
            if _has_changed(choice.request):
                error = EngineError(f"the adapter `{load.version.name}` changed in the midst of this request")
            elif load.stage is not Stage.FAILED:
                error = self._refusal(choice.request)
            elif self._has_other_files(choice, load):
                continue
            else:
                error = load.error
            if error is not None:
                self._failed.append((choice.request, _for_client(error)))

    def take_failed(self) -> list[tuple[Request, KvartoError]]:
        """Requests whose adapter cannot be loaded, each once, and why. Their choices are to be ended."""
        failed, self._failed = self._failed, []
        return list(dict(reversed(failed)).items())

    def take_pages(self, gate: AdmissionGate, running: Sequence[Choice], head: Choice | None) -> list[Choice]:
        """Give pages to loads in order, while they fit beside the claims of all that come first. Returns choices that
        may go to the queue: they hold their adapter now. `head` is the first in the queue.
        """
        ready: list[Choice] = []
        if not self._parked:
            self._num_denied = 0
            return ready
        assert self._residency is not None
        denied: Choice | None = None
        is_turn = True
        for choice in self.choices:
            load = self._parked[choice]
            resident = self._residency.find(load.version)
            if load.stage not in (Stage.READY, Stage.RESIDENT) or _has_changed(choice.request):
                continue
            if load.stage is Stage.READY:
                is_turn = is_turn and self._residency.may_take(load)  # else small adapters would pass a large one
                if not is_turn:
                    continue
            if resident is None or not resident.num_users:
                is_behind = gate.refused is not None and gate.refused.order < choice.order
                if is_behind or not self._has_room(gate, choice, load.version.num_pages, running, head):
                    denied = choice
                    break
            if resident is not None:
                self._unpark(choice, load, resident)
                ready.append(choice)
            elif load.stage is Stage.READY and not self._residency.take(load):
                denied = choice
                break
        self._num_denied = self._num_denied + 1 if denied is not None and denied is self._denied else 0
        self._denied = denied
        return ready

    def park_last(self, behind: Choice | None = None) -> list[Choice]:
        """Adapters that are held by waiting choices alone: the one whose first is the last in order becomes free, for
        pages are short. Only those behind `behind`, if given. Returns its choices, which are to be parked.
        """
        by_resident: dict[Resident, list[Choice]] = {}
        for choice, resident in self._ready.items():
            by_resident.setdefault(resident, []).append(choice)
        groups = [
            group
            for resident, group in by_resident.items()
            if len(group) == resident.num_users
            and (behind is None or (behind not in group and min(c.order for c in group) > behind.order))
        ]
        last = max(groups, key=lambda group: min(choice.order for choice in group), default=[])
        for choice in last:
            self.release(choice)
        return last

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        for choice in self._parked:
            assert choice.status is Status.PARKED, f"choice {choice.order} is parked and {choice.status}"
            assert choice.resident is None, f"choice {choice.order} waits for an adapter that it holds"
        for choice, resident in self._ready.items():
            assert choice.status is Status.WAITING, f"choice {choice.order} is ready and {choice.status}"
            assert choice.resident is resident, f"choice {choice.order} is ready and holds another adapter"

    def _has_other_files(self, choice: Choice, load: Load) -> bool:
        """A load failed. Where its files have changed since they were opened, a request that has not begun goes on with
        the version that they are now; True while that is so, or is being found out.
        """
        assert self._registry is not None
        version, current = load.version, self._registry.find(load.version.name)
        if not isinstance(load.error, BadAdapter) or version.found is None or current is None:
            return False
        if any(each.output for each in choice.request.choices):
            return False
        if current is not version:
            self._move(choice, load, current)
            return True
        if not load.is_rechecked and load not in self._rechecks:
            self._rechecks.add(load)
            self._registry.load(version.name, version.path, lambda *_: self._finish_recheck(load))
        return load in self._rechecks

    def _finish_recheck(self, load: Load) -> None:
        self._rechecks.discard(load)
        load.is_rechecked = True

    def _move(self, choice: Choice, load: Load, version: AdapterVersion) -> None:
        """Let a request that has not begun use another version."""
        assert self._registry is not None
        assert self._residency is not None
        request, before = choice.request, choice.request.adapter
        assert before is not None
        if before is not version:
            request.adapter = version
            request.adapter_start = 0
            self._sized.discard(request)
            self._registry.hold(version)
            self._registry.release(before)
        self._residency.unwant(load)
        self.park(choice)

    def _refusal(self, request: Request) -> KvartoError | None:
        if request in self._sized or request.adapter is None or request.adapter.found is None:
            return None
        self._sized.add(request)
        return self.refusal(request)

    def _hold(self, choice: Choice, resident: Resident) -> None:
        assert self._residency is not None
        self._residency.hold(resident)
        choice.resident = resident
        set_start(choice.request)

    def _unpark(self, choice: Choice, load: Load, resident: Resident) -> None:
        assert self._residency is not None
        self._hold(choice, resident)
        del self._parked[choice]
        self._residency.unwant(load)

    def _has_room(
        self, gate: AdmissionGate, choice: Choice, num_pages: int, running: Sequence[Choice], head: Choice | None
    ) -> bool:
        before = [other for other in self._ready if other.order < choice.order]
        if head is not None and head.order < choice.order and head not in self._ready:
            before.append(head)
        coming = [other for other, load in self._parked.items() if load.stage in (Stage.COPYING, Stage.FILLING)]
        return gate.admits_adapter(choice, num_pages, running, [*before, *coming])


def _has_changed(request: Request) -> bool:
    """It began on an engine before this one, with an adapter of other content."""
    began, version = request.adapter_digest, request.adapter
    return began is not None and version is not None and version.digest not in (None, began)


def _for_client(error: KvartoError) -> KvartoError:
    return AdapterRefused(str(error), param="model") if isinstance(error, AdapterError) else error
