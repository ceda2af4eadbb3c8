"""Which kernel runs which op."""

from __future__ import annotations

from typing import Any

from kvarto.core import ops
from kvarto.ops.reference.activation import ActivateKernel, GatedActivationKernel
from kvarto.ops.reference.attention import AttentionKernel
from kvarto.ops.reference.embed import EmbedKernel
from kvarto.ops.reference.experts import ExpertsKernel
from kvarto.ops.reference.gather import GatherKernel
from kvarto.ops.reference.head_norm import HeadNormKernel
from kvarto.ops.reference.kernel import Kernel
from kvarto.ops.reference.linear import LinearKernel
from kvarto.ops.reference.logits import LogitsKernel
from kvarto.ops.reference.norm import NormKernel
from kvarto.ops.reference.rope import RopeKernel
from kvarto.ops.reference.route import RouteKernel
from kvarto.ops.reference.sample import SampleKernel
from kvarto.ops.reference.write_kv import WriteKVKernel

KERNELS: dict[type[ops.Op], type[Kernel[Any]]] = {
    ops.Embed: EmbedKernel,
    ops.Norm: NormKernel,
    ops.HeadNorm: HeadNormKernel,
    ops.Linear: LinearKernel,
    ops.Rope: RopeKernel,
    ops.WriteKV: WriteKVKernel,
    ops.Attention: AttentionKernel,
    ops.GatedActivation: GatedActivationKernel,
    ops.Activate: ActivateKernel,
    ops.Route: RouteKernel,
    ops.Experts: ExpertsKernel,
    ops.Gather: GatherKernel,
    ops.Logits: LogitsKernel,
    ops.Sample: SampleKernel,
}
