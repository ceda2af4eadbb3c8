"""A field is a flag: typed in any spelling, or set in the environment, it arrives as the settings say."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from cyclopts import App

from kvarto.cli.field_help import field_help
from kvarto.cli.flags import ALIASES, flag_parameters, takes
from kvarto.engine.config import EngineConfig
from kvarto.server.config import ServerConfig

SETTINGS: dict[str, type[msgspec.Struct]] = {"engine": EngineConfig, "server": ServerConfig}
TEXTS: dict[Any, tuple[str, Any]] = {
    str: ("zebra", "zebra"),
    int: ("1536", 1536),
    float: ("0.25", 0.25),
    tuple[str, ...]: ("zebra", ("zebra",)),
}
"""What is typed for a type, and what it means."""


def parse(tokens: list[str]) -> dict[str, Any]:
    """The settings that `serve` would get."""
    seen: dict[str, Any] = {}
    app = App()

    @app.default
    @takes(**SETTINGS)
    def serve(*, engine: EngineConfig, server: ServerConfig) -> None:
        seen.update(engine=engine, server=server)

    app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    return seen


def plain_type(annotation: Any) -> Any:
    """Without `| None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def fields() -> list[Any]:
    """Every field that has a flag, but the model, which is positional too."""
    found = []
    for name, settings in SETTINGS.items():
        flags = {parameter.name for parameter in flag_parameters(settings)}
        types_of = {field.name: plain_type(field.type) for field in msgspec.structs.fields(settings)}
        found += [pytest.param(name, flag, types_of[flag], id=flag) for flag in flags - {"model"}]
    return sorted(found, key=lambda param: str(param.id))


def test_without_flags_the_defaults_of_the_classes_hold() -> None:
    assert parse([]) == {"engine": EngineConfig(model="demo"), "server": ServerConfig()}


@pytest.mark.parametrize("spelling", [lambda name: name, lambda name: name.replace("_", "-")])
@pytest.mark.parametrize(("settings", "name", "kind"), fields())
def test_every_field_is_a_flag(settings: str, name: str, kind: Any, spelling: Callable[[str], str]) -> None:
    flag = f"--{spelling(name)}"
    if kind is bool:
        assert getattr(parse([flag])[settings], name) is True
        assert getattr(parse([f"--{spelling(f'no_{name}')}"])[settings], name) is False
        return
    text, value = TEXTS[kind]
    for tokens in ([flag, text], [f"{flag}={text}"]):
        parsed = parse(tokens)
        assert getattr(parsed[settings], name) == value
        untouched = {key: defaults for key, defaults in parse([]).items() if key != settings}
        assert {key: parsed[key] for key in untouched} == untouched


@pytest.mark.parametrize(("settings", "name", "kind"), fields())
def test_every_flag_is_an_environment_variable(
    settings: str, name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = getattr(parse([])[settings], name)
    text, value = ("false" if default else "true", not default) if kind is bool else TEXTS[kind]
    monkeypatch.setenv(f"KVARTO_{name.upper()}", text)
    assert getattr(parse([])[settings], name) == value


def test_the_command_line_is_stronger_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARTO_PORT", "1")
    assert parse(["--port", "2"])["server"].port == 2


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name, aliases in ALIASES.items() for alias in aliases])
def test_an_alias_means_its_field(name: str, alias: str) -> None:
    kind = {field.name: plain_type(field.type) for field in msgspec.structs.fields(EngineConfig)}[name]
    text, value = TEXTS[kind]
    assert getattr(parse([alias, text])["engine"], name) == value


@pytest.mark.parametrize("tokens", [["org/name:Q4"], ["--model", "org/name:Q4"], ["--model-path=org/name:Q4"]])
def test_the_model_is_positional_and_a_flag(tokens: list[str]) -> None:
    assert parse([*tokens, "--port", "9"])["engine"].model == "org/name:Q4"


@pytest.mark.parametrize(
    ("tokens", "name", "value"),
    [
        (["--device-memory", "8GiB"], "device_memory", 8 << 30),
        (["--device-memory", "8GB"], "device_memory", 8 * 10**9),
        (["--kv-cache-memory", "1.5G"], "kv_cache_memory_bytes", 3 << 29),
        (["--max-model-len", "4k"], "max_model_len", 4000),
        (["--max-model-len", "4K"], "max_model_len", 4096),
        (["--max-model-len", "25.6k"], "max_model_len", 25_600),
    ],
)
def test_sizes_and_counts_are_read_as_people_type_them(tokens: list[str], name: str, value: int) -> None:
    assert getattr(parse(tokens)["engine"], name) == value


def test_a_repeated_flag_gathers_its_values() -> None:
    assert parse(["--api-key", "a", "--api-key", "b"])["server"].api_key == ("a", "b")


def test_what_is_only_for_programs_has_no_flag() -> None:
    assert "faults" in EngineConfig.__struct_fields__
    assert "faults" not in {parameter.name for parameter in flag_parameters(EngineConfig)}


def test_a_field_without_a_docstring_is_refused() -> None:
    class Bare(msgspec.Struct):
        silent: int = 1

    with pytest.raises(ValueError, match="silent"):
        field_help(Bare)


def test_help_shows_every_docstring(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    parse(["--help"])
    shown = capsys.readouterr().out.replace("`", "")
    for settings in SETTINGS.values():
        texts = field_help(settings)
        for parameter in flag_parameters(settings):
            assert texts[parameter.name].replace("`", "") in shown, parameter.name
