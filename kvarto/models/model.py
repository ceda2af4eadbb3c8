"""A model on disk, opened: its program, weights yet to be read, tokenizer and template, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarto.core.dtype import DType
from kvarto.core.errors import BadFile
from kvarto.core.program import Program
from kvarto.models.base import WeightFiles
from kvarto.models.chat_template import ChatTemplate
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.files import model_name, open_weights
from kvarto.models.gguf import GGUFFiles
from kvarto.models.json_file import read_json, read_text
from kvarto.models.loader import check_tensors
from kvarto.models.tokenizer import Tokenizer, tokenizer_config, tokenizer_from_folder, tokenizer_from_gguf

MAX_TEMPLATE_BYTES = 4 << 20

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn. GGUF files name one end token; instruction-tuned models often have two."""

_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_BOUNDS = {
    "temperature": (0.0, 100.0),
    "top_k": (0.0, float(1 << 24)),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-2, 100.0),
}


@dataclass(frozen=True, slots=True)
class Model:
    """What `open_model` found. Weights are still on disk."""

    name: str
    """For people and for the API: the repository's id, the folder's name, or the file's without its suffix."""
    program: Program
    files: WeightFiles
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None where the model brings none: completions work, chat is refused."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer, ascending."""
    generation_defaults: dict[str, float | int]
    """Of `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` those that the model recommends."""
    max_positions: int
    """The context length that the model was made for."""

    def close(self) -> None:
        """Close files and end the template's process."""
        self.files.close()
        if self.chat_template is not None:
            self.chat_template.close()


def open_model(path: Path, dtype: DType) -> Model:
    """Read headers, configuration and vocabulary; nothing big. Raises BadFile or UnsupportedModel, by name."""
    files = open_weights(path)
    try:
        program = build_program(parse_config(files.config), dtype)
        check_tensors(program, files)
        opened = _describe_gguf(files) if isinstance(files, GGUFFiles) else _describe_folder(files)
    except BaseException:
        files.close()
        raise
    eos_token_ids = sorted({token_id for token_id in opened.eos_token_ids if 0 <= token_id < program.vocab_size})
    return Model(
        name=model_name(files.path),
        program=program,
        files=files,
        tokenizer=opened.tokenizer,
        chat_template=opened.chat_template,
        eos_token_ids=tuple(eos_token_ids),
        generation_defaults=opened.generation_defaults,
        max_positions=program.max_positions,
    )


@dataclass(frozen=True, slots=True)
class _Description:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, float | int]


def _describe_folder(files: WeightFiles) -> _Description:
    folder = files.path
    tokenizer = tokenizer_from_folder(folder)
    generation: Mapping[str, Any] = {}
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
    named = generation.get("eos_token_id", files.config.get("eos_token_id"))
    eos = {*_end_tokens(named), *_ids_of(tokenizer, [tokenizer.special_tokens.get("eos_token")])}
    template = _folder_template(folder, tokenizer)
    return _Description(tokenizer, template, frozenset(eos), _defaults(generation, {name: name for name in _BOUNDS}))


def _describe_gguf(files: GGUFFiles) -> _Description:
    metadata = files.metadata
    tokenizer = tokenizer_from_gguf(metadata)
    eos = {*_ids_of(tokenizer, TURN_ENDS) & tokenizer.control_tokens}
    for key in ("eos", "eot", "eom"):
        eos |= set(_end_tokens(metadata.get(f"tokenizer.ggml.{key}_token_id")))
    sources = {"default": metadata.get("tokenizer.chat_template")}
    sources["tool_use"] = metadata.get("tokenizer.chat_template.tool_use")
    sampling = {f"general.sampling.{key}": name for key, name in _GGUF_SAMPLING.items()}
    template = _template(sources, tokenizer)
    return _Description(tokenizer, template, frozenset(eos), _defaults(metadata, sampling))


def _folder_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return _template({"default": read_text(path, MAX_TEMPLATE_BYTES).decode("utf-8")}, tokenizer)
        except UnicodeDecodeError as error:
            raise BadFile(f"`{path}` is not valid UTF-8") from error
    named = tokenizer_config(folder).get("chat_template")
    if named is None and (folder / "chat_template.json").is_file():
        named = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(named, list):
        named = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
    return _template(named if isinstance(named, dict) else {"default": named}, tokenizer)


def _template(sources: Mapping[Any, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    default, tool_use = sources.get("default"), sources.get("tool_use")
    if not isinstance(default, str) or not default.strip():
        return None
    tool_template = tool_use if isinstance(tool_use, str) else None
    return ChatTemplate(default, special_tokens=tokenizer.special_tokens, tool_template=tool_template)


def _end_tokens(value: Any) -> list[int]:
    """None, one id or a list. Anything else would leave answers without an end, so it is an error."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(item) is not int for item in values):
        raise BadFile(f"the model names its end tokens as {value!r:.60}; an id or a list of ids is needed")
    return values


def _ids_of(tokenizer: Tokenizer, pieces: Iterable[str | None]) -> set[int]:
    ids = (tokenizer.piece_to_token(piece) for piece in pieces if piece is not None)
    return {token_id for token_id in ids if token_id is not None}


def _defaults(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float | int]:
    """Recommended sampling settings. A value that no request could ask for is an error, not a default."""
    found: dict[str, float | int] = {}
    for key, name in names.items():
        value = values.get(key)
        if value is None:
            continue
        low, high = _BOUNDS[name]
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise BadFile(f"the model recommends `{key}` = {value!r:.60}; a number from {low:g} to {high:g} is needed")
        found[name] = int(value) if name == "top_k" else float(value)
    return found
