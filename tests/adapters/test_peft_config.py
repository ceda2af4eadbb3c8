"""Every key has a rule; rank and scaling are PEFT's; what would be silently wrong is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kvarto.adapters.peft_config import parse_peft_config
from kvarto.adapters.peft_keys import KEY_RULES, RULES, Stance
from kvarto.core.errors import AdapterError, BadAdapter, UnsupportedAdapter

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def parse(**values: Any) -> Any:
    return parse_peft_config({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | values)


def refused(error: type[AdapterError], match: str, **values: Any) -> None:
    with pytest.raises(error, match=match):
        parse(**values)


@pytest.mark.filterwarnings("ignore")
def test_every_field_of_pefts_config_has_a_rule() -> None:
    peft = pytest.importorskip("peft")
    from dataclasses import fields

    names = {field.name for field in fields(peft.LoraConfig)}
    assert names <= set(RULES), sorted(names - set(RULES))
    written = json.loads(json.dumps(peft.LoraConfig(target_modules=["q_proj"]).to_dict(), default=sorted))
    assert parse_peft_config(written).rank == 8


def test_rules_are_complete() -> None:
    assert len(RULES) == len(KEY_RULES)
    for rule in KEY_RULES:
        assert rule.reason
        assert rule.remedy or rule.stance is not Stance.REFUSED, rule.name


@pytest.mark.parametrize("rule", [rule for rule in KEY_RULES if rule.stance is Stance.REFUSED], ids=lambda r: r.name)
def test_a_refused_key_is_refused_with_reason_and_remedy_unless_it_is_off(rule: Any) -> None:
    for off in (None, False, [], {}):
        parse(**{rule.name: off})
    for value in (True, {"a": 1}, ["x"], "text"):
        with pytest.raises(UnsupportedAdapter) as caught:
            parse(**{rule.name: value})
        assert rule.name in str(caught.value)
        assert rule.reason in str(caught.value)
        assert rule.remedy in str(caught.value)


@pytest.mark.parametrize("rule", [rule for rule in KEY_RULES if rule.stance is Stance.IGNORED], ids=lambda r: r.name)
def test_an_ignored_key_changes_nothing(rule: Any) -> None:
    plain, other = parse(), parse(**{rule.name: {"any": ["thing"]}})
    assert (other.rank, other.alpha, other.warnings) == (plain.rank, plain.alpha, plain.warnings)


def test_an_unknown_key_is_refused_by_name_or_warned_of() -> None:
    refused(UnsupportedAdapter, "`use_future`", use_future=True)
    refused(UnsupportedAdapter, "`use_future`", use_future=None)
    config = parse_peft_config({"peft_type": "LORA", "lora_alpha": 1, "use_future": 1}, is_strict=False)
    assert "`use_future`" in config.warnings[0]


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "PiSSA"])
def test_initialisations_that_change_the_base_are_refused(init: str) -> None:
    refused(UnsupportedAdapter, f"`{init}`.*path_initial_model", init_lora_weights=init)


def test_other_settings_that_would_be_wrong_are_refused() -> None:
    for kind in ("ADALORA", "IA3", "LOHA", "VERA", "PREFIX_TUNING", None, 3):
        refused(UnsupportedAdapter, "peft_type", peft_type=kind)
    for bias in ("all", "lora_only", 1):
        refused(UnsupportedAdapter, "bias", bias=bias)
    refused(UnsupportedAdapter, "modules_to_save", modules_to_save=["score"])
    for init in ("newest", 1, 0, [True]):
        refused(UnsupportedAdapter, "init_lora_weights", init_lora_weights=init)
    for init in (True, False, None, "gaussian", "eva", "orthogonal", "mica"):
        parse(init_lora_weights=init)


def test_scaling_is_alpha_over_rank_or_its_root() -> None:
    assert parse().scaling_of(Q, 8) == 2.0
    assert parse(use_rslora=True).scaling_of(Q, 64) == 2.0
    assert parse(lora_alpha=-0.5).scaling_of(Q, 2) == -0.25
    assert parse(lora_alpha=0).scaling_of(Q, 2) == 0.0


def test_a_missing_alpha_is_eight_and_warned_of() -> None:
    config = parse_peft_config({"peft_type": "LORA"})
    assert config.scaling_of(Q, 4) == 2.0
    assert "lora_alpha" in config.warnings[0]
    assert config.rank is None
    assert not parse().warnings


def test_patterns_are_taken_in_order_and_by_module() -> None:
    config = parse(
        rank_pattern={"k_proj": 4, ".*_proj": 2, "q_proj": 16},
        alpha_pattern={r"layers\.0\..*q_proj": 3, "q_proj": 5},
        use_rslora=True,
    )
    assert (config.rank_of(Q), config.rank_of(K), config.rank_of("lm_head")) == (2, 4, 8)
    assert config.scaling_of(Q, 2) == 3 / math.sqrt(2)
    assert config.scaling_of(K, 4) == 16 / 2


def test_token_ids() -> None:
    assert parse(trainable_token_indices=[3, 1]).token_ids == {"embed_tokens": (3, 1)}
    assert parse(trainable_token_indices={"lm_head": [3]}).token_ids == {"lm_head": (3,)}
    assert parse(alora_invocation_tokens=[5, 5]).invocation_tokens == (5, 5)
    for ids in ([1, 1], [-1], [1.0], [True], "12", [1 << 40], {"a": 3}):
        refused(BadAdapter, "trainable_token_indices", trainable_token_indices=ids)
    for ids in ([], [-1], "a", [None]):
        refused(BadAdapter, "alora_invocation_tokens", alora_invocation_tokens=ids)


def test_messages_can_be_printed() -> None:
    odd = "a\ud800\n\x1b[31m" + "x" * 1000
    for values in ({odd: 1}, {"bias": odd}, {"r": [[[[[odd]]]]]}, {"rank_pattern": {odd: "x"}}, {"peft_type": odd}):
        with pytest.raises(AdapterError) as caught:
            parse(**values)
        assert str(caught.value).isprintable()
        assert len(str(caught.value).encode()) < 600


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("r", [0, -1, 1 << 40, 8.0, "8", True, [8]]),
        ("lora_alpha", ["8", True, 1e300, 10**400, [1]]),
        ("rank_pattern", [[], 3, {"q": 0}, {"q": "4"}, {"(": 4}]),
        ("alpha_pattern", ["x", {"q": None}, {"q": 1e99}, {"": 4}]),
        ("use_rslora", [1, "yes"]),
        ("use_dora", [1, "yes"]),
        ("lora_bias", [0, []]),
        ("fan_in_fan_out", [1]),
        ("target_modules", [3, [3], {"a": 1}]),
    ],
)
def test_wrong_types_and_values_are_refused(key: str, values: list[Any]) -> None:
    for value in values:
        if value != [] or key in ("lora_bias", "rank_pattern"):
            refused(BadAdapter, key, **{key: value})
