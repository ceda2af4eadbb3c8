"""From the name of a tensor in an adapter's file to the module that it updates, and what it is there.

```text
base_model.model. | model.layers.0.self_attn.q_proj | .lora_A         | .default | .weight
prefix, 0-2 times | module, as in the base          | what it is      | adapter  |
```
Wrappers of training (`_orig_mod.`, `_fsdp_wrapped_module.`, `module.`) are cut out, and the towers of multimodal
models come down to the language model, as they do when the base is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kvarto.core.errors import AdapterError, BadAdapter, UnsupportedAdapter

MAX_NAME_CHARS = 512
PREFIX = "base_model.model."


class TensorKind(StrEnum):
    """What a tensor is to its module."""

    LORA_A = "lora_A"
    """`[rank, in]`."""
    LORA_B = "lora_B"
    """`[out, rank]`."""
    EMBEDDING_A = "lora_embedding_A"
    """`[rank, vocab]`."""
    EMBEDDING_B = "lora_embedding_B"
    """`[hidden, rank]`."""
    BIAS = "bias of lora_B"
    """`[out]`."""
    MAGNITUDE = "lora_magnitude_vector"
    """`[out]`, of DoRA."""
    TOKEN_ROWS = "trainable_tokens_delta"
    """`[tokens, hidden]`."""
    BASE_COPY = "copy of a weight of the base"
    """Written along by PEFT where embeddings are targeted or were resized."""


@dataclass(frozen=True, slots=True)
class TensorName:
    """One name, understood."""

    module: str
    """Path of the module in the language model."""
    kind: TensorKind
    trained_module: str
    """Path in the model that was trained, for the patterns of its config."""


_PATH = r"(?P<module>[^.]+(?:\.[^.]+)*?)"
_ADAPTER = r"(?:\.[^.]+)?"
"""The name of the adapter, where the file was written without PEFT's own saving."""
_FORMS = tuple(
    (kind, re.compile(_PATH + form))
    for kind, form in (
        (TensorKind.LORA_A, rf"\.lora_A{_ADAPTER}\.weight"),
        (TensorKind.LORA_B, rf"\.lora_B{_ADAPTER}\.weight"),
        (TensorKind.BIAS, rf"\.lora_B{_ADAPTER}\.bias"),
        (TensorKind.EMBEDDING_A, rf"\.lora_embedding_A{_ADAPTER}"),
        (TensorKind.EMBEDDING_B, rf"\.lora_embedding_B{_ADAPTER}"),
        (TensorKind.MAGNITUDE, rf"\.lora_magnitude_vector{_ADAPTER}(?:\.weight)?"),
        (TensorKind.TOKEN_ROWS, rf"\.token_adapter\.trainable_tokens_delta{_ADAPTER}"),
        (TensorKind.BASE_COPY, r"\.base_layer\.weight"),
    )
)
_COPIED = ("embed_tokens", "lm_head", "wte")
"""Modules whose weight PEFT may save as it is."""
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_LANGUAGE_MODEL = (("model.language_model.", "model."), ("language_model.", ""))

_FOREIGN = (
    (re.compile(r"lora_(?:unet|te\d?)_|\.lora_(?:up|down)\.|\.alpha$"), "a name of kohya or diffusers"),
    (re.compile(r"^(?:blk\.\d+|token_embd|output)\."), "a name of GGUF"),
    (re.compile(r"\.lora_[ab]$"), "a name of MLX, whose A and B lie the other way round"),
)


def parse_tensor_name(name: str) -> TensorName:
    """Raises UnsupportedAdapter for tensors of other formats and full weights, BadAdapter for what is no name."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise BadAdapter(f"a tensor's name has {len(name)} characters; 1 to {MAX_NAME_CHARS} printable ones are read")
    bare = _without_wrappers(name)
    for kind, form in _FORMS:
        if match := form.fullmatch(bare):
            _refuse_nested(name, match["module"])
            return TensorName(_in_language_model(match["module"]), kind, match["module"])
    module, _, suffix = bare.rpartition(".")
    if suffix == "weight" and module.rpartition(".")[2] in _COPIED:
        return TensorName(_in_language_model(module), TensorKind.BASE_COPY, module)
    raise _refusal(name, bare)


def _without_wrappers(name: str) -> str:
    bare = _WRAPPERS.sub("", name)
    while bare.startswith((PREFIX, "module.")):
        bare = bare.removeprefix("module.").removeprefix(PREFIX)
    return bare


def _in_language_model(module: str) -> str:
    for prefix, instead in _LANGUAGE_MODEL:
        if module.startswith(prefix):
            return instead + module.removeprefix(prefix)
    return module


def _refuse_nested(name: str, module: str) -> None:
    if ".lora_" in module or module.endswith(".base_layer") or ".modules_to_save" in module:
        raise UnsupportedAdapter(
            f"tensor `{name}` is nested in another update (`target_parameters`, or adapters on adapters), which is not "
            "built in; train the experts as modules, or merge all but one"
        )


def _refusal(name: str, bare: str) -> AdapterError:
    for form, what in _FOREIGN:
        if form.search(name):
            return UnsupportedAdapter(
                f"tensor `{name}` has {what}, which is not built in; convert the adapter to PEFT's"
            )
    if bare.endswith((".weight", ".bias")) and "lora_" not in bare:
        return UnsupportedAdapter(
            f"tensor `{name}` is a whole weight and no low-rank update (`modules_to_save`, or `bias` other than none); "
            "merge the adapter into the model, or train that module with LoRA"
        )
    return UnsupportedAdapter(
        f"tensor `{name}` is none that a LoRA adapter has (lora_A, lora_B, lora_embedding_A, lora_embedding_B, "
        "lora_magnitude_vector, trainable_tokens_delta); save the adapter with PEFT's `save_pretrained`"
    )
