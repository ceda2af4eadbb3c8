"""The API's own schemas, by an existing library: misspelt fields, wrong types, missing fields. Strict, by version."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from kvarto.cluster.check.api_schemas import best_match, schema_validator
from kvarto.cluster.check.finding import Edit, Finding
from kvarto.cluster.check.manifests import Files, Object
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.tree import TruthWord, as_text, dig, mapping

_ADDITIONAL = "additionalProperties"


_VERSIONS = {
    **dict.fromkeys(("Pod", "PodTemplate", "ReplicationController", "Service", "ConfigMap", "ResourceQuota"), "v1"),
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"), "apps/v1"),
    **dict.fromkeys(("Job", "CronJob"), "batch/v1"),
}
"""Of Kubernetes' own kinds that this check reads, where each is found."""


def schemas(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """The first thing in each object that its schema forbids. Kinds without a schema pass."""
    for each in files.objects:
        validator = schema_validator(each.kind, str(each.manifest["apiVersion"]), options.kubernetes)
        if validator is None:
            yield from _unknown_version(each)
            continue
        error = best_match(validator.iter_errors(_plain(each.manifest)))
        if error is not None:
            yield _finding(each, error)


def _unknown_version(each: Object) -> Iterator[Finding]:
    """A kind of Kubernetes under a version that has none such. Groups with a dot are others'."""
    written, right = str(each.manifest["apiVersion"]), _VERSIONS.get(each.kind)
    if right is not None and "." not in written.rpartition("/")[0]:
        message = f"`{written}` has no `{each.kind}`; write `{right}`"
        yield each.finding("api-version", ("apiVersion",), message, each.edit("apiVersion", value=right))


def _finding(each: Object, error: Any) -> Finding:
    path = tuple(error.path)
    if error.validator == _ADDITIONAL:
        return _unknown_field(each, path, error)
    place = ".".join(map(str, path)) or "the object"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in mapping(error.instance)]
        return each.finding("schema", path, f"`{place}` lacks {', '.join(f'`{name}`' for name in missing)}")
    wanted = error.validator_value
    if error.validator == "type" and "string" in wanted and isinstance(error.instance, (bool, int, float)):
        text = as_text(dig(each.manifest, *path))
        message = f'`{place}: {text}` must be text; write `"{text}"`'
        return each.finding("schema", path, message, each.edit(*path, value=text))
    names = [str(name) for name in (wanted if isinstance(wanted, list) else [wanted]) if name != "null"]
    is_plain = error.validator in ("type", "enum", "const")
    must = f"must be {' or '.join(names)}" if is_plain else "is not what belongs there"
    return each.finding("schema", path, f"`{place}: {error.instance!r:.80}` {must}")


def _unknown_field(each: Object, path: tuple[str | int, ...], error: Any) -> Finding:
    known = list(error.schema.get("properties", {}))
    unknown = next(name for name in error.instance if name not in known)
    full = (*path, unknown)
    message = f"`{'.'.join(map(str, full))}` is no field that Kubernetes knows there"
    close = difflib.get_close_matches(str(unknown), [name for name in known if name not in error.instance], 1)
    if not close:
        return each.finding("schema", full, f"{message}, and it would be dropped; move it to where it belongs")
    value = dig(each.manifest, *full)
    edits: list[Edit] = [each.edit(*path, close[0], value=value), each.edit(*full)]
    return each.finding("schema", full, f"{message}; write `{close[0]}`", *edits)


def _plain(node: Any) -> Any:
    """Without the types of the YAML library, which the schema's checks don't know."""
    if isinstance(node, TruthWord):
        return node.is_true
    if isinstance(node, dict):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(item) for item in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return None if node is None else str(node)
