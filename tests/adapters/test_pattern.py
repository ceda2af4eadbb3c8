"""Patterns: what Python's `re` says on the subset, and bounded time outside its reach."""

from __future__ import annotations

import random
import re
import warnings

import pytest

from kvarto.adapters import pattern
from kvarto.adapters.pattern import PatternSet
from kvarto.core.errors import AdapterError, BadAdapter, UnsupportedAdapter

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.k_proj",
    "model.layers.2.mlp.down_proj",
    "lm_head",
    "ab.ba.aab",
    "transformer.h.3.attn.c_attn",
]


def expected(keys: list[str], path: str) -> str | None:
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", path)), None)


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        "proj",
        "layers.0.self_attn.q_proj",
        "^model.layers.0.self_attn.q_proj",
        "^layers.0.self_attn.q_proj",
        r".*\.layers\.[0-3]\.mlp\..*",
        r"model\.layers\.(0|11)\.self_attn\.(?:q|k)_proj",
        r"layers\.\d+\.self_attn\.[qk]_proj$",
        "h.3.attn.c.attn",
        r"[^.]+",
        "(a|b)*.ba.a{2}b",
        "a{1,2}b",
        r"l\w{0,7}",
        "self_attn.q_proj|lm_head",
        ".+?proj",
    ],
)
def test_a_match_is_what_re_says(key: str) -> None:
    for path in PATHS:
        assert PatternSet([key], "rank_pattern").first_match(path) == expected([key], path), path


def test_the_first_key_in_order_wins() -> None:
    keys = ["k_proj", r".*_proj", "q_proj"]
    assert [PatternSet(keys, "rank_pattern").first_match(path) for path in PATHS[:3]] == [
        r".*_proj",
        "k_proj",
        r".*_proj",
    ]


def test_random_patterns_match_as_in_re() -> None:
    rng = random.Random(7)
    pieces = [
        "a",
        "b",
        ".",
        r"\.",
        "a*",
        "b+",
        "(a|b)",
        "(ab)?",
        "[ab]",
        "[^a]",
        "(?:a|b.)*",
        "a{1,2}",
        "|",
        "^",
        "$",
        "(",
    ]
    num_compiled = 0
    for _ in range(600):
        key = "".join(rng.choices(pieces, k=rng.randint(1, 6)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                re.compile(key)
            known = PatternSet([key], "rank_pattern")
        except (re.error, AdapterError, FutureWarning):
            continue
        num_compiled += 1
        for _ in range(6):
            path = "".join(rng.choices("ab.", k=rng.randint(1, 7)))
            assert known.first_match(path) == expected([key], path), (key, path)
    assert num_compiled > 200


@pytest.mark.parametrize(
    "key", ["(", "a)", "a)(b", "[a", "*a", "a{2", "a{3,1}", "", "a\nb*", "(" * 40 + "a" + ")" * 40, "\\"]
)
def test_what_does_not_compile_is_refused(key: str) -> None:
    with pytest.raises(BadAdapter, match="rank_pattern"):
        PatternSet([key], "rank_pattern")


@pytest.mark.parametrize("key", [r"(a)\1", "(?=a)b", "(?i)a", r"\bq", "(?P<x>a)", "a*+", r"[\W]"])
def test_what_is_outside_the_subset_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedAdapter, match="not built in"):
        PatternSet([key], "rank_pattern")


def test_catastrophic_patterns_take_no_time() -> None:
    for key in ("(a+)+b", "(a|a)*b", "(a*)*b", "(.*a){20}"):
        assert PatternSet([key], "rank_pattern").first_match("a" * 200 + "c") is None


def test_sizes_and_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys in (["a" * 600 + "*"], ["((a{50}){50}){50}"], ["(a{9999})"], [f"k{i}" for i in range(5000)]):
        with pytest.raises(BadAdapter):
            PatternSet(keys, "rank_pattern")
    monkeypatch.setattr(pattern, "MAX_STEPS", 1000)
    known = PatternSet(["(a|b|.)*c"], "rank_pattern")
    with pytest.raises(BadAdapter, match="steps"):
        known.first_match("a" * 500)
