"""Rendering: every scheme gets at least what is needed and at most a unit more, and the file says so itself."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from kvarto.cluster.cards import CARDS, find_card
from kvarto.cluster.check import check
from kvarto.cluster.deployment import Workload
from kvarto.cluster.need import Need
from kvarto.cluster.render import read_grant, render
from kvarto.cluster.schemes import SCHEMES, ClusterOptions, find_scheme
from kvarto.cluster.yaml_text import dump_all, load_all
from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, MIB, parse_bytes
from tests.cluster.manifests import CPU_NEED, GPU_SCHEMES, NEED, OPTIONS, container, of_kind, plain, template

UNIT_BYTES = {"hami": MIB, "volcano": MIB, "aliyun": GIB, "tencent": 256 * MIB, "kai": MIB, "dra": MIB, "vgpu": MIB}


def needs(seed: int, count: int) -> list[Need]:
    rng = random.Random(seed)
    return [Need(rng.randrange(64, 30_000) * MIB, 768 * MIB, rng.randrange(2_000, 4_000) * MIB) for _ in range(count)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_survive_the_way_into_a_file_and_back(scheme: str) -> None:
    for need in needs(11, 6):
        if scheme == "cpu":
            need = replace(need, overhead_bytes=0, host_bytes=need.arena_bytes + need.host_bytes)
        rendered = render(SCHEMES[scheme], Workload(), need, OPTIONS)
        text = dump_all(rendered.documents)
        parsed = load_all(text)
        assert dump_all(parsed) == text
        assert plain(parsed) == plain(list(rendered.documents))
        granted = read_grant(parsed, OPTIONS)
        assert granted == rendered.parts.granted_bytes
        assert granted >= need.limit_bytes
        if scheme in UNIT_BYTES:
            assert granted - need.limit_bytes < UNIT_BYTES[scheme]
        args = container(parsed)["args"]
        assert parse_bytes(args[args.index("--device-memory") + 1]) == need.arena_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("version", [(1, 34), (1, 36), (1, 37)])
def test_rendered_manifests_have_no_mistake(scheme: str, version: tuple[int, int]) -> None:
    options = replace(OPTIONS, kubernetes=version)
    workload = Workload(name="chat", namespace="models", model_claim="weights", runtime_class="nvidia", replicas=3)
    rendered = render(SCHEMES[scheme], workload, CPU_NEED if scheme == "cpu" else NEED, options)
    assert check(load_all(dump_all(rendered.documents)), options) == []


@pytest.mark.parametrize("scheme", GPU_SCHEMES)
def test_factors_and_units_of_the_cluster_are_kept_to(scheme: str) -> None:
    options = replace(OPTIONS, memory_factor=10, aliyun_unit="MiB")
    rendered = render(SCHEMES[scheme], Workload(), NEED, options)
    assert read_grant(load_all(dump_all(rendered.documents)), options) == rendered.parts.granted_bytes
    limits = container(list(rendered.documents))["resources"]["limits"]
    if scheme == "hami":
        assert limits["nvidia.com/gpumem"] == 1511
    if scheme == "aliyun":
        assert limits["aliyun.com/gpu-mem"] == 15104


def test_the_pod_is_locked_down_and_drains() -> None:
    documents = list(render(find_scheme("hami"), Workload(drain_s=120), NEED, OPTIONS).documents)
    pod = template(documents)["spec"]
    server = container(documents)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    wait_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == wait_s + 120
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 900
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert server["livenessProbe"]["httpGet"]["path"] == "/livez"
    selector = of_kind(documents, "Deployment")["spec"]["selector"]["matchLabels"]
    assert selector == of_kind(documents, "Service")["spec"]["selector"]
    assert selector.items() <= template(documents)["metadata"]["labels"].items()


@pytest.mark.parametrize("scheme", [name for name in GPU_SCHEMES if name not in ("mig", "time-slicing", "mps")])
def test_more_than_the_card_is_refused(scheme: str) -> None:
    with pytest.raises(UsageError, match=r"more than `H100-80` has \(79.65 GiB\)"):
        render(SCHEMES[scheme], Workload(), replace(NEED, arena_bytes=80 * GIB), OPTIONS)


@pytest.mark.parametrize(
    ("scheme", "factor", "says"),
    [
        ("aliyun", 1, "counts in 1.00 GiB: 22.48 GiB are 23, and `L4` has 22"),
        ("tencent", 1, "counts in 256.00 MiB: 22.48 GiB are 90, and `L4` has 89"),
        ("hami", 1024, "counts in 1.00 GiB"), ("volcano", 256, "counts in 256.00 MiB"),
    ],
)  # fmt: skip
def test_what_is_more_than_the_card_once_it_is_rounded_is_refused(scheme: str, factor: int, says: str) -> None:
    """The card's last MiB are no whole unit: no node could ever place the pod."""
    need = replace(NEED, arena_bytes=23_020 * MIB - NEED.overhead_bytes)
    options = ClusterOptions(card=find_card("L4"), memory_factor=factor)
    with pytest.raises(UsageError, match=re.escape(says)):
        render(SCHEMES[scheme], Workload(), need, options)


@pytest.mark.parametrize("scheme", ["mig", "time-slicing", "mps"])
def test_schemes_that_divide_a_card_want_to_know_it(scheme: str) -> None:
    with pytest.raises(UsageError, match=f"`--scheme {scheme}` depends on the card"):
        render(SCHEMES[scheme], Workload(), NEED, ClusterOptions())


@pytest.mark.parametrize("scheme", ["time-slicing", "mps"])
def test_a_card_is_not_divided_into_one_part(scheme: str) -> None:
    with pytest.raises(UsageError, match=r"has no two of .*; take `--scheme whole`"):
        render(SCHEMES[scheme], Workload(), replace(NEED, arena_bytes=50 * GIB), OPTIONS)


def test_claims_by_capacity_need_a_cluster_that_knows_them() -> None:
    with pytest.raises(UsageError, match=r"Kubernetes 1.33 does not know"):
        render(find_scheme("dra"), Workload(), NEED, replace(OPTIONS, kubernetes=(1, 33)))
    with pytest.raises(UsageError, match=r"manifests are for Kubernetes 1.30 or later"):
        render(find_scheme("whole"), Workload(), NEED, replace(OPTIONS, kubernetes=(1, 29)))
    with pytest.raises(UsageError, match="`--scheme cgpu` is unknown"):
        find_scheme("cgpu")


@pytest.mark.parametrize("card", [card.name for card in CARDS.values() if card.profiles])
def test_mig_requests_name_a_profile_of_the_card(card: str) -> None:
    options = ClusterOptions(card=find_card(card))
    need = Need(int(options.card.memory_bytes * 0.2), 0, GIB) if options.card else NEED
    rendered = render(find_scheme("mig"), Workload(), need, options)
    (name,) = rendered.parts.resources
    assert name in {profile.resource for profile in options.card.profiles if options.card}
    assert check(load_all(dump_all(rendered.documents)), options) == []
