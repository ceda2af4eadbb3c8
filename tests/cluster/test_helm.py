"""The chart, rendered by Helm's own engine: for every scheme the same objects as `kvarto k8s render`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import helm_python
import pytest

from kvarto.cluster.cards import Card, find_card
from kvarto.cluster.check import check
from kvarto.cluster.deployment import Workload
from kvarto.cluster.need import Need
from kvarto.cluster.render import render
from kvarto.cluster.schemes import SCHEMES, ClusterOptions
from kvarto.cluster.yaml_text import load_all
from kvarto.core.units import GIB, MIB
from tests.cluster.manifests import plain

CHART = Path(__file__).parents[2] / "deploy/helm/kvarto"
CARD = find_card("A100-80")
OPTIONS = ClusterOptions(card=CARD, memory_factor=3)
HELM_LABELS = ("app.kubernetes.io/managed-by", "helm.sh/chart")
NEEDS = [Need(14 * GIB, 768 * MIB, 3 * GIB), Need(1234 * MIB, 512 * MIB, 2100 * MIB)]


def values(scheme: str, need: Need, **more: Any) -> dict[str, Any]:
    """What a person would write for that need."""
    gpu: dict[str, Any] = {
        "scheme": scheme, "overheadMiB": need.overhead_bytes // MIB, "cardMiB": CARD.memory_bytes // MIB,
        "memoryFactor": 3,
    }  # fmt: skip
    if scheme == "mig":
        profiles = [each for each in CARD.profiles if each.memory_bytes >= need.limit_bytes]
        gpu["migProfile"] = profiles[0].name
    gpu |= more.pop("gpu", {})
    sizes = {"deviceMemoryMiB": need.arena_bytes // MIB, "hostMemoryMiB": need.host_bytes // MIB}
    return {"model": "org/name:Q4_K_M", **sizes, "gpu": gpu, **more}


def helm(settings: dict[str, Any]) -> list[Any]:
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(settings)
        files = chart.render(settings, name="chat", namespace="models")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    documents = [plain(document) for text in texts for document in load_all(text)]
    for document in documents:
        for label in HELM_LABELS:
            document["metadata"].get("labels", {}).pop(label, None)
    return sorted(documents, key=lambda document: document["kind"])


def ours(scheme: str, need: Need, options: ClusterOptions, **settings: Any) -> list[Any]:
    workload = Workload(name="chat", namespace="models", model="org/name:Q4_K_M", image="kvarto:latest", **settings)
    documents = plain(list(render(SCHEMES[scheme], workload, need, options).documents))
    return sorted(documents, key=lambda document: document["kind"])


def of_cpu(need: Need) -> Need:
    return Need(need.arena_bytes, 0, need.arena_bytes + need.host_bytes)


@pytest.mark.parametrize("need", NEEDS, ids=("even", "odd"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_chart_makes_the_same_objects(scheme: str, need: Need) -> None:
    need = of_cpu(need) if scheme == "cpu" else need
    documents = helm(values(scheme, need))
    assert documents == ours(scheme, need, OPTIONS)
    assert check(documents, replace(OPTIONS, overhead_bytes=need.overhead_bytes)) == []


def test_further_settings_are_the_same_too() -> None:
    need = NEEDS[0]
    settings = values(
        "kai", need, replicas=3, flags=["--dtype", "bf16", "--max-num-seqs", "8"], modelClaim="weights",
        runtimeClassName="nvidia", startLimitSeconds=600, drainSeconds=60, gpu={"limiter": True, "queue": "team-a"},
    )  # fmt: skip
    options = ClusterOptions(card=CARD, queue="team-a")
    assert helm(settings) == ours(
        "kai", need, options, replicas=3, flags=("--dtype", "bf16", "--max-num-seqs", "8"), model_claim="weights",
        runtime_class="nvidia", start_limit_s=600, drain_s=60, limiter=True,
    )  # fmt: skip
    mib = values("aliyun", need, gpu={"aliyunUnit": "MiB"})
    assert helm(mib) == ours("aliyun", need, ClusterOptions(card=CARD, aliyun_unit="MiB"))


@pytest.mark.parametrize("scheme", ["cpu", "hami", "kai", "dra", "time-slicing"])
def test_a_million_is_printed_in_digits(scheme: str) -> None:
    need = Need(1_500_000 * MIB, 0, 2_000_000 * MIB)
    card = Card("huge", 4_000_000 * MIB)
    settings = values(scheme, need, replicas=1_000_000, gpu={"cardMiB": 4_000_000, "memoryFactor": 1})
    need = of_cpu(need) if scheme == "cpu" else need
    expected = ours(scheme, need, ClusterOptions(card=card), replicas=1_000_000)
    if scheme == "cpu":
        settings["hostMemoryMiB"] = 3_500_000
    assert helm(settings) == expected


def test_names_that_look_like_something_else_stay_text() -> None:
    settings = values("kai", NEEDS[0], modelClaim="123", runtimeClassName="on", gpu={"queue": "1e3"})
    options = ClusterOptions(card=CARD, queue="1e3")
    assert helm(settings) == ours("kai", NEEDS[0], options, model_claim="123", runtime_class="on")
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values("time-slicing", NEEDS[0]), name="123", namespace="007")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    documents = [plain(document) for text in texts for document in load_all(text)]
    assert check(documents, replace(OPTIONS, overhead_bytes=NEEDS[0].overhead_bytes)) == []


@pytest.mark.parametrize("scheme", ["time-slicing", "mps"])
def test_a_card_is_not_divided_into_one_part(scheme: str) -> None:
    with pytest.raises(helm_python.HelmError, match="has no two parts of"):
        helm(values(scheme, Need(60 * GIB, 768 * MIB, GIB)))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(helm_python.HelmError, match="needs gpu.migProfile"):
        helm(values("mig", NEEDS[0], gpu={"migProfile": ""}))
    with pytest.raises(helm_python.HelmError, match="limits already"):
        helm(values("hami", NEEDS[0], gpu={"limiter": True}))


@pytest.mark.parametrize(
    "wrong",
    [{"gpu": {"scheme": "cgpu"}}, {"deviceMemoryMiB": "8Gi"}, {"gpu": {"migProfile": "1g.10gb+me"}}, {"modle": "x"}],
)
def test_values_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    settings = values("hami", NEEDS[0])
    settings["gpu"] |= wrong.pop("gpu", {})
    with pytest.raises(helm_python.HelmError):
        helm(settings | wrong)


def test_the_chart_passes_helms_own_lint() -> None:
    for scheme in SCHEMES:
        report = helm_python.lint(CHART, values(scheme, NEEDS[0]), strict=True, kube_version="v1.36.0")
        assert [each for each in report["messages"] if each["severity"] > 1] == []
        assert report["errors"] == []


def test_defaults_serve_the_demo_model_on_a_cpu() -> None:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(name="kvarto", namespace="default")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    documents = [plain(document) for text in texts for document in load_all(text)]
    assert check(documents, ClusterOptions()) == []
