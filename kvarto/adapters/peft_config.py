"""An `adapter_config.json`, read: types and bounds checked, every key accounted for; rank and scaling by module."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvarto.adapters.pattern import PatternSet
from kvarto.adapters.peft_keys import RULES, Stance
from kvarto.core.errors import AdapterError, BadAdapter, UnsupportedAdapter

DEFAULT_ALPHA = 8.0
"""PEFT's own."""
MAX_RANK = 1 << 16
"""Of what a config may say; what is served is bounded elsewhere."""
MAX_ALPHA = 1e9
MAX_TOKENS = 1 << 20
MAX_INVOCATION_TOKENS = 4096
MAX_UNKNOWN_SHOWN = 8

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 3
_PLAIN_INITS = (None, True, False, "true", "gaussian", "eva", "orthogonal", "mica")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the config says of the tensors beside it."""

    rank: int | None
    """`r`; None where absent: the tensors alone say it."""
    alpha: float
    rank_by_pattern: Mapping[str, int]
    alpha_by_pattern: Mapping[str, float]
    rank_patterns: PatternSet
    alpha_patterns: PatternSet
    is_rank_stabilised: bool
    has_magnitudes: bool
    has_biases: bool
    is_tying_ensured: bool
    token_ids: Mapping[str, tuple[int, ...]]
    """By end of module path; `embed_tokens` where the config gives a plain list."""
    invocation_tokens: tuple[int, ...]
    target_modules: tuple[str, ...]
    """Names that the config lists; empty where it has a pattern."""
    warnings: tuple[str, ...]
    is_scaled_by_rank: bool = True
    """False: the scaling is 1 (GGUF files say so with an alpha of 0)."""

    def rank_of(self, module: str) -> int | None:
        """Rank that the config demands of a module; None where it says nothing."""
        key = self.rank_patterns.first_match(module)
        return self.rank if key is None else self.rank_by_pattern[key]

    def scaling_of(self, module: str, rank: int) -> float:
        """What multiplies B A x."""
        if not self.is_scaled_by_rank:
            return 1.0
        key = self.alpha_patterns.first_match(module)
        alpha = self.alpha if key is None else self.alpha_by_pattern[key]
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def parse_peft_config(
    values: Mapping[str, Any], *, is_strict: bool = True, is_scaled_by_rank: bool = True
) -> AdapterConfig:
    """Raises UnsupportedAdapter for what is not built in, BadAdapter for wrong types and values.

    Where it is not strict, an unknown key is a warning instead of an error.
    """
    warnings = _account_for(values, is_strict=is_strict)
    keys = _Keys(values)
    _check_fixed(keys)
    if keys.get("lora_alpha") is None:
        warnings.append(f"`lora_alpha` is absent; {DEFAULT_ALPHA:g} is assumed, as PEFT does")
    ranks = keys.table("rank_pattern")
    alphas = keys.table("alpha_pattern")
    return AdapterConfig(
        rank=None if keys.get("r") is None else _rank("r", keys.get("r")),
        alpha=_number("lora_alpha", DEFAULT_ALPHA if keys.get("lora_alpha") is None else keys.get("lora_alpha")),
        rank_by_pattern={key: _rank(f"rank_pattern[{shown(key)}]", value) for key, value in ranks.items()},
        alpha_by_pattern={key: _number(f"alpha_pattern[{shown(key)}]", value) for key, value in alphas.items()},
        rank_patterns=PatternSet(list(ranks), "rank_pattern"),
        alpha_patterns=PatternSet(list(alphas), "alpha_pattern"),
        is_rank_stabilised=keys.flag("use_rslora"),
        has_magnitudes=keys.flag("use_dora"),
        has_biases=keys.flag("lora_bias"),
        is_tying_ensured=keys.flag("ensure_weight_tying"),
        token_ids=_token_ids(keys.get("trainable_token_indices")),
        invocation_tokens=_invocation_tokens(keys.get("alora_invocation_tokens")),
        target_modules=_names(keys.get("target_modules")),
        warnings=tuple(warnings),
        is_scaled_by_rank=is_scaled_by_rank,
    )


class _Keys:
    """Typed reads. null is absent, as PEFT writes it for most defaults."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, key: str) -> Any:
        assert RULES[key].stance is Stance.READ, f"`{key}` is read, so its rule must say so"
        return self._values.get(key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise _wrong(key, value, "true or false")
        return bool(value)

    def table(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise _wrong(key, value, "an object")
        return value or {}


def _account_for(values: Mapping[str, Any], *, is_strict: bool) -> list[str]:
    for key, value in values.items():
        rule = RULES.get(key)
        if rule is not None and rule.stance is Stance.REFUSED and not _is_off(value):
            raise UnsupportedAdapter(f"`{key}` is {shown(value)}: {rule.reason}, which is not built in; {rule.remedy}")
    unknown = sorted(set(values) - set(RULES))
    if not unknown:
        return []
    some = ", ".join(shown(key) for key in unknown[:MAX_UNKNOWN_SHOWN])
    more = f" and {len(unknown) - MAX_UNKNOWN_SHOWN} more" if len(unknown) > MAX_UNKNOWN_SHOWN else ""
    if is_strict:
        raise UnsupportedAdapter(
            f"the config has the unknown keys {some}{more}, which may change the arithmetic; take them out if they do "
            "not, or load the adapter without strict checking"
        )
    return [f"unknown keys are ignored: {some}{more}"]


def _check_fixed(keys: _Keys) -> None:
    kind = keys.get("peft_type")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise _not_built_in("peft_type", kind, "`LORA`")
    if keys.get("bias") not in (None, "none"):
        raise _not_built_in("bias", keys.get("bias"), "`none`")
    keys.flag("fan_in_fan_out")
    init = keys.get("init_lora_weights")
    name = init.lower() if isinstance(init, str) else init
    if isinstance(name, str) and name.startswith(_CHANGES_BASE):
        raise UnsupportedAdapter(
            f"`init_lora_weights` is {shown(init)}: the base's weights were changed when training began, so the "
            f"adapter does not fit the plain base; {RULES['init_lora_weights'].remedy}"
        )
    if not any(name is plain or (isinstance(name, str) and name == plain) for plain in _PLAIN_INITS):
        raise _not_built_in("init_lora_weights", init, "true, false, gaussian, eva, orthogonal and mica")
    if not _is_off(keys.get("modules_to_save")):
        raise _not_built_in("modules_to_save", keys.get("modules_to_save"), "none")


def _not_built_in(key: str, value: Any, known: str) -> AdapterError:
    return UnsupportedAdapter(
        f"`{key}` is {shown(value)}, which is not built in; built in is {known}"
        + (f". What works: {RULES[key].remedy}" if RULES[key].remedy else "")
    )


def _wrong(key: str, value: Any, wanted: str) -> AdapterError:
    return BadAdapter(f"`{key}` is {shown(value)}; {wanted} is needed")


def shown(value: Any) -> str:
    """A value of a stranger's file, short and printable, in backticks."""
    text = value if isinstance(value, str) else _BRIEF.repr(value)
    # JSON can carry what a terminal or a log cannot: lone surrogates, control characters.
    return f"`{text if text.isprintable() else ascii(text):.80}`"


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, list | dict | str) and not value)


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _wrong(key, value, f"an integer from 1 to {MAX_RANK}")
    return value


def _number(key: str, value: Any) -> float:
    # Bounded before it becomes a float: an integer of JSON may have any number of digits.
    if type(value) not in (int, float) or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise _wrong(key, value, f"a number of at most {MAX_ALPHA:g}, of either sign")
    return float(value)


def _ids(key: str, value: Any, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise _wrong(key, value, f"a list of at most {most} token ids")
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in value):
        raise _wrong(key, value, "a list of token ids of 0 or more")
    return tuple(value)


def _token_ids(value: Any) -> dict[str, tuple[int, ...]]:
    if value is None:
        return {}
    tables = value if isinstance(value, dict) else {"embed_tokens": value}
    found = {name: _ids("trainable_token_indices", ids, MAX_TOKENS) for name, ids in tables.items()}
    for name, ids in found.items():
        if len(set(ids)) != len(ids):
            raise BadAdapter(f"`trainable_token_indices` names a token of {shown(name)} twice; one row is needed")
    return found


def _invocation_tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    found = _ids("alora_invocation_tokens", value, MAX_INVOCATION_TOKENS)
    if not found:
        raise _wrong("alora_invocation_tokens", value, "at least one token id, or null")
    return found


def _names(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, str):  # a string is a pattern, or `all-linear`
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong("target_modules", value, "a list of names, or a pattern")
    return tuple(value)
