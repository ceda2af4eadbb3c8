"""Every rule, in the order in which their findings are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Files
from kvarto.cluster.check.rules import access, amounts, cards, claims, names, quota, scheduling, server, sharing, units
from kvarto.cluster.schemes import ClusterOptions

Rule = Callable[[Files, ClusterOptions], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    names.resource_names, names.mig_profiles,
    units.amounts, units.kai_annotations,
    amounts.missing_count, amounts.requests_and_limits, amounts.percentage_and_absolute, amounts.two_schemes,
    amounts.several_parts,
    scheduling.node_name, scheduling.scheduler_name, scheduling.annotation_place, scheduling.annotation_text,
    scheduling.kai_queue, scheduling.runtime_class,
    access.privileged, access.environment, access.split_size,
    sharing.mps_with_mig, sharing.replica_counts, sharing.replica_names, sharing.own_mps, sharing.two_plugins,
    quota.quotas,
    claims.pod_claims, claims.api_versions, claims.template_nesting, claims.shapes, claims.capacities,
    cards.mig_sets, server.size_of_arena,
)  # fmt: skip

SUMS: tuple[Rule, ...] = (
    cards.over_card, cards.claims_over_card, cards.sum_over_card, server.arena_and_limit, server.no_limit,
)  # fmt: skip
"""Rules that add up what an object asks for. They say nothing of one whose numbers were found wrong."""

BESIDE_NUMBERS = frozenset({
    "node-name", "scheduler-name", "kai-queue", "runtime-class", "privileged", "visible-devices", "device-order",
    "control-off", "limit-by-hand", "max-split-size", "own-mps", "two-plugins",
})  # fmt: skip
"""Mistakes that leave an object's numbers as they are."""
