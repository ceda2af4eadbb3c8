"""Every key that an `adapter_config.json` may have, and what happens to it. Nothing is ignored by silence.

*read*: it shapes the adapter. *ignored*: it steered training, or informs people. *refused*: it changes the arithmetic
in a way that is not built in, unless its value switches it off. A key that is not here is refused by name.
Source: PEFT's `LoraConfig` and its base classes, up to version 0.21.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Stance(StrEnum):
    """What happens to a key."""

    READ = "read"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """One key."""

    name: str
    stance: Stance
    reason: str
    """What it means here; of a refused key, why."""
    remedy: str = ""
    """What would work, of keys that can be refused."""


def _read(name: str, reason: str, remedy: str = "") -> KeyRule:
    return KeyRule(name, Stance.READ, reason, remedy)


def _ignored(name: str, reason: str) -> KeyRule:
    return KeyRule(name, Stance.IGNORED, reason)


def _refused(name: str, reason: str, remedy: str) -> KeyRule:
    return KeyRule(name, Stance.REFUSED, reason, remedy)


_CONVERT = "convert it to a plain LoRA and save it again"
_TRAINING = "steered training only"
_NARROWING = "said which modules to train; the tensors show which were"

KEY_RULES = (
    _read("peft_type", "must be `LORA`", "train a LoRA, or merge the adapter into the model"),
    _read("r", "rank of modules that `rank_pattern` does not name; checked against the tensors"),
    _read("lora_alpha", "numerator of the scaling; 8 where absent, as PEFT has it, with a warning"),
    _read("rank_pattern", "rank by module pattern; the first key that matches counts"),
    _read("alpha_pattern", "`lora_alpha` by module pattern; the first key that matches counts"),
    _read("use_rslora", "the scaling is `lora_alpha / sqrt(rank)` instead of `lora_alpha / rank`"),
    _read("use_dora", "each module has a magnitude vector"),
    _read("lora_bias", "each B has a bias, scaled with it"),
    _read("fan_in_fan_out", "the base keeps its matrices transposed; A and B do not, so nothing changes"),
    _read("bias", "must be `none`: others train the base's own biases", 'train with `bias="none"`'),
    _read(
        "init_lora_weights",
        "pissa, olora, corda, loftq and lora_ga changed the base's weights, so the plain base is the wrong one",
        "save with `path_initial_model_for_weight_conversion`, which makes a plain LoRA of it",
    ),
    _read(
        "modules_to_save",
        "must be empty: whole modules were trained beside the adapter",
        "merge the adapter into the model, or train those modules with LoRA; tokens with `trainable_token_indices`",
    ),
    _read("trainable_token_indices", "ids of the embedding rows that the adapter replaces"),
    _read("alora_invocation_tokens", "the adapter is active from the last place where these tokens stand"),
    _read("ensure_weight_tying", "an update of tied embeddings is one of the output matrix too"),
    _read("target_modules", "only compared with the tensors: a module that is named and has none is a warning"),
    _ignored("exclude_modules", _NARROWING),
    _ignored("layers_to_transform", _NARROWING),
    _ignored("layers_pattern", _NARROWING),
    _ignored("lora_dropout", _TRAINING),
    _ignored("inference_mode", _TRAINING),
    _ignored("velora_config", "compressed activations for the backward pass"),
    _ignored("eva_config", "settings of an initialisation that leaves the base as it is"),
    _ignored("loftq_config", "settings of an initialisation, which `init_lora_weights` names"),
    _ignored("corda_config", "settings of an initialisation, which `init_lora_weights` names"),
    _ignored("lora_ga_config", "settings of an initialisation, which `init_lora_weights` names"),
    _ignored("qalora_group_size", "only read together with `use_qalora`, which is refused"),
    _ignored("megatron_core", "names a Python module; only read together with `megatron_config`, which is refused"),
    _ignored("runtime_config", "where tensors lay while training"),
    _ignored("merge_weights", "a switch of the first versions: merge while evaluating"),
    _ignored("task_type", "what the model was wrapped as; heads of other tasks are in `modules_to_save`"),
    _ignored("auto_mapping", "Python classes of the base, for PEFT's own loading"),
    _ignored("base_model_name_or_path", "often a folder on the machine that trained; modules and sizes are checked"),
    _ignored("revision", "of the base; modules and sizes are checked"),
    _ignored("peft_version", "informs people"),
    _refused(
        "target_parameters",
        "updates of stacked expert parameters; their axes cannot be told from the shapes",
        "train the experts as modules, or merge the adapter",
    ),
    _refused("layer_replication", "the model has more layers than its base", "merge the adapter into the larger model"),
    _refused("megatron_config", "the layers are those of Megatron", _CONVERT),
    _refused("use_qalora", "inputs are pooled by groups before A", _CONVERT),
    _refused("use_bdlora", "A or B is block-diagonal", _CONVERT),
    _refused("arrow_config", "a router chooses among adapters", "serve one of the adapters that it routes to"),
    _refused("kasa_config", "the base's weights are truncated, and a diagonal stands between A and B", _CONVERT),
    _refused("monteclora_config", "weights are sampled around A", _CONVERT),
    _refused("enable_lora", "a fused projection of which only parts were trained (`MergedLinear`)", _CONVERT),
    _refused(
        "alora_invocation_string",
        "needs the tokenizer that it was trained with",
        "write its ids as `alora_invocation_tokens`",
    ),
    _refused(
        "invocation_string",
        "of older files; it starts one token later than `alora_invocation_tokens`",
        "train again with a newer version, or write `alora_invocation_tokens`",
    ),
)

RULES = {rule.name: rule for rule in KEY_RULES}
"""By name."""


def key_table() -> str:
    """The rules as a table in Markdown, for docs/adapters.md."""
    rows = [f"| `{rule.name}` | {rule.stance} | {rule.reason} | {rule.remedy} |" for rule in KEY_RULES]
    return "\n".join(["| key | is | because | what works instead |", "|---|---|---|---|", *rows]) + "\n"
