"""A PEFT folder as the GGUF file that llama.cpp reads, for bases of Llama's family and adapters of one alpha.

```text
model.layers.3.self_attn.q_proj.lora_A.weight  [rank, in]   →  blk.3.attn_q.weight.lora_a
model.layers.3.self_attn.q_proj.lora_B.weight  [out, rank]  →  blk.3.attn_q.weight.lora_b
```
In GGUF the base's rows of q and k lie with the two halves of each head interleaved, so the rows of their B do too.
Values keep their type: bfloat16 is one of llama.cpp's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter, LowRankUpdate
from kvarto.adapters.arrays import Bits, Bytes
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import BaseTargets
from kvarto.core.errors import UnsupportedAdapter

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Of a layer's linears: Hugging Face's and llama.cpp's."""
_MODULE = re.compile(r"model\.layers\.(\d+)\.(.+)")


def convert_adapter(folder: Path, path: Path, base: BaseTargets) -> None:
    """Write the adapter in `folder` to `path`. Raises AdapterError for one that is not sound or beyond this format."""
    opened = open_peft_adapter(folder, base, [folder.parent])
    adapter = opened.adapter
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, _alpha(adapter, base))
    with opened.tensors_file.opened() as file:
        for name, bits in _tensors(adapter, base, file):
            kind = gguf.GGMLQuantizationType.BF16 if bits.dtype == np.uint16 else None
            writer.add_tensor(name, bits.view(np.uint8) if kind is not None else bits, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _alpha(adapter: Adapter, base: BaseTargets) -> float:
    """llama.cpp scales by alpha / rank, one alpha for all, and by 1 where alpha is 0. A float32 there, so one here."""
    alphas = {float(np.float32(update.scaling * update.rank)) for update in adapter.updates}
    has_more = adapter.token_rows or adapter.invocation_tokens or any(
        update.bias is not None or update.magnitude is not None for update in adapter.updates
    )  # fmt: skip
    if base.architecture != "llama" or len(alphas) != 1 or 0 in alphas or has_more:
        raise UnsupportedAdapter(
            f"an adapter of `{base.architecture}` with {len(alphas)} alphas is asked for in GGUF; converted are "
            "adapters of `llama` with one alpha, which is not 0, and nothing but A and B"
        )
    return alphas.pop()


def _tensors(adapter: Adapter, base: BaseTargets, file: Bytes) -> Iterator[tuple[str, Bits]]:
    heads = {"attn_q": base.heads.num_qo_heads, "attn_k": base.heads.num_kv_heads}
    for update in adapter.updates:
        layer, kind = _place(update, base)
        lora_b = update.lora_b.read(file)
        if kind in heads:
            lora_b = interleave(lora_b, heads[kind])
        yield f"blk.{layer}.{kind}.weight.lora_a", update.lora_a.read(file)
        yield f"blk.{layer}.{kind}.weight.lora_b", lora_b


def _place(update: LowRankUpdate, base: BaseTargets) -> tuple[str, str]:
    """Layer and llama.cpp's name of a linear. Raises UnsupportedAdapter for another module."""
    modules = [module for module, target in base.by_module.items() if target == update.target]
    for match in filter(None, map(_MODULE.fullmatch, modules)):
        if match[2] in NAMES:
            return match[1], NAMES[match[2]]
    raise UnsupportedAdapter(f"`{update.lora_a.name}` is none of {', '.join(NAMES)}, which are converted")


def interleave(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """`[heads * 2 * pairs, columns]`, halves apart, to `[heads * pairs * 2, columns]`."""
    columns = rows.shape[1]
    return np.ascontiguousarray(rows.reshape(num_heads, 2, -1, columns).swapaxes(1, 2).reshape(-1, columns))
