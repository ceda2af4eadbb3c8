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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.adapters.arrays import Encoding, StoredArray
from kvarto.adapters.assemble import NamedTensor, assemble
from kvarto.adapters.files import AdapterLimits, adapter_errors, confined, opened_inside, still_confined
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.peft_config import MAX_ALPHA, AdapterConfig, parse_peft_config
from kvarto.adapters.shape_cache import shape_key
from kvarto.adapters.targets import BaseTargets
from kvarto.adapters.tensor_names import TensorKind, TensorName
from kvarto.core.errors import AdapterMismatch, BadAdapter, UnsupportedAdapter
from kvarto.models.gguf_container import GGUFTensor, read_container
from kvarto.models.gguf_names import Placement, place_tensors

_ARCHITECTURES = {
    "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2", "llama": "llama", "mistral": "llama",
    "mixtral": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}  # fmt: skip
"""What llama.cpp calls the models that we have."""
_ENCODINGS = {each.name: each for each in Encoding}
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
    found = confined(path, roots)
    with adapter_errors(), opened_inside(found.parent, found.name, roots, limits.max_file_bytes) as (file, pinned):
        container = read_container(file)
        if len(container.tensors) > limits.max_tensors:
            raise BadAdapter(f"`{path}` has {len(container.tensors)} tensors; at most {limits.max_tensors} are read")
        config = _config(container.metadata, base)
        tensors = [named for pair in _pairs(container.tensors).items() for named in _named(*pair, base)]
        adapter = assemble(tensors, config, base, max_rank=limits.max_rank)
        data_start = min(tensor.offset for tensor in container.tensors.values())
        key = shape_key(b"", file.read(0, data_start), file.size_bytes)
    still_confined(path, found)
    return OpenedAdapter(adapter, (pinned,), key)


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


def _named(name: str, pair: Sequence[GGUFTensor], base: BaseTargets) -> Iterator[NamedTensor]:
    if len(pair) != 2:
        raise BadAdapter(f"tensor `{pair[0].name}` stands alone; the other of {name}.lora_a and .lora_b is needed")
    if any(len(tensor.shape) != 2 for tensor in pair):
        raise UnsupportedAdapter(
            f"`{name}` is updated by tensors of other than two axes (experts), which is not built in"
        )
    lora_a, lora_b = (_array(tensor) for tensor in pair)
    is_table = name == _TABLE
    if is_table:
        lora_a = replace(lora_a, shape=lora_a.shape[::-1], is_transposed=True)
    module, placement = _place(name, (lora_b.shape[0], lora_a.shape[1]), pair[0], base)
    if placement.num_permuted_heads:
        lora_b = replace(lora_b, num_permuted_heads=placement.num_permuted_heads)
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


def _array(tensor: GGUFTensor) -> StoredArray:
    encoding = _ENCODINGS.get(tensor.type.name)
    if encoding is None:
        raise UnsupportedAdapter(f"tensor `{tensor.name}` is {tensor.type.name}; read are {', '.join(_ENCODINGS)}")
    return StoredArray(tensor.name, tensor.shape, encoding, tensor.offset)
