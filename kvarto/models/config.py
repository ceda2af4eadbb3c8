"""A `config.json` in Hugging Face form becomes a DecoderConfig, or is refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.config_keys import ConfigKeys
from kvarto.models.decoder_config import DecoderConfig, ExpertsConfig, LayerConfig
from kvarto.models.families import FAMILIES

__all__ = ["DecoderConfig", "ExpertsConfig", "LayerConfig", "parse_config"]

HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that have an output matrix over the vocabulary."""


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Resolve a `config.json`.

    Raises UnsupportedModel, naming the architecture or the setting, and BadFile for missing keys and wrong types.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadFile(f"config.json: `model_type` is {model_type!r}; it must name a model family, such as `llama`")
    _check_architectures(config.get("architectures"))
    if model_type == "gemma3":
        return parse_config(_text_config(config))
    if model_type not in FAMILIES:
        built_in = ", ".join(f"`{name}`" for name in FAMILIES)
        raise UnsupportedModel(f"model family `{model_type}` is not built in; built in: {built_in}")
    keys = ConfigKeys(config, model_type)
    resolved = FAMILIES[model_type](keys)
    return replace(resolved, unknown_keys=keys.unknown())


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model inside a multimodal Gemma 3, which is served without its eyes."""
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        raise BadFile(f"config.json: `text_config` is {text_config!r}; `gemma3` needs an object there")
    shared = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}
    return {**shared, **text_config, "model_type": "gemma3_text"}


def _check_architectures(architectures: object) -> None:
    if architectures is None or architectures == []:
        return
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise BadFile(f"config.json: `architectures` is {architectures!r}; it must be a list of class names")
    if not any(name.endswith(HEADS) for name in architectures):
        raise UnsupportedModel(
            f"architecture `{architectures[0]}` is not built in; supported: names that end in "
            + ", ".join(f"`{head}`" for head in HEADS)
        )
