"""From EngineConfig to what adapters are planned with: names, folders, ranks, sizes. Refuses what cannot work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvarto.adapters.files import AdapterLimits
from kvarto.adapters.source import adapters_in
from kvarto.core.errors import BadAdapter, UsageError
from kvarto.core.strip_type import StripType
from kvarto.engine.config import EngineConfig

DEFAULT_RANK = 64
"""Where adapters are named and no rank is: it covers most that are published, and costs scratch for one step."""
MAX_NAME_CHARS = 256
ADAPTER_DTYPES = ("auto", StripType.Q8, StripType.Q4)


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A name and where its files are."""

    name: str
    path: Path


def max_lora_rank(config: EngineConfig) -> int:
    """The largest rank that steps are planned for; 0: no adapters."""
    if config.max_lora_rank:
        return config.max_lora_rank
    return DEFAULT_RANK if config.adapter_dir or config.lora_modules else 0


def adapter_codes(config: EngineConfig) -> StripType | None:
    """What A and B become in pages; None: they stay what they are in their files."""
    return None if config.adapter_dtype == "auto" else StripType(config.adapter_dtype)


def check_adapter_settings(config: EngineConfig) -> None:
    """Raises UsageError."""
    most = AdapterLimits().max_rank
    if not 0 <= config.max_lora_rank <= most:
        raise UsageError(f"`--max-lora-rank {config.max_lora_rank}` is out of range; give 0 to {most}")
    if config.adapter_dtype not in ADAPTER_DTYPES:
        raise UsageError(f"`--adapter-dtype {config.adapter_dtype}` is not one of {', '.join(ADAPTER_DTYPES)}")
    for flag, value in (
        ("--adapter-host-memory", config.adapter_host_memory),
        ("--adapter-floor-memory", config.adapter_floor_memory),
        ("--kv-floor-memory", config.kv_floor_memory),
        ("--max-adapters-per-step", config.max_adapters_per_step),
        ("--max-requests-per-adapter", config.max_requests_per_adapter),
    ):
        if value < 0:
            raise UsageError(f"`{flag} {value}` is too small; give 0 or more")
    if not (math.isfinite(config.max_adapter_wait_s) and config.max_adapter_wait_s >= 0):
        raise UsageError(f"`--max-adapter-wait-s {config.max_adapter_wait_s}` is no time; give 0 or more seconds")
    list(module_adapters(config))


def roots(config: EngineConfig) -> list[Path]:
    """Folders and files that the operator named; adapters lie inside them, links followed."""
    return [Path(folder) for folder in config.adapter_dir] + [each.path for each in module_adapters(config)]


def module_adapters(config: EngineConfig) -> Iterator[NamedAdapter]:
    """Those of `--lora-modules`. Raises UsageError for what is no `name=path`, and for a name given twice."""
    seen: set[str] = set()
    for text in config.lora_modules:
        name, equals, path = text.partition("=")
        if not equals or not path or not is_name(name):
            raise UsageError(
                f"`--lora-modules {text}` is not `name=path`, with a name of 1 to {MAX_NAME_CHARS} "
                "printable characters and no comma"
            )
        if name in seen:
            raise UsageError(f"`--lora-modules` has the name `{name}` twice; give each adapter a name of its own")
        seen.add(name)
        yield NamedAdapter(name, Path(path))


def named_adapters(config: EngineConfig) -> list[NamedAdapter]:
    """All that are named at start: modules first, then what is in the folders now, except names that are taken.

    Raises UsageError for a folder that cannot be listed.
    """
    found = {each.name: each for each in module_adapters(config)}
    for folder in config.adapter_dir:
        try:
            for name, path in adapters_in(Path(folder)):
                if is_name(name):
                    found.setdefault(name, NamedAdapter(name, path))
        except BadAdapter as error:
            raise UsageError(f"`--adapter-dir {folder}`: {error}") from error
    return list(found.values())


def is_name(name: str) -> bool:
    """Whether clients can call an adapter so; a comma separates names in metrics."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and "," not in name
