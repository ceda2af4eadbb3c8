"""Wrong manifests: a correct one, one mistake made in it, the exact message for it, and what the correction must be.

Messages are written out here, so that a change of wording or of arithmetic is seen.
"""

from __future__ import annotations

from tests.cluster.mistakes import names, numbers, objects, pods
from tests.cluster.mistakes.base import Mistake

__all__ = ["Mistake", "all_mistakes"]


def all_mistakes() -> list[Mistake]:
    """Every one, in a fixed order."""
    makers = (
        numbers.units,
        numbers.kai_values,
        numbers.fractions,
        numbers.requests_and_limits,
        numbers.counts,
        numbers.percentages,
        names.names,
        names.mig_names,
        numbers.two_schemes,
        numbers.replicas,
        pods.scheduling,
        pods.annotations,
        pods.access,
        objects.plugin_configs,
        pods.mps_by_hand,
        objects.plugins,
        objects.quotas,
        objects.claims,
        numbers.beyond_the_card,
        numbers.flags,
        pods.fields,
    )
    return [mistake for maker in makers for mistake in maker()]
