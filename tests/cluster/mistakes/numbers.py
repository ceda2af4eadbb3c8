"""Numbers: units, fractions, counts, limits, sums."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.cluster.schemes import SCHEMES
from tests.cluster.manifests import container, correct_manifests, drop_both, limits, requests, set_both, template
from tests.cluster.mistakes.base import (
    COUNTED,
    MEMORY,
    UNIT_MIB,
    UNIT_NAME,
    Change,
    Documents,
    Mistake,
    annotate,
    arena,
    both,
    kai_fraction,
    renamed,
    vllm,
    without_arena,
    without_own_limit,
)


def units() -> Iterator[Mistake]:
    for scheme, name in MEMORY.items():
        unit, unit_name = UNIT_MIB[scheme], UNIT_NAME[scheme]
        right = 16384 // unit
        for text in ("16Gi", "16384Mi"):
            yield Mistake(
                f"unit-{text}", scheme, both(name, text), "memory-unit",
                f"`{name}: {text}` asks for 17,179,869,184 {unit_name}: the resource counts {unit_name} and no bytes; "
                f"write `{right}`",
                both(name, right),
            )  # fmt: skip
        decimal = -(-(17 * 10**9) // (unit << 20))
        yield Mistake(
            "unit-17G", scheme, both(name, "17G"), "memory-unit",
            f"`{name}: 17G` asks for 17,000,000,000 {unit_name}: the resource counts {unit_name} and no bytes; "
            f"write `{decimal}`",
            both(name, decimal),
        )  # fmt: skip
        for text in ("16GiB", "16384 MiB"):
            yield Mistake(
                f"no-quantity-{text}", scheme, both(name, text), "no-quantity",
                f"`{name}: {text}` is no quantity that Kubernetes reads, and {name} counts {unit_name}; write "
                f"`{right}`",
                both(name, right),
            )  # fmt: skip
        if unit == 1:
            yield Mistake(
                "unit-16384m", scheme, both(name, "16384m"), "memory-unit",
                f"`{name}: 16384m` is 16.384 MiB: `m` is a thousandth to Kubernetes; write `16384`",
                both(name, 16384),
            )  # fmt: skip
            yield Mistake(
                "suffix", scheme, both(name, "16k"), "suffix",
                f"`{name}: 16k` stands for 16,000, which not every scheduler reads so; write `16000`",
                both(name, 16000),
            )  # fmt: skip
        for text in (0, "-1"):
            yield Mistake(
                f"not-positive-{text}", scheme, both(name, text), "not-positive",
                f"`{name}: {text}` sets no limit at all; this server needs `{15104 // unit + (unit == 1024)}`",
            )  # fmt: skip


def kai_values() -> Iterator[Mistake]:
    def memory(text: str) -> Change:
        return lambda documents: template(documents)["metadata"]["annotations"].update({"gpu-memory": text})

    for text, right in (
        ("16Gi", "16384"), ("17G", "16213"), ("16GiB", "16384"), ("15104.5", "15105"), ("16k", "16000"),
        ("16384m", "16384"),
    ):  # fmt: skip
        yield Mistake(
            f"memory-{text}", "kai", memory(text), "kai-memory",
            f'`gpu-memory: {text}` is no whole number of MiB; write `"{right}"`', memory(right),
        )  # fmt: skip
    for text, right in (("50", "0.5"), ("1.5", "0.015"), ("100", "0.99")):
        yield Mistake(
            f"fraction-{text}", "kai", without_arena(kai_fraction(text)), "kai-fraction",
            f'`gpu-fraction: {text}` is no part of a GPU, which lies between 0 and 1; write `"{right}"`',
            without_arena(kai_fraction(right)),
        )  # fmt: skip
    yield Mistake(
        "two-limits", "kai", lambda documents: annotate(documents, "gpu-fraction", "0.5"), "two-limits",
        "annotations `gpu-memory` and `gpu-fraction` both set the memory; leave `gpu-fraction` out",
    )  # fmt: skip


def fractions() -> Iterator[Mistake]:
    for scheme, name in COUNTED.items():
        right = limits(correct_manifests(scheme))[name]
        for text in (f"{right - 1}.5", f"{right * 1000 - 500}m"):
            yield Mistake(
                f"fraction-{text}", scheme, both(name, text), "fraction",
                f"`{name}: {text}` is a fraction, and Kubernetes counts {name} in whole numbers; write `{right}`",
            )  # fmt: skip


def requests_and_limits() -> Iterator[Mistake]:
    for scheme, name in COUNTED.items():
        right = limits(correct_manifests(scheme))[name]
        yield Mistake(
            "requests-differ", scheme,
            lambda documents, name=name, right=right: requests(documents).update({name: right + 1}),
            "requests-differ",
            f"`{name}` has request {right + 1} and limit {right}; extended resources can't be over-committed: "
            f"write `{right}` for both",
        )  # fmt: skip
        yield Mistake(
            "requests-only", scheme, lambda documents, name=name: limits(documents).pop(name), "requests-only",
            f"`{name}: {right}` stands under requests only; extended resources need limits too: write `{name}: "
            f"{right}` "
            "under limits",
        )  # fmt: skip


def counts() -> Iterator[Mistake]:
    for scheme, count, dependents in (
        ("hami", "nvidia.com/gpu", ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores")),
        ("volcano", "volcano.sh/vgpu-number",
         ("volcano.sh/vgpu-memory", "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores")),
        ("tencent", "tencent.com/vcuda-core", ("tencent.com/vcuda-memory",)),
    ):  # fmt: skip
        right = limits(correct_manifests(scheme))[count]
        for dependent in dependents:

            def instead(documents: Documents, scheme: str = scheme, dependent: str = dependent) -> None:
                if dependent != MEMORY[scheme]:
                    drop_both(documents, MEMORY[scheme])
                    set_both(documents, dependent, 20)

            def without(documents: Documents, count: str = count, instead: Change = instead) -> None:
                instead(documents)
                drop_both(documents, count)

            yield Mistake(
                f"missing-count-{dependent}", scheme, without, "missing-count",
                f"`{dependent}` without `{count}` limits a device that is never asked for; add `{count}: {right}`",
                instead,
            )  # fmt: skip


def percentages() -> Iterator[Mistake]:
    for scheme, percentage, cores in (
        ("hami", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"),
        ("volcano", "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores"),
    ):
        yield Mistake(
            "two-limits", scheme, both(percentage, 20), "two-limits",
            f"`{percentage}` and `{MEMORY[scheme]}` both set the memory; leave `{percentage}` out",
        )  # fmt: skip
        yield Mistake(
            "cores-150", scheme, both(cores, 150), "percentage",
            f"`{cores}: 150` is a percentage of one GPU; write at most `100`", both(cores, 100),
        )  # fmt: skip

        for text in ("0.2", "200m"):
            yield Mistake(
                f"cores-{text}", scheme, both(cores, text), "percentage",
                f"`{cores}: {text}` is a share, and {cores} counts percent; write `20`", both(cores, 20),
            )  # fmt: skip
        yield Mistake(
            "cores-20%", scheme, both(cores, "20%"), "no-quantity",
            f"`{cores}: 20%` is no quantity that Kubernetes reads; write `20`", both(cores, 20),
        )  # fmt: skip

        def by_percentage(value: object, scheme: str = scheme, percentage: str = percentage) -> Change:
            def change(documents: Documents) -> None:
                drop_both(documents, MEMORY[scheme])
                set_both(documents, percentage, value)

            return change

        yield Mistake(
            "percentage-120", scheme, by_percentage(120), "percentage",
            f"`{percentage}: 120` is a percentage of one GPU; write at most `100`", by_percentage(100),
        )  # fmt: skip
        yield Mistake(
            "percentage-0.2", scheme, by_percentage("0.2"), "percentage",
            f"`{percentage}: 0.2` is a share, and {percentage} counts percent; write `20`", by_percentage(20),
        )  # fmt: skip
        yield Mistake(
            "percentage-0", scheme, by_percentage(0), "not-positive",
            f"`{percentage}: 0` sets no limit at all; leave it out to say so, or write a number from 1 to 100",
            lambda documents, scheme=scheme: drop_both(documents, MEMORY[scheme]),
        )  # fmt: skip
    for written, right in ((150, 200), (101, 200), (250, 300)):
        yield Mistake(
            f"vcuda-core-{written}", "tencent", both("tencent.com/vcuda-core", written), "vcuda-core",
            f"`tencent.com/vcuda-core: {written}` is neither below 100 nor whole GPUs of 100 each; write `{right}`, or "
            "`100` for one GPU",
            both("tencent.com/vcuda-core", right),
        )  # fmt: skip


def two_schemes() -> Iterator[Mistake]:
    for scheme in ("mig", "time-slicing", "mps", "volcano", "aliyun", "tencent"):
        part = COUNTED[scheme]
        yield Mistake(
            "two-schemes", scheme, both("nvidia.com/gpu", 1), "two-schemes",
            f"`nvidia.com/gpu` asks for a whole card beside `{part}`, a part of one; leave `nvidia.com/gpu` out",
        )  # fmt: skip
    yield Mistake(
        "two-schemes", "kai", both("nvidia.com/gpu", 1), "two-schemes",
        "`nvidia.com/gpu` asks for a whole card beside `gpu-memory`, a part of one; leave `nvidia.com/gpu` out",
    )  # fmt: skip


def replicas() -> Iterator[Mistake]:
    for scheme in ("time-slicing", "mps"):
        for count in (2, 3):
            yield Mistake(
                f"several-{count}", scheme, both("nvidia.com/gpu.shared", count), "several-replicas",
                f"`nvidia.com/gpu.shared: {count}` takes {count} turns on cards that are shared, often on the "
                "same one, "
                "and no more memory; write `1`",
            )  # fmt: skip
        yield Mistake(
            "not-renamed", scheme, renamed("nvidia.com/gpu.shared", "nvidia.com/gpu"), "replica-name",
            "`nvidia.com/gpu`, but the plugin's configuration names its replicas `nvidia.com/gpu.shared`; write that",
        )  # fmt: skip
    yield Mistake(
        "several-2", "mig", both("nvidia.com/mig-1g.20gb", 2), "several-instances",
        "`nvidia.com/mig-1g.20gb: 2`: a CUDA process sees one instance; write `1`, or take a larger profile",
    )  # fmt: skip


def beyond_the_card() -> Iterator[Mistake]:
    for scheme, name in MEMORY.items():
        unit = UNIT_MIB[scheme]
        wrong, right = 98304 // unit, 81559 // unit
        yield Mistake(
            "over-card", scheme, both(name, wrong), "over-card",
            f"`{name}: {wrong}` is 96.00 GiB, more than the 79.65 GiB of `H100-80`; at most `{right}` fits",
            both(name, right),
        )  # fmt: skip
    yield Mistake(
        "over-card", "kai", lambda documents: annotate(documents, "gpu-memory", "98304"), "over-card",
        "`gpu-memory: 98304` is 96.00 GiB, more than the 79.65 GiB of `H100-80`; at most `81559` fits",
        lambda documents: annotate(documents, "gpu-memory", "81559"),
    )  # fmt: skip

    def second(first: int, other: int) -> Change:
        def change(documents: Documents) -> None:
            set_both(documents, "aliyun.com/gpu-mem", first)
            resources = {"limits": {"aliyun.com/gpu-mem": other}}
            template(documents)["spec"]["containers"].append(
                {"name": "other", "image": "kvarto:2", "args": ["serve", "demo"], "resources": resources}
            )
            container(documents)["args"] = ["serve", "demo"]

        return change

    yield Mistake(
        "sum-over-card", "aliyun", second(50, 50), "sum-over-card",
        "`aliyun.com/gpu-mem` of 2 containers adds up to 100 GiB, and all land on one GPU: more than the 79.65 GiB of "
        "`H100-80`; at most `79` in all fits",
        second(39, 39),
    )  # fmt: skip


def flags() -> Iterator[Mistake]:
    for scheme in ("hami", "whole", "cpu"):
        for text, right in (("2Gi", "2048MiB"), ("2000Mi", "2000MiB")):
            yield Mistake(
                f"arena-size-{text}", scheme, arena(text), "arena-size",
                f"`--device-memory {text}` is no size to the server; write `{right}`", arena(right),
            )  # fmt: skip
    for scheme, granted, right in (
        ("whole", "79.65 GiB", 80791), ("mig", "19.62 GiB", 19322), ("time-slicing", "15.93 GiB", 15543),
        ("mps", "15.93 GiB", 15543), ("vgpu", "14.75 GiB", 14336), ("hami", "14.75 GiB", 14336),
        ("volcano", "14.75 GiB", 14336), ("aliyun", "15.00 GiB", 14592), ("tencent", "14.75 GiB", 14336),
        ("kai", "14.75 GiB", 14336), ("dra", "14.75 GiB", 14336),
    ):  # fmt: skip
        yield Mistake(
            "arena-over-limit", scheme, arena("80000MiB" if scheme != "whole" else "81000MiB"), "arena-over-limit",
            f"`--device-memory` is {'78.12' if scheme != 'whole' else '79.10'} GiB, and with about 768.00 MiB that the "
            f"driver takes beyond the {granted} that this container may use; write `{right}MiB`, or ask for more",
            arena(f"{right}MiB"),
        )  # fmt: skip
    yield Mistake(
        "arena-over-limit", "cpu", arena("17000MiB"), "arena-over-limit",
        "`--device-memory` is 16.60 GiB, and with about 512.00 MiB that processes and libraries take beyond the "
        "17.00 GiB "
        "that this container may use; write `16896MiB`, or ask for more",
        arena("16896MiB"),
    )  # fmt: skip
    yield Mistake(
        "no-limit", "time-slicing", without_arena(without_own_limit), "no-limit",
        "nothing limits memory under time-slicing, and this server is not told how much it may take; its part of "
        "the card leaves `--device-memory 15543MiB`",
        lambda documents: (
            without_arena(without_own_limit)(documents),
            container(documents)["args"].extend(["--device-memory", "15543MiB"]),
        ),
    )  # fmt: skip
    for scheme, percent in (("aliyun", 18), ("kai", 18), ("dra", 18)):
        title = SCHEMES[scheme].facts.title
        yield Mistake(
            "share-of-card", scheme, vllm(["--gpu-memory-utilization", "0.9"]), "share-of-card",
            f"`--gpu-memory-utilization 0.9` is a share of the whole card, of which {title} means {percent} % for this "
            f"container; write `0.{percent}`",
            vllm(["--gpu-memory-utilization", f"0.{percent}"]),
        )  # fmt: skip
    yield Mistake(
        "no-limit", "dra", without_arena(without_own_limit), "no-limit",
        "nothing limits memory under DRA by capacity, and this server is not told how much it may take; its part of "
        "the card leaves `--device-memory 14336MiB`",
        lambda documents: (
            without_arena(without_own_limit)(documents),
            container(documents)["args"].extend(["--device-memory", "14336MiB"]),
        ),
    )  # fmt: skip
    for written in (["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization=0.9"]):
        right = [word.replace("0.9", "0.2") for word in written]
        yield Mistake(
            f"share-{len(written)}", "time-slicing", vllm(written), "share-of-card",
            "`--gpu-memory-utilization 0.9` is a share of the whole card, of which time-slicing means 20 % for this "
            "container; write `0.2`",
            vllm(right),
        )  # fmt: skip
