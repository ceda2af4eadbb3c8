"""The API's schemas, as an existing package ships them, one validator per kind; each version is read once."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from kvarto.core.errors import UsageError

try:
    from jsonschema.exceptions import best_match
    from jsonschema.validators import Draft202012Validator
    from kubernetes_validate.utils import all_versions, schema_contents
    from referencing import Registry, Resource
except ImportError as error:
    raise UsageError(f"this command needs the API's schemas ({error}); `pip install 'kvarto[k8s]'`") from error

__all__ = ["best_match", "schema_validator"]

_NAME = re.compile(r"[A-Za-z0-9]{1,63}")


@cache
def schema_validator(kind: str, api_version: str, kubernetes: tuple[int, int]) -> Any:
    """A validator of `iter_errors`, or None for a kind that has no schema. Raises UsageError for unknown versions."""
    group, _, version = api_version.rpartition("/")
    name = "-".join([kind.lower(), *([group.partition(".")[0]] if group else []), version])
    if not all(_NAME.fullmatch(part) for part in name.split("-")):
        return None  # no path outside the package's folder
    folder = _folder(kubernetes)
    text = ".".join(map(str, kubernetes))
    try:
        schema = schema_contents(f"{folder}/{name}.json", text)
    except FileNotFoundError:
        return None
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(folder))


@cache
def _definitions(folder: str) -> Any:
    return Resource.from_contents(schema_contents(f"{folder}/_definitions.json", folder)) @ Registry()


@cache
def _folder(kubernetes: tuple[int, int]) -> str:
    """The strict schemas of that version: fields that the API server would drop are errors."""
    text = ".".join(map(str, kubernetes))
    known = [version for version in all_versions() if version.startswith(f"{text}.")]
    if not known:
        raise UsageError(f"no schemas for Kubernetes {text}; there are {', '.join(_minors())}")
    return f"kubernetes-json-schema/v{known[-1]}-local-strict"


def _minors() -> list[str]:
    return list(dict.fromkeys(version.rpartition(".")[0] for version in all_versions()))
