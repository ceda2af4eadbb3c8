"""Text to token ids and back, by the `tokenizers` package: from `tokenizer.json`, or built from GGUF metadata.

Control tokens (`<|im_end|>`) spelt out in a text become control tokens only where the caller says so. The text that a
chat template made must be parsed; text that a client sends to be continued is parsed as at Hugging Face; text that
only quotes must not be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvarto.core.errors import BadFile, InvalidRequest
from kvarto.models.json_file import read_json, read_text
from kvarto.models.token_bytes import TokenBytes
from kvarto.models.tokenizer_gguf import build_tokenizer, refusing, special_token_ids

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One vocabulary. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        """By role (`bos_token`, `eos_token`, …): what chat templates get to see."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Ids below it have a spelling; the model's logits may be wider."""
        added = backend.get_added_tokens_decoder()
        self.added_tokens = frozenset(added)
        """Ids of control tokens and of others that are found in a text before anything else."""
        self.control_tokens = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""
        self._bytes = TokenBytes(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {})

    @cached_property
    def max_token_chars(self) -> int:
        """Longest spelling: n tokens hold at most n times as many characters, but for spaces that a model drops."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def _quoting(self) -> tokenizers.Tokenizer:
        """The same, blind to control tokens: a switch of the whole object, so whoever turned it held up all others."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that the model wants around it if `add_special_tokens`.

        With `parse_special=False`, spellings of control tokens in `text` are ordinary characters. Raises InvalidRequest
        for text that is not valid Unicode.
        """
        backend = self._backend if parse_special else self._quoting
        try:
            # As a batch, because that alone lets other threads run meanwhile.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text holds half of a surrogate pair, which is not valid Unicode") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_piece(self, token_id: int) -> str | None:
        """How the vocabulary spells a token (`Ġthe`, `▁the`), None for an id without one."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def piece_to_token(self, piece: str) -> int | None:
        """The id that the vocabulary spells so, or None."""
        token_id: int | None = self._backend.token_to_id(piece)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""
        return token_id in self.control_tokens

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in running text; empty for an id without a spelling.

        Tokens may end amid a character, so only a run of them decodes.
        """
        piece = self.token_to_piece(token_id)
        return b"" if piece is None else self._bytes.of(piece, token_id in self.added_tokens)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """From `tokenizer.json` and `tokenizer_config.json`. Raises BadFile naming the files looked for."""
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        raise BadFile(
            f"`{folder}` has no `{TOKENIZER_NAME}`"
            + (f" (`{others[0]}` alone is not read)" if others else "")
            + "; write it with `AutoTokenizer.from_pretrained(…).save_pretrained(folder)`, or copy it there"
        )
    text = read_text(path)
    with refusing(f"`{path}` is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_str(text.decode("utf-8"))
    return Tokenizer(backend, special_tokens_of(tokenizer_config(folder)))


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """From the vocabulary inside a GGUF file. Raises UnsupportedModel for a kind that is not built in, or BadFile."""
    backend = build_tokenizer(metadata)
    pieces = metadata["tokenizer.ggml.tokens"]
    return Tokenizer(backend, {role: pieces[token_id] for role, token_id in special_token_ids(metadata).items()})


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, and `special_tokens_map.json` for what it does not say; empty without either."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG_NAME):
        if (folder / name).is_file():
            config |= read_json(folder / name)
    return config


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Spellings by role; a spelling may stand alone or as the `content` of an object."""
    found = {}
    for role in SPECIAL_NAMES:
        value = config.get(role)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[role] = value
    return found
