"""The one door: everything wrong is refused by field, and nothing right is."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.core.errors import ContextLengthExceeded, InvalidRequest, RequestError
from kvarto.core.sampling import MAX_LOGPROBS, SamplingParams
from kvarto.engine.frames import encode_frame
from kvarto.engine.messages import MAX_FRAME_BYTES, AddRequest, ResumedChoice, StepOut, TokenLogprobs, TokensOut
from kvarto.engine.validate import (
    MAX_ID_CHARS,
    MAX_PROMPT_LOGPROBS,
    ModelLimits,
    resolve_max_tokens,
    validate_request,
    validate_sampling,
)

LIMITS = ModelLimits(vocab_size=100, max_model_len=50)
GOOD = AddRequest(request_id="r", prompt_token_ids=(1, 99, 0), sampling=SamplingParams(max_tokens=4, seed=1))


def changed(**fields: object) -> AddRequest:
    """The good request with some fields changed; names of SamplingParams go there."""
    own = {name: value for name, value in fields.items() if name in AddRequest.__struct_fields__}
    sampling = {name: value for name, value in fields.items() if name not in own}
    request = msgspec.structs.replace(GOOD, **own)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling))


def test_a_good_request_passes() -> None:
    validate_request(GOOD, LIMITS)
    validate_request(changed(max_tokens=None, min_tokens=47), LIMITS)
    validate_request(changed(max_tokens=47, temperature=0, top_p=1, logit_bias={99: -100}, stop=("x",)), LIMITS)
    validate_request(changed(n=2, resumed=(ResumedChoice(1, (5, 6)),)), LIMITS)
    validate_request(changed(eos_token_ids=(100, 5000)), LIMITS)  # a tokenizer may know more ids than the logits


BAD = [
    ("prompt_token_ids", (), "prompt"),
    *(("prompt_token_ids", (1, token), "prompt") for token in (-1, 100, 2**31, 2**63, -(2**63), True, 1.0, "1", None)),
    *(("n", value, "n") for value in (0, -1, 129, 2**63, 1.0, True, None)),
    *(("temperature", value, "temperature") for value in (-0.1, 100.1, math.nan, math.inf, "1", None, True)),
    *(("top_k", value, "top_k") for value in (-1, 2**31, 0.5)),
    *(("top_p", value, "top_p") for value in (0.0, -0.1, 1.01, math.nan, 10**400)),
    *(("min_p", value, "min_p") for value in (-0.1, 1.1, math.nan)),
    *(("repetition_penalty", value, "repetition_penalty") for value in (0.0, -1.0, math.inf, 1e400)),
    *(("presence_penalty", value, "presence_penalty") for value in (-2.1, 2.1, math.nan)),
    *(("frequency_penalty", value, "frequency_penalty") for value in (-2.1, 2.1, math.nan)),
    *(("logit_bias", {token: 1.0}, "logit_bias") for token in (-1, 100, 2**63, "5")),
    *(("logit_bias", {1: value}, "logit_bias") for value in (math.nan, math.inf, 101.0, "1", None)),
    ("logit_bias", dict.fromkeys(range(2000), 0.0), "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    *(("seed", value, "seed") for value in (-1, 2**63, 0.0, True)),
    *(("max_tokens", value, "max_tokens") for value in (0, -1, 48, 2**63, 2**64, 1.0, True)),
    *(("min_tokens", value, "min_tokens") for value in (-1, 5, 2**63, None)),
    *(("logprobs", value, "logprobs") for value in (-1, 21, 2**63, True)),
    *(("prompt_logprobs", value, "prompt_logprobs") for value in (-1, 21, 1.0)),
    *(("stop_token_ids", (token,), "stop_token_ids") for token in (-1, 100, 2**63, "1")),
    ("stop_token_ids", tuple(range(17)), "stop_token_ids"),
    ("stop", tuple("abcdefghijklmnopq"), "stop"),
    *(("stop", (text,), "stop") for text in ("", "x" * 5000, "\ud800", 5)),
    ("stop", "text", "stop"),
    ("ignore_eos", 1, "ignore_eos"),
    *(("request_id", value, "request_id") for value in ("", "x" * 257, 5)),
    *(("cache_salt", value, "cache_salt") for value in ("", "x" * 1025, "\udfff", 5)),
    *(("priority", value, "priority") for value in (2**31, -(2**31), 1.0)),
    *(("deadline_s", value, "deadline_s") for value in (-1.0, math.nan, math.inf, 1e30)),
    ("resumed", (), "resumed"),
    ("resumed", (ResumedChoice(1, ()),), "resumed"),
    ("resumed", (ResumedChoice(0, ()), ResumedChoice(0, ())), "resumed"),
    ("resumed", (ResumedChoice(0, (100,)),), "resumed"),
    ("resumed", (ResumedChoice(0, (1, 2, 3, 4, 5)),), "resumed"),
    ("eos_token_ids", ("x",), "eos_token_ids"),
]


@pytest.mark.parametrize(("field", "value", "param"), BAD, ids=[f"{f}={str(v)[:20]}" for f, v, _ in BAD])
def test_a_bad_field_is_named(field: str, value: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_request(changed(**{field: value}), LIMITS)
    assert caught.value.param == param
    assert f"`{param}`" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("num_tokens", [50, 51, 5000])
def test_a_prompt_that_fills_the_context_is_refused_with_numbers(num_tokens: int) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"50 tokens; the prompt has {num_tokens}"):
        validate_request(changed(prompt_token_ids=(1,) * num_tokens), LIMITS)


def test_the_boundary_of_the_context() -> None:
    validate_request(changed(prompt_token_ids=(1,) * 49, max_tokens=1), LIMITS)
    with pytest.raises(ContextLengthExceeded, match="lower `max_tokens` to 1"):
        validate_request(changed(prompt_token_ids=(1,) * 49, max_tokens=2), LIMITS)


def test_log_probabilities_of_a_long_prompt_fit_into_a_frame() -> None:
    long = ModelLimits(vocab_size=200_000, max_model_len=2**20)
    most = MAX_PROMPT_LOGPROBS // (MAX_LOGPROBS + 1)
    request = changed(prompt_token_ids=(199_999,) * most, prompt_logprobs=MAX_LOGPROBS)
    validate_request(request, long)
    entry = TokenLogprobs(199_999, -1.5, ((199_999, -1.5),) * MAX_LOGPROBS)
    out = TokensOut(request_id="x" * MAX_ID_CHARS, choice=0, token_ids=(1,), prompt_logprobs=(entry,) * most)
    assert len(encode_frame(StepOut(step=1, tokens=(out, out)))) < MAX_FRAME_BYTES
    with pytest.raises(InvalidRequest, match="`prompt_logprobs` 20 of"):
        validate_request(msgspec.structs.replace(request, prompt_token_ids=(1,) * (most + 1)), long)


def test_min_tokens_is_checked_also_without_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        validate_request(changed(max_tokens=None, min_tokens=48), LIMITS)


def refusal(sampling: SamplingParams) -> RequestError | None:
    try:
        validate_sampling(sampling, 3, LIMITS)
    except RequestError as error:
        return error
    return None


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.integers(), st.floats(), max_size=2),
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), anything, max_size=4))
def test_whatever_passes_is_within_the_limits(fields: dict[str, object]) -> None:
    sampling = SamplingParams(**fields)  # type: ignore[arg-type]
    refused = refusal(sampling)
    if refused is not None:
        assert refused.param in SamplingParams.__struct_fields__
        return
    assert sampling.min_tokens <= resolve_max_tokens(sampling, 3, LIMITS) <= 47
    assert all(0 <= token < 100 for token in (*sampling.stop_token_ids, *sampling.logit_bias))
    assert all(math.isfinite(value) for value in (sampling.temperature, sampling.top_p, sampling.min_p))
