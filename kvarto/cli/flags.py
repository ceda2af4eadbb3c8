"""Flags from settings classes: a field is a flag, its docstring the help, its default the default.

`@takes(engine=EngineConfig)` turns `def serve(*, engine: EngineConfig, …)` into a command whose flags are the fields
of `EngineConfig` beside the function's own parameters. Names work with dashes or underscores; sizes are read as
`8GiB`, counts as `4k` or `4K`; every flag has an environment variable, `KVARTO_` and its name.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import Parameter, Token

from kvarto.cli.field_help import field_help
from kvarto.core.errors import UsageError
from kvarto.core.units import parse_bytes, parse_count

ENV_PREFIX = "KVARTO_"
DEFAULT_MODEL = "demo"

ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("--model-path",),
    "gpu_memory_utilization": ("--mem-fraction-static",),
    "kv_cache_memory_bytes": ("--kv-cache-memory",),
    "block_size": ("--page-size",),
    "max_model_len": ("--context-length",),
    "max_num_seqs": ("--max-running-requests",),
    "max_num_batched_tokens": ("--chunked-prefill-size",),
    "max_num_queued": ("--max-queued-requests",),
}
"""Names that people know from other servers and that mean the same here."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def size(type_: Any, tokens: Sequence[Token]) -> int:
    """`8GiB`, `8GB` or bytes."""
    return parse_bytes(tokens[0].value)


def count(type_: Any, tokens: Sequence[Token]) -> int:
    """`4096`, `4k` or `4K`."""
    return parse_count(tokens[0].value)


def check_output(flag: str, path: Path | None) -> None:
    """Refuse a file that can't be written before the work rather than after it. Raises UsageError."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"`{flag} {path}` is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"`{flag} {path}` can't be written; name a file in a folder that exists and is yours")


def takes(**settings: type[msgspec.Struct]) -> Callable[[_Function], Callable[..., Any]]:
    """Make the function a command with a flag per field of each class; it gets them as keyword arguments."""

    def decorate(function: _Function) -> Callable[..., Any]:
        own = [_resolved(function, parameter) for parameter in _own_parameters(function, settings)]
        positional = None if any(p.kind is not p.KEYWORD_ONLY for p in own) else "model"
        flags = {name: flag_parameters(each, positional) for name, each in settings.items()}

        @functools.wraps(function)
        def command(*positional: Any, **named: Any) -> Any:
            bound = inspect.signature(command).bind(*positional, **named)
            bound.apply_defaults()
            values = bound.arguments
            built = {name: _build(settings[name], flags[name], values) for name in settings}
            return function(**built, **values)

        _set_signature(command, [parameter for group in flags.values() for parameter in group] + own)
        return command

    return decorate


def _own_parameters(function: Callable[..., Any], settings: dict[str, type[msgspec.Struct]]) -> list[inspect.Parameter]:
    return [p for name, p in inspect.signature(function).parameters.items() if name not in settings]


def _resolved(function: Callable[..., Any], parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=get_type_hints(function, include_extras=True)[parameter.name])


def _build(
    settings: type[msgspec.Struct], parameters: list[inspect.Parameter], values: dict[str, Any]
) -> msgspec.Struct:
    return settings(**{parameter.name: values.pop(parameter.name) for parameter in parameters})


def _set_signature(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    ordered = sorted(parameters, key=lambda parameter: parameter.kind)
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    del command.__wrapped__  # type: ignore[attr-defined]  # its signature is not the command's


def flag_parameters(settings: type[msgspec.Struct], positional: str | None = "model") -> list[inspect.Parameter]:
    """One parameter per field that a person can type; nested settings are for programs. `positional` names the field
    that needs no flag before it.
    """
    texts = field_help(settings)
    return [
        _parameter(settings, field, texts[field.name], is_positional=field.name == positional)
        for field in msgspec.structs.fields(settings)
        if not (isinstance(field.type, type) and issubclass(field.type, msgspec.Struct))
    ]


def _parameter(
    settings: type[msgspec.Struct], field: msgspec.structs.FieldInfo, text: str, *, is_positional: bool
) -> inspect.Parameter:
    converter = _converter(field)
    details = Parameter(
        help=text,
        group=settings.__name__.removesuffix("Config"),
        alias=ALIASES.get(field.name, ()),
        env_var=ENV_PREFIX + field.name.upper(),
        show_env_var=False,
        converter=converter,
        metavar=converter.__name__.upper() if converter else None,
        show_default=False if field.default in (None, (), "") else None,
        negative=None if field.type is bool else (),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY,
        default=DEFAULT_MODEL if field.name == "model" else field.default,
        annotation=Annotated[field.type, details],
    )


def _converter(field: msgspec.structs.FieldInfo) -> Callable[..., int] | None:
    if int not in _alternatives(field.type):
        return None
    return size if field.name.endswith(("_memory", "_bytes")) else count


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
