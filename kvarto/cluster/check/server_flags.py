"""Memory flags of a server in a container: Kvarto's `--device-memory`, and the share that vLLM's kin take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarto.cluster.check.finding import Edit
from kvarto.cluster.check.manifests import Container
from kvarto.cluster.tree import sequence
from kvarto.core.units import MIB, parse_bytes

DEVICE_FLAG = ("--device",)
KVARTO_FLAGS = ("--device-memory", "--device_memory")
SHARE_FLAGS = ("--gpu-memory-utilization", "--gpu_memory_utilization", "--mem-fraction-static")
DEVICE_MEMORY_ENV = "KVARTO_DEVICE_MEMORY"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with a value, as it stands in `command` or `args`."""

    name: str
    value: str
    path: tuple[str | int, ...]
    """Of the value in the container."""
    is_joined: bool
    """`--flag=value` in one word."""

    def edit(self, container: Container, value: str) -> Edit:
        """Another value."""
        return container.edit(*self.path, value=f"{self.name}={value}" if self.is_joined else value)


def find_flag(container: Container, names: tuple[str, ...]) -> Flag | None:
    """The last of these flags, which is the one that counts."""
    found = None
    for key in ("command", "args"):
        words = [str(word) for word in sequence(container.manifest.get(key))]
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name in names and equals:
                found = Flag(name, value, (key, index), is_joined=True)
            elif word in names and index + 1 < len(words):
                found = Flag(word, words[index + 1], (key, index + 1), is_joined=False)
    return found


def is_kvarto(container: Container) -> bool:
    """Whether it runs `kvarto serve`."""
    words = [str(word) for key in ("command", "args") for word in sequence(container.manifest.get(key))]
    named = any(word.rpartition("/")[2] == "kvarto" for word in words)
    image = str(container.manifest.get("image")).rpartition("/")[2].partition(":")[0].partition("@")[0]
    return "serve" in words and (named or image == "kvarto")


def runs_on_cpu(container: Container) -> bool:
    """Whether Kvarto's server there computes on the CPU, which it does unless told otherwise."""
    flag = find_flag(container, DEVICE_FLAG)
    return flag is None or flag.value == "cpu"


def written_device_memory(container: Container) -> tuple[str, Flag | int] | None:
    """Kvarto's arena as it is written, and where: a flag, or the index of a variable. None where it is not."""
    flag = find_flag(container, KVARTO_FLAGS)
    if flag is not None:
        return flag.value, flag
    for index, name, value in container.env():
        if name == DEVICE_MEMORY_ENV and value is not None:
            return str(value), index
    return None


def device_memory(container: Container) -> tuple[int, Flag | int] | None:
    """The same in bytes; None also for what is no size."""
    written = written_device_memory(container)
    try:
        return None if written is None else (parse_bytes(written[0]), written[1])
    except ValueError:
        return None


def set_device_memory(container: Container, place: Flag | int | None, size_bytes: int) -> Edit:
    """That many bytes, whole MiB, where they were said or as a new flag."""
    text = f"{size_bytes // MIB}MiB"
    if isinstance(place, Flag):
        return place.edit(container, text)
    if isinstance(place, int):
        return container.edit("env", place, "value", value=text)
    words: list[Any] = sequence(container.manifest.get("args"))
    return container.edit("args", value=[*words, KVARTO_FLAGS[0], text])
