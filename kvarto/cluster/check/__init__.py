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
from kvarto.cluster.tree import Path

__all__ = ["Edit", "Finding", "Severity", "apply", "check", "correct"]

MAX_ROUNDS = 100
"""Of correction, beyond one for each finding: mending one may show another."""


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
    findings = check(fixed, options)
    beyond: set[_Key] = set()
    for _ in range(MAX_ROUNDS + len(findings)):
        batch = _batch([each for each in findings if each.edits and _key(each) not in beyond])
        if not batch:
            break
        beyond |= {_key(each) for each in batch if not _mend(fixed, each)}
        findings = check(fixed, options)
    return fixed, findings


_Key = tuple[int, Path, str]


def _key(finding: Finding) -> _Key:
    return finding.document, finding.path, finding.message


def _batch(findings: Sequence[Finding]) -> list[Finding]:
    """What one round mends: the first finding, and those of its kind in other objects. Edits of two findings in one
    object may touch the same lines, and another kind may be gone once this one is mended.
    """
    batch: list[Finding] = []
    touched: set[tuple[int, Path]] = set()
    for finding in findings:
        objects = {(edit.document, _item(edit.path)) for edit in finding.edits}
        if finding.rule == findings[0].rule and not objects & touched:
            batch.append(finding)
            touched |= objects
    return batch


def _item(path: Path) -> Path:
    """The item of a `List` that a path leads into; empty for a document that is one object."""
    return path[:2] if path[0] == "items" else ()


def _mend(documents: list[Any], finding: Finding) -> bool:
    """All edits or none. False: what stands in their way must be put right by hand first."""
    changed = list(documents)
    for index in {edit.document for edit in finding.edits}:
        changed[index] = copy.deepcopy(documents[index])
    try:
        apply(changed, finding.edits)
    except NoSuchPlace:
        return False
    documents[:] = changed
    return True
