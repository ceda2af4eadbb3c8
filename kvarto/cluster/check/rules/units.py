"""Numbers: units of the resource, whole numbers, ranges. `gpumem: 16Gi` asks for sixteen thousand million MiB."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Any

from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Container, Files, Pod
from kvarto.cluster.check.server_flags import device_memory, is_kvarto
from kvarto.cluster.check.vocabulary import (
    LEAST_BYTES,
    PERCENT,
    PERCENTAGES,
    TENCENT_CORE,
    is_extended,
    unit_bytes,
    unit_name,
)
from kvarto.cluster.quantity import means_bytes, means_mebibytes, parse_quantity, suffix_of, whole_number
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.kai import FRACTION, MEMORY
from kvarto.cluster.tree import dig
from kvarto.core.units import MIB, parse_bytes


def amounts(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Values of extended resources."""
    for container in files.containers:
        seen: set[tuple[str, str]] = set()
        for kind, name, value in container.amounts():
            if is_extended(name) and (name, str(value)) not in seen:
                seen.add((name, str(value)))  # the same in requests and limits is one mistake
                yield from _amount(container, kind, name, value, options)


def kai_annotations(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """`gpu-memory` is MiB, `gpu-fraction` a share, both as text."""
    for pod in files.pods:
        memory, fraction = (dig(pod.template, "metadata", "annotations", name) for name in (MEMORY, FRACTION))
        if memory is not None and not whole_number(memory):
            yield _kai_memory(pod, str(memory))
        if fraction is not None:
            yield from _kai_fraction(pod, str(fraction))


def _amount(container: Container, kind: str, name: str, value: Any, options: ClusterOptions) -> Iterator[Finding]:
    path = ("resources", kind, name)
    unit = unit_bytes(name, options)
    try:
        number = parse_quantity(value)
    except ValueError:
        yield _no_quantity(container, kind, name, value, unit)
        return
    written = f"`{name}: {value}`"
    if unit is not None and means_bytes(value):
        right = ceil(number / unit)
        message = (
            f"{written} asks for {_commas(number)} {unit_name(unit)}: the resource counts {unit_name(unit)} and no "
            f"bytes; write `{right}`"
        )
        yield container.finding("memory-unit", path, message, *container.set_amount(name, right))
    elif unit is not None and means_mebibytes(value) and 0 < number * unit < LEAST_BYTES:
        right = ceil(number * 1000 * MIB / unit)
        message = (
            f"{written} is {float(number):g} {unit_name(unit)}: `m` is a thousandth to Kubernetes; write `{right}`"
        )
        yield container.finding("memory-unit", path, message, *container.set_amount(name, right))
    elif name in PERCENT and 0 < number < 1:
        right = ceil(number * 100)
        message = f"{written} is a share, and {name} counts percent; write `{right}`"
        yield container.finding("percentage", path, message, *container.set_amount(name, right))
    elif number < 0 or (number == 0 and (unit is not None or name in PERCENTAGES)):
        yield _not_positive(container, kind, name, value, unit, options.overhead_bytes)
    elif number.denominator != 1:
        right = ceil(number)
        message = f"{written} is a fraction, and Kubernetes counts {name} in whole numbers; write `{right}`"
        yield container.finding("fraction", path, message, *container.set_amount(name, right))
    elif suffix_of(value) and (unit is not None or name in PERCENT):
        message = f"{written} stands for {_commas(number)}, which not every scheduler reads so; write `{int(number)}`"
        yield container.finding("suffix", path, message, *container.set_amount(name, int(number)))
    else:
        yield from _range(container, kind, name, int(number))


def _no_quantity(container: Container, kind: str, name: str, value: Any, unit: int | None) -> Finding:
    """`16GiB` is no quantity of Kubernetes, yet people know what it means."""
    message = f"`{name}: {value!s:.80}` is no quantity that Kubernetes reads"
    percent = whole_number(str(value).removesuffix("%").strip()) if name in PERCENT else None
    if percent is not None:
        edits = container.set_amount(name, percent)
        return container.finding("no-quantity", ("resources", kind, name), f"{message}; write `{percent}`", *edits)
    try:
        right = ceil(Fraction(parse_bytes(str(value)), unit)) if unit else None
    except ValueError:
        right = None
    if right is None or unit is None:
        return container.finding("no-quantity", ("resources", kind, name), f"{message}; write a whole number")
    message = f"{message}, and {name} counts {unit_name(unit)}; write `{right}`"
    return container.finding("no-quantity", ("resources", kind, name), message, *container.set_amount(name, right))


def _not_positive(
    container: Container, kind: str, name: str, value: Any, unit: int | None, overhead_bytes: int
) -> Finding:
    path = ("resources", kind, name)
    if name in PERCENTAGES:
        message = f"`{name}: {value}` sets no limit at all; leave it out to say so, or write a number from 1 to 100"
        return container.finding("not-positive", path, message, *container.drop_amount(name))
    if unit is None:
        message = f"`{name}: {value}` asks for nothing; write `1`, or leave it out"
        return container.finding("not-positive", path, message, *container.set_amount(name, 1))
    said = device_memory(container) if is_kvarto(container) else None
    if said is not None:
        right = ceil(Fraction(said[0] + overhead_bytes, unit))
        message = f"`{name}: {value}` sets no limit at all; this server needs `{right}`"
        return container.finding("not-positive", path, message, *container.set_amount(name, right))
    message = f"`{name}: {value}` sets no limit at all; leave it out to say so, or write how many {unit_name(unit)}"
    return container.finding("not-positive", path, message, *container.drop_amount(name))


def _range(container: Container, kind: str, name: str, number: int) -> Iterator[Finding]:
    path = ("resources", kind, name)
    if name in PERCENT and number > 100:
        message = f"`{name}: {number}` is a percentage of one GPU; write at most `100`"
        yield container.finding("percentage", path, message, *container.set_amount(name, 100))
    elif name == TENCENT_CORE and number > 100 and number % 100:
        right = -(-number // 100) * 100
        message = (
            f"`{name}: {number}` is neither below 100 nor whole GPUs of 100 each; write `{right}`, or `100` for one GPU"
        )
        yield container.finding("vcuda-core", path, message, *container.set_amount(name, right))


def _kai_memory(pod: Pod, text: str) -> Finding:
    path = ("metadata", "annotations", MEMORY)
    message = f"`{MEMORY}: {text:.80}` is no whole number of MiB"
    try:
        size_bytes = parse_quantity(text) * (1 if means_bytes(text) else MIB)
        if means_mebibytes(text) and size_bytes < LEAST_BYTES:
            size_bytes *= 1000
    except ValueError:
        try:
            size_bytes = Fraction(parse_bytes(text))
        except ValueError:
            return pod.finding("kai-memory", path, f"{message}; write one, such as `16384`")
    if size_bytes <= 0:
        message = f"`{MEMORY}: {text}` asks for no memory; leave it out, or write how many MiB"
        return pod.finding("kai-memory", path, message, pod.edit(*path))
    right = str(ceil(size_bytes / MIB))
    return pod.finding("kai-memory", path, f'{message}; write `"{right}"`', pod.edit(*path, value=right))


def _kai_fraction(pod: Pod, text: str) -> Iterator[Finding]:
    path = ("metadata", "annotations", FRACTION)
    try:
        share = float(text)
    except ValueError:
        yield pod.finding("kai-fraction", path, f"`{FRACTION}: {text}` is no number; write a share such as `0.25`")
        return
    if 0 < share < 1:
        return
    message = f"`{FRACTION}: {text}` is no part of a GPU, which lies between 0 and 1"
    if 1 < share <= 100:
        right = f"{share / 100:g}" if share < 100 else "0.99"
        yield pod.finding("kai-fraction", path, f'{message}; write `"{right}"`', pod.edit(*path, value=right))
    else:
        yield pod.finding("kai-fraction", path, f"{message}; leave it out to ask for a whole one", pod.edit(*path))


def _commas(number: Fraction) -> str:
    return f"{int(number):,}" if number.denominator == 1 else f"{float(number):,.1f}"
