"""Reading a `config.json` that nobody vouches for: every key is typed, bounded, and accounted for.

A key is *read* (it shapes the model), *fixed* (only the value that we implement passes), *irrelevant* (training,
special tokens, provenance), or unknown. Unknown keys pass, as published files are full of them, but for those that
change the arithmetic of some decoder: they are refused by name unless their value switches them off. What is left is
listed, so that a person can see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarto.core.errors import BadFile, UnsupportedModel

MAX_SIZE = 1 << 24
"""Upper bound on any width, head count or position count: far above real models, far below an overflow."""
SMALLEST, LARGEST = 1e-30, 1e15
"""Bounds on any number: wide, and such that products of a few stay finite in float32 and float64."""

IRRELEVANT = frozenset({
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_dropout", "attn_pdrop", "auto_map",
    "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop",
    "eos_token_id", "finetuning_task", "gradient_checkpointing", "hidden_act", "id2label", "initializer_range",
    "is_llama_config", "label2id", "max_window_layers", "model_type", "n_ctx", "name_or_path", "num_labels",
    "original_max_position_embeddings", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "pretraining_tp", "problem_type", "reorder_and_upcast_attn", "resid_pdrop", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "sliding_window_size", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tie_last_hidden_states", "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip
"""Keys that do not change logits where a family does not read them: training, special tokens, labels, provenance,
another spelling of the same sum."""

CHANGES_LOGITS: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (), "alibi": (), "attention_bias": (), "attention_chunk_size": (),
    "attention_multiplier": (), "attn_logit_softcapping": (), "attn_temperature_tuning": (), "clip_qkv": (),
    "compression_config": (), "cross_attention_layers": (), "dim_model_base": (), "embedding_multiplier": (1,),
    "final_logit_softcapping": (), "first_k_dense_replace": (), "is_causal": (True,), "is_encoder_decoder": (),
    "kv_lora_rank": (), "layer_types": (), "lm_head_multiplier": (1,), "logit_scale": (1,), "logits_scaling": (1,),
    "mlp_bias": (), "moe_intermediate_size": (), "n_routed_experts": (), "n_shared_experts": (),
    "no_rope_layers": (), "num_experts": (), "num_local_experts": (), "parallel_attn": (),
    "partial_rotary_factor": (1,), "per_layer_config": (), "q_lora_rank": (), "qk_layernorm": (), "qk_norm": (),
    "quantization_config": (), "query_pre_attn_scalar": (), "residual_multiplier": (1,), "rope_interleaved": (),
    "rotary_pct": (1,), "scale_depth": (), "scale_emb": (1,), "shared_expert_intermediate_size": (),
    "sliding_window": (), "sliding_window_pattern": (), "use_alibi": (), "use_bidirectional_attention": (),
    "use_mrope": (), "use_parallel_residual": (), "use_qk_norm": (), "use_sliding_window": (),
}  # fmt: skip
"""Keys that change the arithmetic of some decoder, with the values that switch them off; null, false, 0 and empty
always do. They are refused in families that do not read them."""


class ConfigKeys:
    """One level of a `config.json`: typed reads that remember which keys were asked for.

    A read raises BadFile for a missing key or a wrong type, and UnsupportedModel for a value that is not built in.
    """

    def __init__(
        self, values: Mapping[str, Any], model_type: str, path: str = "", read: set[str] | None = None
    ) -> None:
        self._values = values
        self.model_type = model_type
        self._path = path
        self.read: set[str] = set() if read is None else read
        """Dotted names of the keys that were asked for, whether present or not."""

    def get(self, key: str) -> Any:
        """The raw value, None where absent; the key counts as read."""
        self.read.add(self._path + key)
        return self._values.get(key)

    def is_present(self, key: str) -> bool:
        """Whether the key is there at all, null or not."""
        self.read.add(self._path + key)
        return key in self._values

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """An integer within its bounds; `default` where absent or null."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self._bad(key, f"an integer from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, maximum: int = MAX_SIZE) -> int | None:
        """An integer of at least 1, or None where absent or null."""
        return self.integer(key, maximum=maximum) if self.has(key) else None

    def number(self, key: str, default: float | None = None, *, minimum: float = SMALLEST) -> float:
        """A number from `minimum` to LARGEST; `default` where absent or null."""
        value = self.get(key)
        value = default if value is None else value
        # NaN fails both comparisons.
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= LARGEST:
            raise self._bad(key, f"a number from {minimum:g} to {LARGEST:g}")
        return float(value)

    def optional_number(self, key: str, *, minimum: float = SMALLEST) -> float | None:
        """A number from `minimum` to LARGEST, or None where absent or null."""
        return self.number(key, minimum=minimum) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` where absent or null."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._bad(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` where absent or null."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._bad(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, or None where absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._bad(key, "a list of integers")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(key, "a list of strings")
        return tuple(value)

    def level(self, key: str) -> ConfigKeys | None:
        """The object under `key` as keys of its own, or None where absent, null or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._bad(key, "an object")
        return ConfigKeys(value, self.model_type, f"{self._path}{key}.", self.read)

    def fix(self, key: str, *accepted: object) -> None:
        """Refuse the model unless the key is absent, null or one of `accepted`."""
        if self.has(key) and self.get(key) not in accepted:
            raise self.unsupported(key, " or ".join(f"`{value}`" for value in accepted) or "null")

    def unread(self, *, irrelevant: frozenset[str] = IRRELEVANT) -> tuple[str, ...]:
        """Keys with a value that nobody asked for and that are not listed as irrelevant, sorted."""
        return tuple(sorted(k for k in self._values if self._path + k not in self.read and k not in irrelevant))

    def refuse_unread(self, *, irrelevant: frozenset[str]) -> None:
        """Refuse the model if a key is left over: for levels in which every key changes the arithmetic."""
        for key in self.unread(irrelevant=irrelevant):
            if self._values[key] is not None:
                raise self.unsupported(key, "a file without it")

    def unknown(self) -> tuple[str, ...]:
        """The keys that we know nothing about. Refuses those left over that change the arithmetic."""
        left_over = self.unread()
        for key in left_over:
            if key in CHANGES_LOGITS and not _is_off(key, self._values[key]):
                off = " or ".join(f"`{accepted}`" for accepted in CHANGES_LOGITS[key]) or "null"
                raise self.unsupported(key, off)
        return tuple(key for key in left_over if key not in CHANGES_LOGITS)

    def unsupported(self, key: str, supported: str) -> UnsupportedModel:
        """The error that names a key, its value, and what is built in."""
        value = _shorten(self._values.get(key))
        return UnsupportedModel(
            f"`{self.model_type}` with `{self._path}{key}` = {value} is not built in; supported: {supported}"
        )

    def _bad(self, key: str, expected: str) -> BadFile:
        what = f"is {_shorten(self._values[key])}" if key in self._values else "is missing"
        return BadFile(f"config.json: `{self._path}{key}` {what}; it must be {expected}")


def _is_off(key: str, value: object) -> bool:
    if key == "layer_types" and isinstance(value, list):
        return all(layer_type == "full_attention" for layer_type in value)
    return not value or value in CHANGES_LOGITS[key]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
