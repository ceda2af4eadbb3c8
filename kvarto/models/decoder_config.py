"""What the decoder builder needs to know, whatever family it came from."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core.ops import Activation, HeadShape, NormKind
from kvarto.models.rope import Rope
from kvarto.models.tensor_names import TensorNames


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    attention_scale: float
    """Multiplies scores before softcap and softmax."""
    rope: Rope | None = None
    """None: the layer does not rotate (NoPE, or learned positions)."""
    window: int | None = None
    """Tokens that a query sees, itself included; None for full attention."""
    has_experts: bool = False
    """Its feed-forward block is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts of the layers that have one."""

    num_experts: int
    top_k: int
    ffn_size: int
    is_normalised: bool
    """The shares of the chosen experts add up to 1."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder, resolved: every question that the builder asks has an answer here."""

    model_type: str
    names: TensorNames
    vocab_size: int
    hidden_size: int
    ffn_size: int
    """Width of the dense feed-forward block."""
    heads: HeadShape
    max_positions: int
    """The context length that the model was made for."""
    norm_eps: float
    activation: Activation
    is_tied: bool
    """The output matrix is the embedding table."""
    layers: tuple[LayerConfig, ...]
    experts: ExpertsConfig | None = None
    norm_kind: NormKind = NormKind.RMS
    is_norm_offset: bool = False
    """Norm weights on file are w - 1 (Gemma)."""
    is_gated: bool = True
    """`down(act(gate(x)) * up(x))` rather than `down(act(up(x)))`."""
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norm: bool = False
    """Each q and k head is normed before rotation."""
    has_post_norms: bool = False
    """Each block's output is normed before it joins the residual stream."""
    embed_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    unknown_keys: tuple[str, ...] = ()
    """Keys of the config that nothing reads and that are not known to be irrelevant."""
