"""Laws of incremental detokenisation: pieces join to the whole, and stop strings end the text at the same character
however the tokens cut it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.engine.detokenizer import Detokenizer, StopScanner

EURO = "€".encode()
VOCABULARY: list[bytes] = [
    *(bytes([value]) for value in range(256)),
    b"<|end|>", b" the", b"ab", b"aab", b"abc", EURO, EURO[:2], EURO[2:] + b"a", "😀".encode(), "\ufffd".encode(), b"",
]  # fmt: skip
SPECIAL = 256


class ByteVocabulary:
    """256 bytes and a few longer tokens; one is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return VOCABULARY[token_id] if token_id < len(VOCABULARY) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == SPECIAL


def whole_text(token_ids: list[int], skip_special_tokens: bool) -> str:
    kept = [token_id for token_id in token_ids if not (skip_special_tokens and token_id == SPECIAL)]
    return b"".join(VOCABULARY[token_id] for token_id in kept).decode("utf-8", "replace")


def cut_at_stop(text: str, stop: list[str], keep: bool) -> tuple[str, str | None]:
    """The slow judge: look at every prefix."""
    for end in range(1, len(text) + 1):
        complete = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if complete:
            found = max(complete, key=len)
            return text[: end if keep else end - len(found)], found
    return text, None


def run(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.feed(token_id))
        if detokenizer.stop_found:
            return pieces
    return [*pieces, detokenizer.finish()]


COMMON = [97, 98, 257, 258, 259, 260, 261, 262]
tokens = st.lists(st.one_of(st.integers(0, len(VOCABULARY) - 1), st.sampled_from(COMMON)))
stops = st.lists(st.text(alphabet="ab€c t\ufffd", min_size=1, max_size=6), max_size=4)


@settings(max_examples=400, deadline=None)
@given(tokens, st.booleans())
def test_pieces_join_to_the_whole(token_ids: list[int], skip: bool) -> None:
    pieces = run(Detokenizer(ByteVocabulary(), skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == whole_text(token_ids, skip)


@settings(max_examples=600, deadline=None)
@given(tokens, stops, st.booleans())
def test_stop_strings_cut_where_the_judge_cuts(token_ids: list[int], stop: list[str], keep: bool) -> None:
    detokenizer = Detokenizer(ByteVocabulary(), stop=stop, include_stop_str_in_output=keep)
    pieces = run(detokenizer, token_ids)
    expected, found = cut_at_stop(whole_text(token_ids, skip_special_tokens=True), stop, keep)
    assert "".join(pieces) == expected
    assert detokenizer.stop_found == found


def test_random_sequences_with_stops_that_really_occur() -> None:
    rng = random.Random(7)
    num_found = 0
    for _ in range(2000):
        token_ids = [rng.choice([97, 98, 99, 257, 258, 259, 260, 261, 262, 263]) for _ in range(rng.randrange(1, 40))]
        text = whole_text(token_ids, skip_special_tokens=True)
        start = rng.randrange(len(text)) if text else 0
        stop = [text[start : start + rng.randrange(1, 8)] or "x", "never seen"]
        detokenizer = Detokenizer(ByteVocabulary(), stop=stop)
        expected, found = cut_at_stop(text, stop, keep=False)
        assert ("".join(run(detokenizer, token_ids)), detokenizer.stop_found) == (expected, found)
        num_found += found is not None
    assert num_found > 1000


@given(st.text(alphabet="ab", max_size=60), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1))
def test_shown_text_is_never_taken_back_and_little_is_held(text: str, stop: list[str]) -> None:
    """What was shown is a prefix of the final text; what is held is a proper prefix of some stop string."""
    scanner = StopScanner(stop)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += scanner.feed(character)
        if scanner.found is not None:
            break
        held = text[len(shown) : end]
        assert shown == text[: len(shown)]
        assert held == "" or any(pattern.startswith(held) and pattern != held for pattern in stop)
    assert (shown if scanner.found else shown + scanner.flush()) == cut_at_stop(text, stop, keep=False)[0]


def test_min_tokens_hides_early_stop_strings() -> None:
    token_ids = [97, 98, 97, 98, 97, 98]
    for min_tokens, expected in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (6, "ababab")):
        detokenizer = Detokenizer(ByteVocabulary(), stop=["ab"], min_tokens=min_tokens)
        assert "".join(run(detokenizer, token_ids)) == expected


def test_long_stop_strings_cost_no_more_per_token() -> None:
    """A quadratic search over a 100,000-character stop string would take minutes."""
    stop = "a" * 100_000 + "b"
    detokenizer = Detokenizer(ByteVocabulary(), stop=[stop])
    assert "".join(run(detokenizer, [97] * 150_000)) == "a" * 150_000
