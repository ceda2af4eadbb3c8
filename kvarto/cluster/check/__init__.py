"""`check`: what is wrong with manifests, one exact message for each mistake; `correct`: the same manifests put right.

Rules look at parsed YAML of any shape and yield findings with edits. Sums speak only where the numbers are right, and
the API's schemas only of documents in which nothing else was found: a mistake is named once, and in the scheme's words.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from kvarto.cluster.check.finding import Edit, Finding, NoSuchPlace, Severity, apply
from kvarto.cluster.check.manifests import Files
from kvarto.cluster.check.rules import BESIDE_NUMBERS, RULES, SUMS
from kvarto.cluster.check.rules.schema import schemas
from kvarto.cluster.schemes import ClusterOptions

__all__ = ["Edit", "Finding", "Severity", "apply", "check", "correct"]

MAX_ROUNDS = 100
"""Of correction. Each round mends one finding, since edits of two may touch the same lines."""


def check(documents: Sequence[Any], options: ClusterOptions) -> list[Finding]:
    """Every mistake in parsed documents. Raises BadFile for a document that is no Kubernetes object."""
    files = Files(documents)
    findings = [finding for rule in RULES for finding in rule(files, options)]
    unsure = {_object(finding) for finding in findings if finding.rule not in BESIDE_NUMBERS}
    sums = [finding for rule in SUMS for finding in rule(files, options)]
    findings += [finding for finding in sums if _object(finding) not in unsure]
    wrong = {finding.document for finding in findings if finding.severity is Severity.ERROR}
    return findings + [finding for finding in schemas(files, options) if finding.document not in wrong]


def _object(finding: Finding) -> tuple[int, str]:
    """The manifest that it was found in."""
    return finding.document, finding.where.partition(", container")[0]


def correct(documents: Sequence[Any], options: ClusterOptions) -> tuple[list[Any], list[Finding]]:
    """A corrected copy, and what only a person can mend. Comments and order stay where the library keeps them."""
    fixed = copy.deepcopy(list(documents))
    beyond: set[str] = set()
    for _ in range(MAX_ROUNDS):
        findings = check(fixed, options)
        mendable = next((each for each in findings if each.edits and each.message not in beyond), None)
        if mendable is None:
            return fixed, findings
        changed = copy.deepcopy(fixed)
        try:
            apply(changed, mendable.edits)
            fixed = changed
        except NoSuchPlace:
            beyond.add(mendable.message)  # what stands there must be put right by hand first
    return fixed, check(fixed, options)
