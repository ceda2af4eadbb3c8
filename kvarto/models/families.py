"""The model families that are built in, each a reading of its `config.json` into one DecoderConfig.

Defaults are those of each family's reference configuration; sizes have none, but for Gemma 3, whose published files
leave them out. What a family never varies is fixed here, so that a file that varies it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvarto.core.errors import BadFile
from kvarto.core.ops import Activation, HeadShape, NormKind
from kvarto.models import tensor_names
from kvarto.models.config_keys import ConfigKeys
from kvarto.models.decoder_config import DecoderConfig, ExpertsConfig, LayerConfig
from kvarto.models.rope import RopeDefaults, read_layer_type_ropes, read_rope
from kvarto.models.tensor_names import TensorNames

MAX_LAYERS = 1024
"""A lying file must not make us build a program without end."""
MAX_EXPERTS = 4096
MAX_HEAD_DIM = 1 << 14

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = {FULL: FULL, SLIDING: SLIDING, "attention": FULL}

Windows = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a family's config may leave out."""

    norm_eps: float = 1e-6
    is_tied: bool = False
    rope_theta: float = 10_000.0
    is_rope_partial: bool = False
    is_rope_by_layer_type: bool = False
    """The family reads its rotations itself."""
    head_dim: int | None = None
    """None: `hidden_size / num_attention_heads`."""
    sizes: Mapping[str, int] | None = None
    activation_key: str = "hidden_act"
    activation: str = "silu"


def _base(keys: ConfigKeys, names: TensorNames, defaults: Defaults) -> DecoderConfig:
    """A plain pre-norm decoder with full attention and one rotation for all layers."""
    sizes = defaults.sizes or {}
    num_layers = keys.integer("num_hidden_layers", sizes.get("num_hidden_layers"), maximum=MAX_LAYERS)
    hidden_size = keys.integer("hidden_size", sizes.get("hidden_size"))
    heads = _heads(keys, hidden_size, defaults)
    max_positions = keys.integer("max_position_embeddings", sizes.get("max_position_embeddings"))
    rope_defaults = RopeDefaults(heads.head_dim, max_positions, defaults.rope_theta, defaults.is_rope_partial)
    rope = None if defaults.is_rope_by_layer_type else read_rope(keys, rope_defaults)
    return DecoderConfig(
        model_type=keys.model_type,
        names=names,
        vocab_size=keys.integer("vocab_size", sizes.get("vocab_size")),
        hidden_size=hidden_size,
        ffn_size=keys.integer("intermediate_size", sizes.get("intermediate_size")),
        heads=heads,
        max_positions=max_positions,
        norm_eps=keys.number("rms_norm_eps", defaults.norm_eps),
        activation=_activation(keys, defaults.activation_key, defaults.activation),
        is_tied=keys.flag("tie_word_embeddings", defaults.is_tied),
        layers=(LayerConfig(heads.head_dim**-0.5, rope),) * num_layers,
    )


def _heads(keys: ConfigKeys, hidden_size: int, defaults: Defaults) -> HeadShape:
    sizes = defaults.sizes or {}
    num_qo_heads = keys.integer("num_attention_heads", sizes.get("num_attention_heads"))
    num_kv_heads = keys.integer("num_key_value_heads", sizes.get("num_key_value_heads", num_qo_heads))
    if num_qo_heads % num_kv_heads:
        raise BadFile(
            f"config.json: `num_attention_heads` is {num_qo_heads}; it must be a multiple of "
            f"`num_key_value_heads`, {num_kv_heads}"
        )
    head_dim = keys.optional_integer("head_dim") or defaults.head_dim
    if head_dim is None:
        if hidden_size % num_qo_heads:
            raise BadFile(
                f"config.json: `hidden_size` is {hidden_size}; without `head_dim` it must be a multiple of "
                f"`num_attention_heads`, {num_qo_heads}"
            )
        head_dim = hidden_size // num_qo_heads
    if head_dim > MAX_HEAD_DIM:
        raise BadFile(f"config.json: heads of {head_dim} dims; at most {MAX_HEAD_DIM} make sense")
    return HeadShape(num_qo_heads, num_kv_heads, head_dim)


def _activation(keys: ConfigKeys, key: str, default: str) -> Activation:
    name = keys.text(key, default)
    if name not in ACTIVATIONS:
        raise keys.unsupported(key, ", ".join(f"`{known}`" for known in ACTIVATIONS))
    return ACTIVATIONS[name]


def _layer_types(keys: ConfigKeys, num_layers: int, default: Callable[[int], str]) -> tuple[str, ...]:
    """The kind of attention of each layer: `layer_types`, or what `default` says for its index."""
    given = keys.texts("layer_types")
    if given is None:
        return tuple(default(layer) for layer in range(num_layers))
    if any(layer_type not in LAYER_TYPES for layer_type in given):
        raise keys.unsupported("layer_types", f"`{FULL}` and `{SLIDING}`")
    if len(given) != num_layers:
        raise BadFile(f"config.json: `layer_types` has {len(given)} entries; `num_hidden_layers` is {num_layers}")
    return tuple(LAYER_TYPES[layer_type] for layer_type in given)


def _windows(keys: ConfigKeys, layer_types: Sequence[str], window: int | None) -> Windows:
    if SLIDING in layer_types and window is None:
        raise BadFile(f"config.json: `layer_types` names `{SLIDING}`, but no `sliding_window` is in force")
    return [window if layer_type == SLIDING else None for layer_type in layer_types]


def _with_windows(config: DecoderConfig, windows: Windows) -> DecoderConfig:
    layers = (replace(layer, window=window) for layer, window in zip(config.layers, windows, strict=True))
    return replace(config, layers=tuple(layers))


def _llama(keys: ConfigKeys) -> DecoderConfig:
    """Llama 2 and 3, SmolLM 2, and what shares their form."""
    keys.fix("rope_interleaved", False)
    has_bias = keys.flag("attention_bias", False)
    base = _base(keys, tensor_names.LLAMA, Defaults())
    return replace(base, has_qkv_bias=has_bias, has_out_bias=has_bias, has_mlp_bias=keys.flag("mlp_bias", False))


def _mistral(keys: ConfigKeys) -> DecoderConfig:
    """Mistral, and Ministral, which names the layers that slide."""
    base = _base(keys, tensor_names.LLAMA, Defaults())
    window = keys.optional_integer("sliding_window")
    layer_types = _layer_types(keys, len(base.layers), lambda _: FULL if window is None else SLIDING)
    return _with_windows(base, _windows(keys, layer_types, window))


def _qwen_windows(keys: ConfigKeys, num_layers: int) -> Windows:
    window = keys.optional_integer("sliding_window")
    first = keys.integer("max_window_layers", 28, minimum=0)
    if not keys.flag("use_sliding_window", False):
        window = None
    layer_types = _layer_types(keys, num_layers, lambda layer: SLIDING if window and layer >= first else FULL)
    return _windows(keys, layer_types, window)


def _qwen2(keys: ConfigKeys) -> DecoderConfig:
    """Qwen 2 and 2.5: biases on q, k and v alone."""
    keys.fix("attention_bias", True)
    base = _base(keys, tensor_names.LLAMA, Defaults())
    return replace(_with_windows(base, _qwen_windows(keys, len(base.layers))), has_qkv_bias=True)


def _qwen3(keys: ConfigKeys) -> DecoderConfig:
    has_bias = keys.flag("attention_bias", False)
    base = _base(keys, tensor_names.LLAMA, Defaults(head_dim=128))
    base = _with_windows(base, _qwen_windows(keys, len(base.layers)))
    return replace(base, has_qkv_bias=has_bias, has_out_bias=has_bias, has_head_norm=True)


def _smollm3(keys: ConfigKeys) -> DecoderConfig:
    """SmolLM 3: some layers do not rotate, and those may slide."""
    has_bias = keys.flag("attention_bias", False)
    base = _base(keys, tensor_names.LLAMA, Defaults(is_tied=True, rope_theta=2_000_000.0))
    num_layers = len(base.layers)
    interval = keys.integer("no_rope_layer_interval", 4)
    rotates = keys.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(num_layers))
    if len(rotates) < num_layers:
        raise BadFile(f"config.json: `no_rope_layers` has {len(rotates)} entries for {num_layers} layers")
    window = keys.optional_integer("sliding_window")
    if not keys.flag("use_sliding_window", False):
        window = None
    layer_types = _layer_types(keys, num_layers, lambda layer: FULL if window is None or rotates[layer] else SLIDING)
    base = _with_windows(base, _windows(keys, layer_types, window))
    layers = (replace(layer, rope=layer.rope if rotates[i] else None) for i, layer in enumerate(base.layers))
    return replace(
        base,
        layers=tuple(layers),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_mlp_bias=keys.flag("mlp_bias", False),
    )


def _phi3(keys: ConfigKeys) -> DecoderConfig:
    """Phi-3 and Phi-4 with the default rotation; their long-context variants use `longrope`."""
    for key in ("rope_parameters", "rope_scaling"):
        level = keys.level(key)
        if level is not None:
            # Files of this family say "su" or "yarn" where they mean longrope; linear and llama3 were never its own.
            level.fix("rope_type", "default")
            level.fix("type", "default")
    base = _base(keys, tensor_names.PHI3, Defaults(norm_eps=1e-5, is_rope_partial=True))
    return _with_windows(base, [keys.optional_integer("sliding_window")] * len(base.layers))


def _gemma(keys: ConfigKeys, defaults: Defaults) -> DecoderConfig:
    """What Gemma 2 and 3 share, without windows."""
    keys.fix("use_bidirectional_attention", False)
    has_bias = keys.flag("attention_bias", False)
    scale = keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    base = _base(keys, tensor_names.GEMMA, defaults)
    return replace(
        base,
        layers=tuple(replace(layer, attention_scale=scale) for layer in base.layers),
        is_norm_offset=True,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_post_norms=True,
        embed_scale=base.hidden_size**0.5,
    )


def _gemma2(keys: ConfigKeys) -> DecoderConfig:
    """Gemma 2: every other layer slides, scores and logits are softcapped."""
    defaults = Defaults(is_tied=True, head_dim=256, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    base = _gemma(keys, defaults)
    layer_types = _layer_types(keys, len(base.layers), lambda layer: FULL if layer % 2 else SLIDING)
    base = _with_windows(base, _windows(keys, layer_types, keys.integer("sliding_window", 4096)))
    return replace(
        base,
        attention_softcap=_softcap(keys, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(keys, "final_logit_softcapping", 30.0),
    )


def _softcap(keys: ConfigKeys, key: str, default: float) -> float | None:
    """`default` where the key is absent; null switches it off."""
    return keys.optional_number(key) if keys.is_present(key) else default


GEMMA3_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def _gemma3(keys: ConfigKeys) -> DecoderConfig:
    """Gemma 3, text: five sliding layers to a full one, each kind with its own rotation; q and k heads are normed."""
    keys.fix("attn_logit_softcapping")
    defaults = Defaults(
        is_tied=True,
        head_dim=256,
        sizes=GEMMA3_SIZES,
        is_rope_by_layer_type=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
    )
    base = _gemma(keys, defaults)
    period = keys.integer("sliding_window_pattern", 6)
    layer_types = _layer_types(keys, len(base.layers), lambda layer: SLIDING if (layer + 1) % period else FULL)
    base = _with_windows(base, _windows(keys, layer_types, keys.integer("sliding_window", 4096)))
    full = RopeDefaults(base.heads.head_dim, base.max_positions, theta=1_000_000.0)
    ropes = read_layer_type_ropes(keys, full, replace(full, theta=10_000.0))
    layers = (replace(layer, rope=ropes[kind]) for layer, kind in zip(base.layers, layer_types, strict=True))
    return replace(
        base,
        layers=tuple(layers),
        has_head_norm=True,
        logit_softcap=keys.optional_number("final_logit_softcapping"),
    )


def _gpt2(keys: ConfigKeys) -> DecoderConfig:
    """GPT-2: learned positions, layer norms and biases everywhere, matrices transposed on file."""
    keys.fix("add_cross_attention", False)
    hidden_size = keys.integer("n_embd")
    num_heads = keys.integer("n_head")
    if hidden_size % num_heads:
        raise BadFile(f"config.json: `n_embd` is {hidden_size}; it must be a multiple of `n_head`, {num_heads}")
    heads = HeadShape(num_heads, num_heads, hidden_size // num_heads)
    scale = heads.head_dim**-0.5 if keys.flag("scale_attn_weights", True) else 1.0
    is_by_layer = keys.flag("scale_attn_by_inverse_layer_idx", False)
    num_layers = keys.integer("n_layer", maximum=MAX_LAYERS)
    return DecoderConfig(
        model_type=keys.model_type,
        names=tensor_names.GPT2,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=keys.integer("n_inner", 4 * hidden_size),
        heads=heads,
        max_positions=keys.integer("n_positions"),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=_activation(keys, "activation_function", "gelu_new"),
        is_tied=keys.flag("tie_word_embeddings", True),
        layers=tuple(LayerConfig(scale / (i + 1) if is_by_layer else scale) for i in range(num_layers)),
        norm_kind=NormKind.LAYER,
        is_gated=False,
        has_qkv_bias=True,
        has_out_bias=True,
        has_mlp_bias=True,
    )


def _experts(keys: ConfigKeys, *, ffn_size: int, top_k: int | None, is_normalised: bool) -> ExpertsConfig:
    # transformers 5 writes `num_local_experts` for all families, older files of Qwen `num_experts`.
    key = "num_local_experts" if keys.has("num_local_experts") else "num_experts"
    num_experts = keys.integer(key, maximum=MAX_EXPERTS)
    chosen = keys.integer("num_experts_per_tok", top_k, maximum=num_experts)
    return ExpertsConfig(num_experts, chosen, ffn_size, is_normalised)


def _mixtral(keys: ConfigKeys) -> DecoderConfig:
    base = _base(keys, tensor_names.MIXTRAL, Defaults(norm_eps=1e-5, rope_theta=1_000_000.0))
    base = _with_windows(base, [keys.optional_integer("sliding_window")] * len(base.layers))
    return replace(
        base,
        experts=_experts(keys, ffn_size=base.ffn_size, top_k=2, is_normalised=True),
        layers=tuple(replace(layer, has_experts=True) for layer in base.layers),
    )


def _qwen3_moe(keys: ConfigKeys) -> DecoderConfig:
    """Qwen 3 with experts in some layers; a window, where one is in force, holds for all of them."""
    has_bias = keys.flag("attention_bias", False)
    base = _base(keys, tensor_names.LLAMA, Defaults())
    window = keys.optional_integer("sliding_window")
    if not keys.flag("use_sliding_window", False):
        window = None
    base = _with_windows(base, [window] * len(base.layers))
    dense = keys.integers("mlp_only_layers") or ()
    step = keys.integer("decoder_sparse_step", 1)
    layers = (replace(layer, has_experts=i not in dense and (i + 1) % step == 0) for i, layer in enumerate(base.layers))
    ffn_size = keys.integer("moe_intermediate_size")
    is_normalised = keys.flag("norm_topk_prob", False)
    return replace(
        base,
        experts=_experts(keys, ffn_size=ffn_size, top_k=None, is_normalised=is_normalised),
        layers=tuple(layers),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_head_norm=True,
    )


FAMILIES: Mapping[str, Callable[[ConfigKeys], DecoderConfig]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "ministral": _mistral,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}
"""By `model_type`."""
