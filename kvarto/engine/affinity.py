"""Affinity: run what shares an adapter with those that run. Each distinct adapter of a step is read once in the step.

A pure preference over candidates that are in order; how far it may go against the order is for others to bound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvarto.engine.request import Choice
from kvarto.engine.virtual_tokens import Tenant, tenant_of


def tenants_of(choices: Sequence[Choice]) -> set[Tenant]:
    """Adapters of choices; the base, which is read anyway, among them as None."""
    return {tenant_of(choice.request) for choice in choices} | {None}


def first_at_home(candidates: Sequence[Choice], at_home: Collection[Tenant]) -> Choice | None:
    """The first whose adapter is in the batch; None where there is none."""
    return next((choice for choice in candidates if tenant_of(choice.request) in at_home), None)
