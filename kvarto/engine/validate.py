"""The one door: everything that a request could get wrong about ids, lengths and parameters is refused here.

The client calls this before it sends, and the engine again before it queues, with the same limits. Each error names
the field, the value and what would work. Types are checked too, because a `msgspec.Struct` made in Python checks none.
What the HTTP form looked like is the server's business.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvarto.core.errors import ContextLengthExceeded, InvalidRequest
from kvarto.core.sampling import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP, SamplingParams
from kvarto.engine.messages import AddRequest

MAX_SEED = 2**63 - 1
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_TEMPERATURE = 100.0
MAX_STOP_CHARS = 4096
"""Limit on one stop string."""
MAX_SALT_CHARS = 1024
MAX_ID_CHARS = 256
MAX_PRIORITY = 2**31 - 1
MAX_DEADLINE_S = 30 * 24 * 3600.0
MAX_PROMPT_LOGPROBS = 1_000_000
"""Limit on the log-probabilities of one prompt, alternatives counted: they travel in one frame of at most 64 MiB."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against: `Ready` carries both numbers."""

    vocab_size: int
    """Width of the logits; the tokenizer may know fewer ids, or more."""
    max_model_len: int
    """Tokens of prompt and output together."""


def validate_request(request: AddRequest, limits: ModelLimits) -> None:
    """Raise InvalidRequest or ContextLengthExceeded unless the engine can run this request as it stands."""
    _check_text("request_id", request.request_id, 1, MAX_ID_CHARS)
    validate_prompt(request.prompt_token_ids, limits)
    validate_sampling(request.sampling, len(request.prompt_token_ids), limits)
    _check_ids_exact("eos_token_ids", request.eos_token_ids)
    if request.cache_salt is not None:
        _check_text("cache_salt", request.cache_salt, 1, MAX_SALT_CHARS)
    _check_int("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.deadline_s is not None:
        _check_number("deadline_s", request.deadline_s, 0.0, MAX_DEADLINE_S)
    if request.adapter is not None:
        _check_text("model", request.adapter, 1, MAX_ID_CHARS)
    if request.adapter_digest is not None and not _HEX_DIGEST.fullmatch(request.adapter_digest):
        raise _wrong("adapter_digest", request.adapter_digest, "must be 64 hexadecimal digits")
    if request.resumed is not None:
        _validate_resumed(request, limits)


def validate_prompt(token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Ids within the logits' width, at least one, and room for one more token."""
    if len(token_ids) == 0:
        raise InvalidRequest("`prompt` is empty; at least 1 token is needed", param="prompt")
    if len(token_ids) >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limits.max_model_len} tokens; the prompt has {len(token_ids)} "
            f"tokens, which leaves no room for output; shorten it to {limits.max_model_len - 1} tokens or fewer",
            param="prompt",
        )
    _check_ids("prompt", token_ids, limits.vocab_size)


def validate_sampling(sampling: SamplingParams, num_prompt_tokens: int, limits: ModelLimits) -> None:
    """Every sampling field, alone and with the length of the prompt. Strings that stop are checked for form only."""
    _check_int("n", sampling.n, 1, MAX_CHOICES)
    _check_noise(sampling)
    _check_lengths(sampling, num_prompt_tokens, limits)
    _check_bias(sampling.logit_bias, limits.vocab_size)
    _check_stop(sampling, limits.vocab_size)
    most = min(MAX_LOGPROBS, limits.vocab_size)
    for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if value is not None:
            _check_int(name, value, 0, most)
    _check_prompt_logprobs(sampling.prompt_logprobs, num_prompt_tokens)
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        if not isinstance(getattr(sampling, name), bool):
            raise _wrong(name, getattr(sampling, name), "must be true or false")


def resolve_max_tokens(sampling: SamplingParams, num_prompt_tokens: int, limits: ModelLimits) -> int:
    """`max_tokens`, or what is left of the context where it is None."""
    return limits.max_model_len - num_prompt_tokens if sampling.max_tokens is None else sampling.max_tokens


def _check_noise(sampling: SamplingParams) -> None:
    _check_number("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _check_int("top_k", sampling.top_k, 0, 2**31 - 1)
    _check_number("top_p", sampling.top_p, 0.0, 1.0, above=True)
    _check_number("min_p", sampling.min_p, 0.0, 1.0)
    _check_number("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    _check_number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.seed is not None:
        _check_int("seed", sampling.seed, 0, MAX_SEED)


def _check_prompt_logprobs(num_top: int | None, num_prompt_tokens: int) -> None:
    count = 0 if num_top is None else (num_top + 1) * num_prompt_tokens
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"`prompt_logprobs` {num_top} of {num_prompt_tokens} prompt tokens make {count} numbers; "
            f"at most {MAX_PROMPT_LOGPROBS}, ask for fewer or shorten the prompt",
            param="prompt_logprobs",
        )


def _check_lengths(sampling: SamplingParams, num_prompt_tokens: int, limits: ModelLimits) -> None:
    if sampling.max_tokens is not None:
        _check_int("max_tokens", sampling.max_tokens, 1, MAX_SEED)
    num_output = resolve_max_tokens(sampling, num_prompt_tokens, limits)
    if num_prompt_tokens + num_output > limits.max_model_len:
        left = limits.max_model_len - num_prompt_tokens
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limits.max_model_len} tokens; {num_prompt_tokens} in the prompt "
            f"and `max_tokens` {num_output} make {num_prompt_tokens + num_output}; "
            f"lower `max_tokens` to {left} or shorten the prompt",
            param="max_tokens",
        )
    _check_int("min_tokens", sampling.min_tokens, 0, num_output)


def _check_bias(bias: dict[int, float], vocab_size: int) -> None:
    if not isinstance(bias, dict):
        raise _wrong("logit_bias", bias, "must map token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"`logit_bias` has {len(bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    _check_ids("logit_bias", list(bias), vocab_size)
    for value in bias.values():
        _check_number("logit_bias", value, -100.0, 100.0)


def _check_stop(sampling: SamplingParams, vocab_size: int) -> None:
    for name, values in (("stop", sampling.stop), ("stop_token_ids", sampling.stop_token_ids)):
        if not isinstance(values, (tuple, list)):
            raise _wrong(name, values, "must be a list")
        if len(values) > MAX_STOP:
            raise InvalidRequest(f"`{name}` has {len(values)} entries; at most {MAX_STOP}", param=name)
    for text in sampling.stop:
        _check_text("stop", text, 1, MAX_STOP_CHARS)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)


def _validate_resumed(request: AddRequest, limits: ModelLimits) -> None:
    num_output = resolve_max_tokens(request.sampling, len(request.prompt_token_ids), limits)
    seen: set[int] = set()
    for choice in request.resumed or ():
        _check_int("resumed", choice.index, 0, request.sampling.n - 1)
        if choice.index in seen:
            raise _wrong("resumed", choice.index, "names a choice twice")
        if len(choice.token_ids) > num_output:
            raise _wrong("resumed", len(choice.token_ids), f"has more tokens than `max_tokens` {num_output}")
        seen.add(choice.index)
        _check_ids("resumed", choice.token_ids, limits.vocab_size)
    if not seen:
        raise _wrong("resumed", request.resumed, "must name at least one choice, or be null")


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    _check_ids_exact(name, ids)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise _wrong(name, wrong, f"is no token id; ids of this model are 0 to {vocab_size - 1}")


def _check_ids_exact(name: str, ids: Sequence[int]) -> None:
    if set(map(type, ids)) - {int}:
        wrong = next(token for token in ids if type(token) is not int)
        raise _wrong(name, wrong, "is no token id; ids are integers")


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int:
        raise _wrong(name, value, f"must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise _wrong(name, value, f"is out of range; must be from {low} to {high}")


def _check_number(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    bounds = f"{'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
    if type(value) not in (int, float):
        raise _wrong(name, value, f"must be a number {bounds}")
    if not low <= value <= high or (above and value == low):  # NaN is refused too
        raise _wrong(name, value, f"is out of range; must be {bounds}")


def _check_text(name: str, value: str, shortest: int, longest: int) -> None:
    if not isinstance(value, str):
        raise _wrong(name, value, "must be text")
    if not shortest <= len(value) <= longest:
        raise InvalidRequest(f"`{name}` has {len(value)} characters; must have {shortest} to {longest}", param=name)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequest(f"`{name}` holds a lone surrogate; must be valid Unicode", param=name)


def _wrong(name: str, value: object, what: str) -> InvalidRequest:
    return InvalidRequest(f"`{name}` {_shown(value)} {what}", param=name)


def _shown(value: object) -> str:
    """Short, and never a client's text: messages end up in logs."""
    if isinstance(value, float):
        return f"{value:g}"
    if type(value) is int:
        return str(value) if value.bit_length() <= 64 else f"of {value.bit_length()} bits"
    return f"of type {type(value).__name__}"
