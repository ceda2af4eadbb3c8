"""From a request's sampling fields and the model's defaults to SamplingParams. The engine's door checks limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarto.core.errors import InvalidRequest
from kvarto.core.sampling import SamplingParams
from kvarto.server.protocol import SamplingFields

MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a generation_config.json may set for requests that do not."""
_MAX_INT64 = 2**63 - 1
_PLAIN = (
    "n", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


def sampling_params(
    fields: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Fields that were not sent take the model's default, then the neutral one. Raises InvalidRequest."""
    values: dict[str, Any] = {name: defaults[name] for name in MODEL_DEFAULTS if defaults.get(name) is not None}
    values |= {name: value for name in _PLAIN if (value := getattr(fields, name)) is not None}
    if fields.top_k is not None:
        values["top_k"] = fields.top_k
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(fields.logit_bias or {}),
        seed=_seed(fields.seed),
        stop=_stop(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
    )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed 64-bit; ours are the 63 bits of them."""
    if seed is None:
        return None
    if not -_MAX_INT64 - 1 <= seed <= _MAX_INT64:
        raise InvalidRequest(f"`seed` is out of range; must be from {-_MAX_INT64 - 1} to {_MAX_INT64}", param="seed")
    return seed & _MAX_INT64


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """Keys are token ids in JSON's text."""
    wrong = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) <= 10)]
    if wrong:
        raise InvalidRequest(f"`logit_bias` has the key `{wrong[0][:40]}`; keys are token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
