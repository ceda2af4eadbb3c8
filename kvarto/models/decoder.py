"""One decoder builder: a DecoderConfig becomes a Program, whatever its family.

    embed -> [ norm, qkv, (head norm), (rope), write-kv, attention, out,          per layer; `residual` lives
               (norm), norm + residual, gate_up, activation, down, (norm) ] ...   throughout, the rest for a few ops
          -> norm + residual -> logits -> sample

After the last layer's attention only the rows that are sampled go on: nobody reads what the others would become.

A block's output is not added to the residual stream by an op of its own: the next norm does it. Buffers carry their
layer's name, so that a lifespan is what one layer needs and the planner can reuse the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.core.buffers import Buffer, Rows, Source, Transform, Weight
from kvarto.core.dtype import DType
from kvarto.core.ops import (
    Activate,
    Attention,
    Embed,
    Experts,
    GatedActivation,
    Gather,
    HeadNorm,
    Linear,
    Logits,
    Norm,
    NormKind,
    Op,
    Rope,
    Route,
    Sample,
    WriteKV,
)
from kvarto.core.program import Program
from kvarto.models.decoder_config import DecoderConfig, ExpertsConfig, LayerConfig
from kvarto.models.layer_groups import group_layers, num_padding_slots

RESIDUAL = "residual"
EMBED = "embed"


def build_program(config: DecoderConfig, dtype: DType) -> Program:
    """Compile a decoder. Matrices are stored as `dtype`; norms and biases always as f32."""
    program = _Builder(config, dtype).build()
    program.check()
    return program


class _Builder:
    """Collects buffers, weights and ops in order."""

    def __init__(self, config: DecoderConfig, dtype: DType) -> None:
        self.config = config
        self._dtype = dtype
        self._buffers: dict[str, Buffer] = {}
        self._weights: dict[str, Weight] = {}
        self._ops: list[Op] = []
        self._slots: dict[int, tuple[int, int]] = {}
        """Layer group and slot of each layer."""
        self._residual = RESIDUAL
        self._rows = Rows.TOKENS
        """Of buffers that are yet to come."""

    def build(self) -> Program:
        config = self.config
        groups = group_layers([layer.window for layer in config.layers], config.heads)
        self._slots = {layer: (g, slot) for g, group in enumerate(groups) for slot, layer in enumerate(group.layers)}
        self._embed()
        pending: str | None = None
        for index, layer in enumerate(config.layers):
            pending = self._attention_block(index, layer, pending)
            pending = self._mlp_block(index, layer, pending)
        assert pending is not None, "a decoder has at least one layer"
        self._sample(pending)
        return Program(
            architecture=config.model_type,
            buffers=self._buffers,
            weights=self._weights,
            ops=tuple(self._ops),
            layer_groups=groups,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            num_padding_layer_slots=num_padding_slots(groups),
        )

    # Whole blocks. Each takes and returns the buffer whose content still has to join the residual stream.

    def _embed(self) -> None:
        config, names = self.config, self.config.names
        table = self._weight(EMBED, (config.vocab_size, config.hidden_size), [Source(self._name(names.embed))])
        position_table = None
        if names.position_table is not None:
            shape = (config.max_positions, config.hidden_size)
            position_table = self._weight("positions", shape, [Source(self._name(names.position_table))])
        self._buffer(RESIDUAL, config.hidden_size)
        self._ops.append(Embed(RESIDUAL, table, config.embed_scale, position_table))

    def _attention_block(self, index: int, layer: LayerConfig, pending: str | None) -> str:
        config, names, heads = self.config, self.config.names, self.config.heads
        label = f"layer{index}"
        x = self._norm(f"{label}.attention_norm", names.attention_norm, index, pending)
        qkv = self._linear(f"{label}.qkv", x, heads.width, names.qkv, index, has_bias=config.has_qkv_bias)
        if config.has_head_norm:
            q_weight = self._norm_weight(f"{label}.q_norm", names.q_norm, index, heads.head_dim)
            k_weight = self._norm_weight(f"{label}.k_norm", names.k_norm, index, heads.head_dim)
            self._ops.append(HeadNorm(qkv, q_weight, k_weight, heads, config.norm_eps))
        if layer.rope is not None:
            self._ops.append(Rope(qkv, heads, layer.rope.inv_freq, layer.rope.attention_factor))
        group, slot = self._slots[index]
        self._ops.append(WriteKV(qkv, heads, group, slot))
        attended = self._buffer(f"{label}.attention", heads.num_qo_heads * heads.head_dim)
        scale, softcap = layer.attention_scale, config.attention_softcap
        self._ops.append(Attention(qkv, attended, heads, group, slot, scale, layer.window, softcap))
        if index == len(config.layers) - 1:
            attended = self._keep_sampled(attended)
        out = self._linear(
            f"{label}.out", attended, config.hidden_size, (names.attention_out,), index, has_bias=config.has_out_bias
        )
        return self._post_norm(f"{label}.post_attention_norm", names.post_attention_norm, index, out)

    def _keep_sampled(self, x: str) -> str:
        """From here on there is one row per sample: of `x`, whose rows are returned, and of the residual stream."""
        self._rows, residual = Rows.SAMPLES, self._residual
        kept = self._buffer(f"{x}.sampled", self._buffers[x].width)
        self._residual = self._buffer(f"{residual}.sampled", self._buffers[residual].width)
        self._ops += [Gather(x, kept), Gather(residual, self._residual)]
        return kept

    def _mlp_block(self, index: int, layer: LayerConfig, pending: str) -> str:
        config, names = self.config, self.config.names
        label = f"layer{index}"
        x = self._norm(f"{label}.mlp_norm", names.mlp_norm, index, pending)
        if layer.has_experts:
            assert config.experts is not None, "a layer with experts needs their sizes"
            out = self._experts(label, index, config.experts, x)
        else:
            out = self._dense(label, index, x)
        return self._post_norm(f"{label}.post_mlp_norm", names.post_mlp_norm, index, out)

    def _dense(self, label: str, index: int, x: str) -> str:
        config, names = self.config, self.config.names
        width = config.ffn_size * (2 if config.is_gated else 1)
        raised = self._linear(f"{label}.gate_up", x, width, names.gate_up, index, has_bias=config.has_mlp_bias)
        activated = self._buffer(f"{label}.activated", config.ffn_size)
        activation = GatedActivation if config.is_gated else Activate
        self._ops.append(activation(raised, activated, config.activation))
        return self._linear(
            f"{label}.down", activated, config.hidden_size, (names.down,), index, has_bias=config.has_mlp_bias
        )

    def _experts(self, label: str, index: int, experts: ExpertsConfig, x: str) -> str:
        names, hidden, ffn = self.config.names, self.config.hidden_size, experts.ffn_size
        ids = self._buffer(f"{label}.expert_ids", experts.top_k, dtype=DType.I32)
        shares = self._buffer(f"{label}.expert_shares", experts.top_k)
        router = self._weight(f"{label}.router", (experts.num_experts, hidden), self._sources((names.router,), index))
        self._ops.append(Route(x, ids, shares, router, experts.top_k, experts.is_normalised))
        every = range(experts.num_experts)
        gate_up_sources = [s for e in every for s in self._sources(names.expert_gate_up, index, e)]
        down_sources = [s for e in every for s in self._sources((names.expert_down,), index, e)]
        gate_up = self._weight(f"{label}.experts_gate_up", (experts.num_experts, 2 * ffn, hidden), gate_up_sources)
        down = self._weight(f"{label}.experts_down", (experts.num_experts, hidden, ffn), down_sources)
        out = self._buffer(f"{label}.experts", hidden)
        self._ops.append(Experts(x, ids, shares, out, gate_up, down, self.config.activation, experts.top_k))
        return out

    def _sample(self, pending: str) -> None:
        config, names = self.config, self.config.names
        x = self._norm("final_norm", names.final_norm, 0, pending)
        table = EMBED
        if not config.is_tied:
            shape = (config.vocab_size, config.hidden_size)
            table = self._weight("logits", shape, [Source(f"{names.logits}.weight")])
        logits = self._buffer("logits", config.vocab_size)
        self._ops += [Logits(x, logits, table, softcap=config.logit_softcap), Sample(logits)]

    # Single ops.

    def _norm(self, label: str, template: str, index: int, pending: str | None) -> str:
        """Norm of the residual stream, after what is pending has joined it."""
        config = self.config
        weight, bias = self._norm_parameters(label, template, index)
        out = self._buffer(label, config.hidden_size)
        x, residual = (self._residual, None) if pending is None else (pending, self._residual)
        self._ops.append(Norm(x, out, weight, config.norm_kind, config.norm_eps, bias, residual))
        return out

    def _post_norm(self, label: str, template: str, index: int, x: str) -> str:
        config = self.config
        if not config.has_post_norms:
            return x
        weight, bias = self._norm_parameters(label, template, index)
        out = self._buffer(label, config.hidden_size)
        self._ops.append(Norm(x, out, weight, config.norm_kind, config.norm_eps, bias))
        return out

    def _linear(self, label: str, x: str, width: int, templates: Sequence[str], index: int, *, has_bias: bool) -> str:
        shape = (width, self._buffers[x].width)
        weight = self._weight(label, shape, self._sources(templates, index))
        bias = None
        if has_bias:
            sources = [Source(self._name(template, index, suffix="bias")) for template in templates]
            bias = self._weight(f"{label}_bias", (width,), sources, DType.F32)
        out = self._buffer(label, width)
        self._ops.append(Linear(x, out, weight, bias))
        return out

    # Names, weights, buffers.

    def _norm_parameters(self, label: str, template: str, index: int) -> tuple[str, str | None]:
        width = self.config.hidden_size
        weight = self._norm_weight(label, template, index, width)
        if self.config.norm_kind is NormKind.RMS:
            return weight, None
        source = Source(self._name(template, index, suffix="bias"))
        return weight, self._weight(f"{label}_bias", (width,), [source], DType.F32)

    def _norm_weight(self, label: str, template: str, index: int, width: int) -> str:
        transform = Transform.ADD_ONE if self.config.is_norm_offset else Transform.NONE
        return self._weight(label, (width,), [Source(self._name(template, index), transform)], DType.F32)

    def _sources(self, templates: Sequence[str], index: int, expert: int = 0) -> list[Source]:
        transform = self.config.names.matrix_transform
        return [Source(self._name(template, index, expert), transform) for template in templates]

    def _name(self, template: str, index: int = 0, expert: int = 0, *, suffix: str = "weight") -> str:
        return f"{self.config.names.root}{template.format(layer=index, expert=expert)}.{suffix}"

    def _weight(self, name: str, shape: tuple[int, ...], sources: Sequence[Source], dtype: DType | None = None) -> str:
        assert name not in self._weights, f"weight `{name}` is defined twice"
        self._weights[name] = Weight(name, shape, dtype or self._dtype, tuple(sources))
        return name

    def _buffer(self, name: str, width: int, *, dtype: DType = DType.F32) -> str:
        assert name not in self._buffers, f"buffer `{name}` is defined twice"
        self._buffers[name] = Buffer(name, width, self._rows, dtype)
        return name
