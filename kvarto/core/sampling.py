"""What a client may ask of sampling, as a plain value. `engine/` checks it against a model's limits."""

from __future__ import annotations

import msgspec

MAX_CHOICES = 128
"""Limit on `n`."""
MAX_LOGPROBS = 20
"""Limit on `logprobs` and `prompt_logprobs`; what OpenAI allows."""
MAX_STOP = 16
"""Limit on the number of stop strings, and on that of stop token ids."""
MAX_LOGIT_BIAS = 1024
"""Limit on the entries of `logit_bias`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names and meanings are those of OpenAI and vLLM."""

    n: int = 1
    """Choices per prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    logit_bias: dict[int, float] = {}
    """Added to logits, by token id."""
    seed: int | None = None
    """0 ≤ seed < 2^63. A request without one gets one at the door, so that it can be resumed with the same noise."""
    max_tokens: int | None = None
    """None: what is left of the context."""
    min_tokens: int = 0
    """Stop ids and end of text cannot be drawn before that many tokens; stop strings are not looked for."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or token at the end of the text."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probability of each output token, with that many likeliest alternatives; None is off.
    From the raw logits, before temperature, penalties and bias."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The prompt is then computed whole, never taken from the prefix cache."""
