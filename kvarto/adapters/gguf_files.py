"""Open a GGUF adapter, as llama.cpp's convert_lora_to_gguf.py writes them.

```text
<tensor of the base>.lora_a  [rank, in]       token_embd: [vocab, rank], lying the other way
<tensor of the base>.lora_b  [out, rank]      q, k of llama and its kin: rows interleaved by head, as in the base
scaling = alpha / rank, or 1 where alpha is 0
```
The interleaved rows come undone here, so B's rows are Hugging Face's, as the rows of every base are.
rsLoRA and alphas by module do not survive the conversion; PEFT's own files keep them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.adapters.arrays import Bits, LazyArray
from kvarto.adapters.assemble import NamedTensor, assemble
from kvarto.adapters.files import AdapterLimits, PinnedFile, adapter_errors, pin
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.peft_config import MAX_ALPHA, AdapterConfig, parse_peft_config
from kvarto.adapters.targets import BaseTargets
from kvarto.adapters.tensor_names import TensorKind, TensorName
from kvarto.core.dtype import DType
from kvarto.core.errors import AdapterMismatch, BadAdapter, UnsupportedAdapter
from kvarto.models.gguf import unpermute_heads
from kvarto.models.gguf_container import GGUFTensor, read_container
from kvarto.models.gguf_names import Placement, place_tensors

_ARCHITECTURES = {
    "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2", "llama": "llama", "mistral": "llama",
    "mixtral": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}  # fmt: skip
"""What llama.cpp calls the models that we have."""
_DTYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16, "Q8_0": DType.F32}
"""Values of Q8_0 are products of a float16 and a byte, which only float32 holds exactly."""
_READ = ("adapter.type", "adapter.lora.alpha", "adapter.alora.invocation_tokens")
_INFORMATIVE = ("adapter.lora.task_name", "adapter.lora.prompt_prefix")
_TABLE = "token_embd.weight"
_ENDS = (".lora_a", ".lora_b")


def open_gguf_adapter(
    path: Path, base: BaseTargets, roots: Sequence[Path], *, limits: AdapterLimits | None = None
) -> OpenedAdapter:
    """Read and check all but the values. The file lies inside one of `roots`, links followed.

    Raises BadAdapter, UnsupportedAdapter or AdapterMismatch.
    """
    limits = limits or AdapterLimits()
    file = pin(path, roots, limits.max_file_bytes)
    with adapter_errors():
        with file.opened() as raw:
            container = read_container(raw)
        if len(container.tensors) > limits.max_tensors:
            raise BadAdapter(f"`{path}` has {len(container.tensors)} tensors; at most {limits.max_tensors} are read")
        config = _config(container.metadata, base)
        tensors = [named for pair in _pairs(container.tensors).items() for named in _named(*pair, base, file)]
        adapter = assemble(tensors, config, base, max_rank=limits.max_rank)
    return OpenedAdapter(adapter, (file,))


def _config(metadata: Mapping[str, Any], base: BaseTargets) -> AdapterConfig:
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != wanted:
            raise UnsupportedAdapter(
                f"`{key}` is `{metadata.get(key)!s:.40}`, a LoRA adapter has `{wanted}`; make one with "
                "llama.cpp's convert_lora_to_gguf.py"
            )
    architecture, known = metadata.get("general.architecture"), _ARCHITECTURES.get(base.architecture)
    if architecture != known:
        raise AdapterMismatch(
            f"the adapter's `general.architecture` is `{architecture!s:.40}`, that of the base "
            f"`{base.architecture}` is `{known}`; serve the base that it was trained on"
        )
    unknown = [key for key in metadata if key.startswith("adapter.") and key not in (*_READ, *_INFORMATIVE)]
    if unknown:
        raise UnsupportedAdapter(
            f"the key `{unknown[0]:.80}` is unknown and may change the arithmetic; convert to PEFT"
        )
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not math.isfinite(alpha) or abs(alpha) > MAX_ALPHA:
        raise BadAdapter(f"`adapter.lora.alpha` is {alpha!s:.40}; a float is needed: convert the adapter again")
    values: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": alpha}
    tokens = metadata.get("adapter.alora.invocation_tokens")
    if tokens is not None:
        values["alora_invocation_tokens"] = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    return parse_peft_config(values, is_scaled_by_rank=alpha != 0)


def _pairs(tensors: Mapping[str, GGUFTensor]) -> dict[str, list[GGUFTensor]]:
    """A and B by the name of the base's tensor."""
    pairs: dict[str, list[GGUFTensor]] = {}
    for name in sorted(tensors):
        if not name.endswith(_ENDS):
            raise UnsupportedAdapter(
                f"tensor `{name}` is a whole tensor and no low-rank update; train without it, or merge the adapter"
            )
        pairs.setdefault(name[: -len(_ENDS[0])], []).append(tensors[name])
    return pairs


def _named(name: str, pair: Sequence[GGUFTensor], base: BaseTargets, file: PinnedFile) -> Iterator[NamedTensor]:
    if len(pair) != 2:
        raise BadAdapter(f"tensor `{pair[0].name}` stands alone; the other of {name}.lora_a and .lora_b is needed")
    if any(len(tensor.shape) != 2 for tensor in pair):
        raise UnsupportedAdapter(
            f"`{name}` is updated by tensors of other than two axes (experts), which is not built in"
        )
    lora_a, lora_b = (_array(tensor, file) for tensor in pair)
    is_table = name == _TABLE
    if is_table:
        lora_a = lora_a.mapped(lora_a.shape[::-1], lambda bits: bits.T)
    module, placement = _place(name, (lora_b.shape[0], lora_a.shape[1]), pair[0], base)
    if placement.num_permuted_heads:
        lora_b = lora_b.mapped(lora_b.shape, partial(unpermute_heads, num_heads=placement.num_permuted_heads))
    kinds = (TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B) if is_table else (TensorKind.LORA_A, TensorKind.LORA_B)
    for kind, array in zip(kinds, (lora_a, lora_b), strict=True):
        yield TensorName(module, kind, module), array


def _place(name: str, shape: tuple[int, int], like: GGUFTensor, base: BaseTargets) -> tuple[str, Placement]:
    """The module that the base's tensor belongs to, and what llama.cpp does to its rows."""
    tensor = GGUFTensor(name, shape, like.type, 0, 0)
    config = {
        "model_type": "llama" if base.architecture == "mistral" else base.architecture,
        "num_attention_heads": base.heads.num_qo_heads,
        "num_key_value_heads": base.heads.num_kv_heads,
    }
    ((hf_name, placement),) = place_tensors({name: tensor}, config).items()
    return hf_name.removesuffix(".weight"), placement


def _array(tensor: GGUFTensor, file: PinnedFile) -> LazyArray:
    dtype = _DTYPES.get(tensor.type.name)
    if dtype is None:
        raise UnsupportedAdapter(f"tensor `{tensor.name}` is {tensor.type.name}; read are {', '.join(_DTYPES)}")

    def load() -> bytes | Bits:
        raw = file.read(tensor.offset, tensor.size_bytes)
        if tensor.type.name != "Q8_0":
            return raw
        rows = np.frombuffer(raw, np.uint8).reshape(tensor.shape[0], tensor.row_bytes)
        return np.ascontiguousarray(tensor.type.dequantise(rows), np.float32)

    return LazyArray(tensor.name, tensor.shape, dtype, load)
