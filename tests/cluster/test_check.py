"""Checking in general: manifests of any shape, comments kept, corrections that converge, schemas by version."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest

from kvarto.cluster.cards import find_card
from kvarto.cluster.check import Finding, Severity, apply, check, correct
from kvarto.cluster.check.finding import ABSENT, Edit
from kvarto.cluster.schemes import SCHEMES, ClusterOptions
from kvarto.cluster.yaml_text import dump_all, load_all
from kvarto.core.errors import BadFile, UsageError
from tests.cluster.manifests import OPTIONS, correct_manifests, limits, of_kind, plain, template
from tests.cluster.mistakes import all_mistakes

JUNK: tuple[Any, ...] = (
    None, 0, -1, 1.5, True, "", "16Gi", "nvidia.com/gpu", [], {}, [None], [1, "x"], {"x": None}, [[]],
    float("inf"), "inf", "nan", "1e999", "9" * 5000, "1" * 40 + "Gi", 10**40,
)  # fmt: skip


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in a document, but for what makes it a Kubernetes object."""
    found = [path] if path and path not in (("kind",), ("apiVersion",)) else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def test_no_shape_of_a_manifest_is_a_crash() -> None:
    """Random places of manifests, wrong ones too, hold random junk: findings or none, and never another error."""
    rng = random.Random(17)
    mistakes = all_mistakes()
    num_findings = 0
    for _ in range(400):
        documents = rng.choice(mistakes).wrong() if rng.random() < 0.5 else correct_manifests(rng.choice(list(SCHEMES)))
        for _ in range(rng.randrange(1, 4)):
            document = rng.randrange(len(documents))
            options = places(documents[document])
            apply(documents, [Edit(document, rng.choice(options), copy.deepcopy(rng.choice(JUNK)))])
        try:
            num_findings += len(check(documents, OPTIONS))
            if rng.random() < 0.1:
                correct(documents, OPTIONS)
        except BadFile:
            continue  # it no longer is a Kubernetes object
    assert num_findings > 250


def test_corrections_converge_however_many_mistakes_there_are() -> None:
    """Several mistakes in one set of manifests: each round mends one, and nothing is broken by it."""
    rng = random.Random(23)
    by_scheme: dict[str, list[Any]] = {}
    for mistake in all_mistakes():
        by_scheme.setdefault(mistake.scheme, []).append(mistake)
    for _ in range(40):
        scheme = rng.choice(sorted(by_scheme))
        documents = correct_manifests(scheme)
        for mistake in rng.sample(by_scheme[scheme], 3):
            try:
                mistake.change(documents)
            except (KeyError, ValueError, IndexError):
                continue  # what it would change is gone
        fixed, left = correct(documents, OPTIONS)
        assert [finding for finding in left if finding.edits] == []
        assert correct(fixed, OPTIONS) == (fixed, left), "mending twice changes nothing"


@pytest.mark.parametrize("text", ["inf", "1e400", "nan", "9" * 5000])
@pytest.mark.parametrize("name", ["gpu-fraction", "gpu-memory"])
def test_absurd_numbers_in_annotations_are_findings(name: str, text: str) -> None:
    documents = correct_manifests("kai")
    template(documents)["metadata"]["annotations"] = {name: text}
    assert {finding.rule for finding in check(documents, OPTIONS)} & {"kai-fraction", "kai-memory"}


def test_as_many_mistakes_as_there_are_objects_are_mended() -> None:
    pod = """\
apiVersion: v1
kind: Pod
metadata: {name: p%d}
spec:
  nodeName: n
  containers: [{name: c, image: x, resources: {limits: {nvidia.com/gpumem: 16Gi}}}]
"""
    documents = [document for number in range(36) for document in load_all(pod % number)]  # three mistakes each
    fixed, left = correct(documents, OPTIONS)
    assert left == []
    together: list[Any] = [{"apiVersion": "v1", "kind": "List", "items": documents}]
    fixed_together, left = correct(together, OPTIONS)
    assert left == []
    assert plain(fixed_together[0]["items"]) == plain(fixed)


def test_what_cannot_be_mended_in_one_object_is_mended_in_the_next() -> None:
    """The same message, and in the first pod something stands in the way of the edits."""
    documents = [template(correct_manifests("hami")) for _ in range(2)]
    for document, selector in zip(documents, ("text", {}), strict=True):
        document.update(apiVersion="v1", kind="Pod")
        document["metadata"]["name"] = "p"
        document["spec"].update(nodeName="n", nodeSelector=selector)
    fixed, left = correct(documents, OPTIONS)
    assert [finding.document for finding in left if finding.rule == "node-name"] == [0]
    assert fixed[1]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "n"}


def test_comments_and_order_survive_a_correction() -> None:
    text = """\
# The chat model.
apiVersion: v1
kind: Pod
metadata:
  name: chat   # short
  labels: {app: chat}
spec:
  containers:
  - name: server
    image: "kvarto:1"   # pinned
    args: [serve, demo, --device, "cuda:0", --device-memory, 8GiB]
    resources:
      limits:
        nvidia.com/gpu: 1
        # what it may take
        nvidia.com/gpumem: 16Gi
"""
    fixed, left = correct(load_all(text), OPTIONS)
    assert left == []
    assert dump_all(fixed) == text.replace("16Gi", "16384")


def test_findings_say_where_and_how_for_programs_too() -> None:
    documents = correct_manifests("hami")
    limits(documents)["nvidia.com/gpumem"] = "16Gi"
    (finding,) = [each for each in check(documents, OPTIONS) if each.rule == "memory-unit"]
    assert finding.as_dict() == {
        "rule": "memory-unit",
        "severity": "error",
        "where": "Deployment kvarto, container server",
        "document": 0,
        "path": "spec.template.spec.containers.0.resources.limits.nvidia.com/gpumem",
        "message": finding.message,
        "edits": [
            {
                "document": 0,
                "path": f"/spec/template/spec/containers/0/resources/{kind}/nvidia.com~1gpumem",
                "op": "add",
                "value": 16384,
            }
            for kind in ("requests", "limits")
        ],
    }


def test_edits_set_append_and_remove() -> None:
    documents: list[Any] = [{"a": {"b": [1]}, "c": 2}]
    apply(documents, [Edit(0, ("a", "b", 1), 5), Edit(0, ("x", "y", "z"), 7), Edit(0, ("c",))])
    assert documents == [{"a": {"b": [1, 5]}, "x": {"y": {"z": 7}}}]
    assert Edit(0, ("c",)).value is ABSENT


def test_pods_are_found_in_what_others_defined() -> None:
    pod = template(correct_manifests("volcano"))
    limits_ = pod["spec"]["containers"][0]["resources"]["limits"]
    limits_["volcano.sh/vgpu-memory"] = "16Gi"
    job = {
        "apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "j"},
        "spec": {"schedulerName": pod["spec"].pop("schedulerName"), "tasks": [{"replicas": 1, "template": pod}]},
    }  # fmt: skip
    (finding,) = check([job], OPTIONS)
    assert finding.path[:4] == ("spec", "tasks", 0, "template")
    assert finding.rule == "memory-unit"
    assert correct([job], OPTIONS)[1] == []


WORDS = """\
apiVersion: v1
kind: Pod
metadata:
  name: p
  labels: {gpu: on, other: 'off'}
spec:
  nodeSelector: {gpu: Yes}
  hostNetwork: no
  containers:
  - name: c
    image: x
    env: [{name: A, value: off}]
    resources:
      limits: {nvidia.com/gpu: 1}
    securityContext: {privileged: yes, runAsNonRoot: yes}
"""


def test_words_are_read_as_kubernetes_reads_them() -> None:
    """`on` is a truth value where text must be, and `yes` is one where one must be."""
    documents = load_all(WORDS)
    assert {finding.rule for finding in check(documents, OPTIONS)} == {"annotation-text", "privileged"}
    fixed, left = correct(documents, OPTIONS)
    assert left == []
    expected = WORDS.replace("privileged: yes, ", "")
    for field, word in (("gpu", "on"), ("gpu", "Yes"), ("value", "off")):
        expected = expected.replace(f"{field}: {word}", f"{field}: '{word}'")
    assert dump_all(fixed) == expected


@pytest.mark.parametrize(("text", "right"), [("16384m", "16384Mi"), ("20480", "20480Mi"), ("500m", "500Mi")])
def test_a_claim_without_a_unit_was_meant_in_mib(text: str, right: str) -> None:
    documents = correct_manifests("dra")
    exactly = of_kind(documents, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    exactly["capacity"]["requests"]["memory"] = text
    fixed, _ = correct(documents, ClusterOptions())
    fixed_exactly = of_kind(fixed, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert fixed_exactly["capacity"]["requests"]["memory"] == right


@pytest.mark.parametrize(
    ("text", "right"), [("64Gi", "65536"), ("65536m", "65536"), ("65536", "65536"), ("9" * 60 + "Gi", "9" * 60 + "Gi")]
)
def test_a_quota_is_in_the_units_of_its_resource(text: str, right: str) -> None:
    hard = {"requests.nvidia.com/gpumem": text}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": hard}}
    fixed, _ = correct([quota], OPTIONS)
    assert fixed[0]["spec"]["hard"] == {"requests.nvidia.com/gpumem": right}


def test_a_privileged_container_beside_a_server_is_a_warning() -> None:
    documents = correct_manifests("hami")
    beside = {"name": "mesh", "image": "x", "securityContext": {"privileged": True}}
    template(documents)["spec"]["initContainers"] = [beside]
    (finding,) = check(documents, OPTIONS)
    assert (finding.rule, finding.severity, finding.edits) == ("privileged", Severity.WARNING, ())


def test_replicas_in_quotes_stay_as_many() -> None:
    documents = correct_manifests("time-slicing")
    config = of_kind(documents, "ConfigMap")["data"]
    right = config["kvarto"]
    config["kvarto"] = right.replace("replicas: 5", "replicas: '5'")
    assert config["kvarto"] != right
    fixed, left = correct(documents, OPTIONS)
    assert left == []
    assert of_kind(fixed, "ConfigMap")["data"]["kvarto"] == right


def test_a_plugin_is_known_by_its_image_with_a_digest_too() -> None:
    daemons = [
        {
            "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": image},
            "spec": {
                "selector": {"matchLabels": {"a": image}},
                "template": {
                    "metadata": {"labels": {"a": image}},
                    "spec": {"containers": [{"name": "c", "image": f"x.io/{image}@sha256:{'0' * 64}"}]},
                },
            },
        }
        for image in ("k8s-device-plugin", "hami")
    ]  # fmt: skip
    assert [finding.rule for finding in check(daemons, OPTIONS)] == ["two-plugins"]


def test_text_that_kubernetes_would_take_for_a_truth_value_is_quoted() -> None:
    words = ["on", "off", "yes", "No", "y", "N", "true", "1e3", "null", "~"]
    text = dump_all([{"words": words}])
    assert load_all(text) == [{"words": words}]
    assert all(f"'{word}'" in text for word in words)


def test_items_of_a_list_of_one_kind_are_objects() -> None:
    pod = template(correct_manifests("hami"))
    pod["metadata"]["name"] = "p"
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "16Gi"
    documents = [{"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [pod]}]
    assert next(finding.where.partition(",")[0] for finding in check(documents, OPTIONS)) == "Pod p"
    assert correct(documents, OPTIONS)[1] == []


@pytest.mark.parametrize(
    ("card", "profile", "rules"),
    [
        ("RTX-PRO-6000", "1g.24gb.gfx", []), ("RTX-PRO-6000", "1g.24gb-me", []), ("RTX-PRO-6000", "2g.48gb.me.all", []),
        (None, "1g.24gb.gfx", []), ("H100-80", "1g.24gb.gfx", ["mig-name"]), ("H100-80", "1g.10gb-me", ["mig-name"]),
    ],
)  # fmt: skip
def test_engines_of_one_card_are_in_its_profiles_names(card: str | None, profile: str, rules: list[str]) -> None:
    container = {"name": "c", "image": "x", "resources": {"limits": {f"nvidia.com/mig-{profile}": 1}}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
    options = ClusterOptions(card=None if card is None else find_card(card))
    assert [finding.rule for finding in check([pod], options)] == rules


RIGHT = """\
apiVersion: v1
kind: Pod
metadata: {name: several-gpus}
spec:
  initContainers: [{name: first, image: x}]
  containers:
  - name: c
    image: x
    resources: {limits: {nvidia.com/gpu: 2, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 0, nvidia.com/priority: 0}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nvidia-device-plugin}
spec:
  selector: {matchLabels: {name: plugin}}
  template:
    metadata: {labels: {name: plugin}}
    spec:
      containers:
      - name: plugin
        image: nvcr.io/nvidia/k8s-device-plugin:v0.18.0
        env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]
        securityContext: {privileged: true}
---
apiVersion: v1
kind: Pod
metadata: {name: sees-none}
spec:
  containers: [{name: c, image: x, env: [{name: NVIDIA_VISIBLE_DEVICES, value: ""}]}]
---
apiVersion: v1
kind: Pod
metadata: {name: whole}
spec:
  schedulerName: mine
  containers:
  - {name: v, image: vllm, args: [--gpu-memory-utilization, "0.9"], resources: {limits: {nvidia.com/gpu: 4}}}
---
apiVersion: v1
kind: Pod
metadata: {name: tencent}
spec:
  containers: [{name: c, image: x, resources: {limits: {tencent.com/vcuda-core: 200, tencent.com/vcuda-memory: 10}}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c}
spec: {devices: {requests: [{name: r, firstAvailable: [{name: big, deviceClassName: gpu.nvidia.com}]}]}}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: q}
spec:
  hard:
    requests.nvidia.com/gpu: "4"
    limits.nvidia.com/gpumem: "65536"
    limits.memory: 10Gi
    pods: "3"
    count/deployments.apps: "2"
    gold.storageclass.storage.k8s.io/requests.storage: 500Gi
"""


@pytest.mark.parametrize("options", [OPTIONS, ClusterOptions()])
def test_what_is_right_but_unusual_is_left_alone(options: ClusterOptions) -> None:
    assert check(load_all(RIGHT), options) == []


def test_what_stands_in_the_wrong_place_is_not_thrown_away() -> None:
    """A limit outside `resources` is no typing error: only a person knows what was meant."""
    documents = correct_manifests("hami")
    server = of_kind(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    server["limits"] = server["resources"].pop("limits")
    server["resources"].pop("requests")
    server["args"] = ["serve", "demo"]
    fixed, left = correct(documents, OPTIONS)
    assert plain(fixed) == documents
    assert [(finding.rule, finding.path[-1], finding.edits) for finding in left] == [("schema", "limits", ())]


def test_warnings_alone_are_no_errors() -> None:
    documents = correct_manifests("time-slicing")
    of_kind(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0].update(image="other", args=[])
    findings = check(documents, OPTIONS)
    found = [(finding.rule, finding.severity, finding.edits) for finding in findings]
    assert found == [("no-limit", Severity.WARNING, ())]


def test_a_server_on_a_gpu_that_asks_for_none_is_named() -> None:
    documents = correct_manifests("hami")
    server = of_kind(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    server["resources"] = {"limits": {"memory": "20Gi"}}
    assert [finding.rule for finding in check(documents, OPTIONS)] == ["no-gpu"]


def test_several_containers_are_judged_one_by_one() -> None:
    documents = correct_manifests("hami")
    helper = {"name": "sidecar", "image": "x", "resources": {"limits": {"nvidia.com/gpumem": 1000}}}
    template(documents)["spec"]["containers"].append(helper)
    (finding,) = check(documents, OPTIONS)
    assert (finding.rule, finding.where) == ("missing-count", "Deployment kvarto, container sidecar")
    fixed, left = correct(documents, OPTIONS)
    assert left == []
    assert plain(fixed)[0]["spec"]["template"]["spec"]["containers"][1]["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize(
    ("version", "api", "rule"),
    [
        ((1, 32), "v1beta1", None), ((1, 32), "v1", "dra-version"), ((1, 33), "v1beta2", None), ((1, 34), "v1", None),
        ((1, 31), "v1", "dra-version"), ((1, 37), "v1beta1", None),
    ],
)  # fmt: skip
def test_versions_of_dra_follow_the_cluster(version: tuple[int, int], api: str, rule: str | None) -> None:
    exactly = {"deviceClassName": "gpu.nvidia.com"}
    request = {"name": "gpu", **(exactly if api == "v1beta1" else {"exactly": exactly})}
    claim = {
        "apiVersion": f"resource.k8s.io/{api}", "kind": "ResourceClaim", "metadata": {"name": "c"},
        "spec": {"devices": {"requests": [request]}},
    }  # fmt: skip
    options = ClusterOptions(kubernetes=version)
    assert [finding.rule for finding in check([claim], options)] == ([rule] if rule else [])
    fixed, left = correct([claim], options)
    assert [finding.rule for finding in left] == (["dra-version"] if version == (1, 31) else [])
    assert check(fixed, options) == left


@pytest.mark.parametrize("written", ["v1", "extensions/v1beta1", "apps/v1beta2", 1])
def test_a_kind_under_a_version_that_has_none_such_is_named(written: object) -> None:
    documents = correct_manifests("hami")
    of_kind(documents, "Deployment")["apiVersion"] = written
    assert [finding.rule for finding in check(documents, OPTIONS)] == ["api-version"]
    fixed, left = correct(documents, OPTIONS)
    assert (left, of_kind(fixed, "Deployment")["apiVersion"]) == ([], "apps/v1")


def test_unknown_kinds_pass_and_unknown_versions_are_refused() -> None:
    custom = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}, "spec": {"anything": [1]}}
    assert check([custom], OPTIONS) == []
    escaping = {"apiVersion": "../../v1", "kind": "../../etc/passwd", "metadata": {}}
    assert check([escaping], OPTIONS) == []
    with pytest.raises(UsageError, match=r"no schemas for Kubernetes 1.99; there are 1.25"):
        check(correct_manifests("cpu"), ClusterOptions(kubernetes=(1, 99)))


LETTERS = "abcdefghijklmnopqrstuvwxyz"
BOMB = "\n".join(["a: &a [1, 1]", *(f"{b}: &{b} [*{a}, *{a}]" for a, b in itertools.pairwise(LETTERS))])


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2\n", "a: [1\n", "\tx", "&a [*a, *b]", "a: !!python/object:os.system x", "&a {kind: *a}", BOMB,
        "a: " + "[" * 300 + "]" * 300, "a: " + "[" * 120 + "]" * 120,
    ],
)
def test_text_that_is_no_manifest_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(BadFile):
        check(load_all(text, "pod.yaml"), OPTIONS)


def test_a_finding_needs_no_edit() -> None:
    finding = Finding("rule", "where", 0, ("spec",), "message")
    assert finding.severity is Severity.ERROR
    assert finding.edits == ()
