"""Adapters: all that an engine knows of them, in one place. Registry, host tier, residency and their threads.

The loop calls `sweep` in each round, hands over messages about adapters, and takes their answers. Everything that
reads files or copies bytes runs in threads; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvarto.adapters.host_tier import HostTier
from kvarto.adapters.page_writes import PageWrites
from kvarto.adapters.registry import AdapterVersion, Registry, VersionState
from kvarto.adapters.residency import Residency
from kvarto.adapters.resident import Resident
from kvarto.core.errors import AdapterError, KvartoError, UnknownAdapter
from kvarto.engine.adapter_traffic import AdapterTraffic
from kvarto.engine.adapter_watch import AdapterWatch
from kvarto.engine.messages import (
    MAX_NAMES_IN_STATS,
    AdapterAnswer,
    AdapterInfo,
    AdapterNames,
    ListAdapters,
    LoadAdapter,
    UnloadAdapter,
)
from kvarto.engine.parking import Parking
from kvarto.memory.calls import Calls

MAX_SHOWN = 4
"""Names in a message."""


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """What is wired together."""

    registry: Registry
    host: HostTier
    residency: Residency
    writes: PageWrites
    reads: Calls
    copies: Calls
    parking: Parking


class Adapters:
    """One per engine that serves adapters."""

    def __init__(self, parts: AdapterParts, base_name: str, watch: AdapterWatch | None = None) -> None:
        """`base_name`: the parent of every adapter. `watch` looks after folders."""
        self.parking = parts.parking
        self.traffic = AdapterTraffic()
        self._watch = watch
        self._parts = parts
        self._base_name = base_name
        self._answers: list[AdapterAnswer] = []
        self._num_told_changes = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be called now, in the order of registration."""
        return tuple(version.name for version in self._parts.registry)

    @property
    def residents(self) -> list[Resident]:
        """Those on the device, used or not."""
        return self._parts.residency.residents

    @property
    def is_busy(self) -> bool:
        """Something goes on in a thread, or an answer waits to be sent."""
        parts = self._parts
        return bool(parts.reads.num_unreported or parts.copies.num_unreported or self._answers)

    @property
    def is_loading(self) -> bool:
        """Something goes on in a thread which will be done, or fail by its deadline."""
        return bool(self._parts.reads.num_in_time or self._parts.copies.num_in_time)

    @property
    def has_copies(self) -> bool:
        """Pages are being filled, whose end may free some."""
        return self._parts.copies.num_unreported > 0 or self._parts.writes.num_filling > 0

    def find(self, name: str) -> AdapterVersion:
        """What the name means now. Raises UnknownAdapter."""
        version = self._parts.registry.find(name)
        if version is None:
            raise UnknownAdapter(f"no adapter `{name[:200]}` is registered here; {self._known()}", param="model")
        return version

    def register(self, name: str, path: Path) -> None:
        """List an adapter at start; its files are opened when it is first wanted."""
        self._parts.registry.list_name(name, path)

    def handle(self, message: LoadAdapter | UnloadAdapter | ListAdapters) -> None:
        """Do what a message asks; its answer comes with `take_answers`."""
        registry = self._parts.registry
        match message:
            case LoadAdapter() if message.is_known:
                version = registry.list_name(message.name, Path(message.path))
                self._answer(message.request_id, (self.info(version),), None)
            case LoadAdapter():
                registry.load(message.name, Path(message.path), partial(self._loaded, message.request_id))
            case UnloadAdapter():
                self._unload(message)
            case ListAdapters():
                self._answer(message.request_id, tuple(self.infos()), None)

    def _unload(self, message: UnloadAdapter) -> None:
        version = self._parts.registry.find(message.name)
        if version is None:
            error = UnknownAdapter(f"no adapter `{message.name[:200]}` is registered here; {self._known()}")
            self._answer(message.request_id, (), error)
            return
        info = self.info(version)
        self._parts.registry.unload(message.name)
        self._answer(message.request_id, (info,), None)

    def take_answers(self) -> list[AdapterAnswer]:
        """Answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def take_names(self) -> AdapterNames | None:
        """All names, where they have changed since the last call."""
        if self._parts.registry.num_changes == self._num_told_changes:
            return None
        self._num_told_changes = self._parts.registry.num_changes
        return AdapterNames(self.names)

    def infos(self) -> Iterator[AdapterInfo]:
        """Of each name, in the order of registration."""
        return map(self.info, self._parts.registry)

    def info(self, version: AdapterVersion) -> AdapterInfo:
        """Where a version is, and how large."""
        adapter = None if version.found is None else version.found.adapter
        return AdapterInfo(
            name=version.name,
            path=str(version.path),
            parent=self._base_name,
            rank=None if adapter is None else adapter.max_rank,
            size_bytes=None if adapter is None else adapter.size_bytes,
            num_pages=None if adapter is None else version.num_pages,
            dtype=None if adapter is None else "+".join(adapter.strip_types),
            tier=self._tier(version),
            digest=None if version.digest is None else version.digest.hex(),
            num_requests=version.num_requests,
            warnings=() if adapter is None else adapter.warnings,
        )

    def stats(self) -> dict[str, Any]:
        """The fields of `Stats` that are about adapters, by name."""
        residency, host = self._parts.residency, self._parts.host
        return {
            "resident_adapters": tuple(islice(self._resident_names(), MAX_NAMES_IN_STATS)),
            "num_adapters": len(self._parts.registry),
            "num_adapter_loads": residency.num_loads,
            "num_adapter_evictions": residency.num_evictions,
            "num_adapter_hits": residency.num_hits,
            "num_adapter_failures": residency.num_failures,
            "num_adapter_steps": self.traffic.num_steps,
            "num_adapters_in_steps": self.traffic.num_adapters,
            "adapter_step_bytes": self.traffic.num_bytes,
            "adapter_load_seconds": residency.load_seconds,
            "adapter_device_bytes": residency.device_bytes,
            "adapter_host_bytes": host.used_bytes,
        }

    def _resident_names(self) -> Iterator[str]:
        """There may be thousands of other names: these are found by content."""
        for resident in self._parts.residency.residents:
            for version in self._parts.registry.versions_of(resident.digest):
                if version.is_current:
                    yield version.name

    def sweep(self) -> None:
        """Deadlines and reports of threads. For every round."""
        for calls in (self._parts.reads, self._parts.copies):
            calls.sweep()
            calls.poll()
        self._parts.host.advance()
        if self._watch is not None:
            self._watch.sweep()

    def refresh(self) -> None:
        """Look in the background whether files changed under their names."""
        for version in list(self._parts.registry):
            self._parts.registry.refresh(version.name)

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        self._parts.residency.check()
        self._parts.reads.check()
        self._parts.copies.check()

    def close(self) -> None:
        """Stop the threads. Raises TransferFailed when one hangs."""
        for calls in (self._parts.reads, self._parts.copies):
            calls.close()

    def _loaded(self, request_id: str, version: AdapterVersion, error: KvartoError | None) -> None:
        self._answer(request_id, () if error is not None else (self.info(version),), error)

    def _answer(self, request_id: str, adapters: tuple[AdapterInfo, ...], error: KvartoError | None) -> None:
        name = None if error is None else "AdapterRefused" if isinstance(error, AdapterError) else type(error).__name__
        message = "" if error is None else str(error)
        self._answers.append(AdapterAnswer(request_id=request_id, adapters=adapters, error=name, message=message))

    def _tier(self, version: AdapterVersion) -> str:
        if self._parts.residency.find(version) is not None:
            return "device"
        if version.digest is not None and version.digest in self._parts.host:
            return "host"
        return "refused" if version.state is VersionState.FAILED else "disk"

    def _known(self) -> str:
        names = [version.name for version in self._parts.registry]
        if not names:
            return "none is; start the server with `--adapter-dir` or `--lora-modules`"
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        return f"{', '.join(f'`{name}`' for name in names[:MAX_SHOWN])}{more} are"
