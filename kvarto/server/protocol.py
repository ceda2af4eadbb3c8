"""Bodies of the OpenAI-compatible API, as typed values: what may come in, and what goes out.

A field that is None was not sent (or was sent as null, which many clients do for "not set"). Names and meanings are
OpenAI's, with vLLM's additions; whether values fit the model is decided at the engine's door.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct):
    """What a stream carries beside tokens."""

    include_usage: bool | None = None
    """One last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chat share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    """Text, texts, token ids, or lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# Known fields that would change the output and that we do not have: refused rather than ignored.
UNSUPPORTED = {
    "best_of": "`best_of` was removed from the API; use `n` and choose among the answers",
    "suffix": "`suffix` needs a model trained to fill in the middle, which this server does not offer",
    "tools": "`tools` are not offered by this server; describe them in a message instead",
    "functions": "`functions` are not offered by this server; describe them in a message instead",
    "response_format": "`response_format` other than `text` is not offered by this server",
    "structured_outputs": "`structured_outputs` are not offered by this server",
    "guided_json": "`guided_json` is not offered by this server",
    "guided_regex": "`guided_regex` is not offered by this server",
    "guided_choice": "`guided_choice` is not offered by this server",
    "guided_grammar": "`guided_grammar` is not offered by this server",
    "use_beam_search": "`use_beam_search` is not offered by this server; use `n` with a `temperature`",
    "allowed_token_ids": "`allowed_token_ids` is not offered by this server; use `logit_bias`",
    "bad_words": "`bad_words` is not offered by this server; use `logit_bias` with -100",
    "prompt_embeds": "`prompt_embeds` are not offered by this server; send text or token ids",
    "chat_template": "`chat_template` cannot be sent with a request; the model's own is used",
    "audio": "`audio` is not offered by this server; it answers in text",
}
# Values of them that ask for nothing.
HARMLESS: dict[str, tuple[bytes, ...]] = {
    "response_format": (b'{"type":"text"}',),
    "use_beam_search": (b"false",),
    "tools": (b"[]",),
    "functions": (b"[]",),
    "bad_words": (b"[]",),
    "suffix": (b'""',),
}
# OpenAI's fields that cannot change what this server answers.
IGNORED = frozenset(
    {
        "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
        "tool_choice", "function_call", "modalities", "verbosity", "reasoning_effort", "prediction", "request_id",
        "spaces_between_special_tokens", "detokenize", "logprobs_mode", "prompt_cache_retention",
    }
)  # fmt: skip


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's KV came from."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Four lists with one entry per token. The first token of a prompt has null for both log-probabilities."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text. In a stream, its new part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    """A token at some place, with its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """A token of the answer, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer's message."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new in a message: the role in the first chunk, then text."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    """New part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong. `param` names the field; `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The shape of every error."""

    error: ErrorBody


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that can be asked for."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvarto"
    root: str
    parent: str | None = None
    max_model_len: int


class AdapterCard(ModelCard, kw_only=True):
    """An adapter that can be asked for as a model; `parent` is its base."""

    rank: int | None
    """The largest of its updates; null, like its sizes, while nobody has asked for it."""
    size_bytes: int | None
    num_pages: int | None
    dtype: str | None
    """Of A and B in memory: `bf16`, `int8`, or `bf16+int8` where both are there."""
    tier: str
    """Where its bytes are: `device`, `host`, `disk`, or `refused` when its files were not accepted."""
    num_requests: int


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """Inside the folders that the server was started with."""
    load_inplace: bool | None = None
    """Accepted, and always so: a name that is loaded gets a new meaning."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted and ignored; names are enough."""


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: str
