"""Build a tokenizer from the vocabulary inside a GGUF file, equal to the one of the model's Hugging Face folder.

Two kinds: `gpt2` (byte-level BPE: merges are listed, the way of cutting text into words goes by name) and `llama`
(SentencePiece: merges follow from the scores, unknown characters fall back to bytes). A name that we do not know is
refused: a tokenizer that is nearly right makes a model subtly worse. Source: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from kvarto.core.errors import BadFile, KvartoError, UnsupportedModel
from kvarto.models.gguf_keys import MetadataKeys
from kvarto.models.pretokenizers import WORD_CUTS, WordCut

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 1 << 20
"""Four times the largest real vocabulary."""
MAX_PIECE_CHARS = 1 << 9
MAX_CHARS = 1 << 23
"""Of all spellings together: the largest real vocabulary has a quarter of it."""
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class TokenType(IntEnum):
    """What a token of the vocabulary is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises UnsupportedModel for a kind that is not built in, BadFile for a vocabulary that contradicts itself."""
    keys = MetadataKeys(metadata, PREFIX)
    kind = keys.text("model", "none")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"the GGUF tokenizer `{kind:.40}` is not built in; built in are `gpt2` and `llama`")
    is_sentence_piece = kind == "llama"
    pieces, types = _vocabulary(keys)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise BadFile(f"`{PREFIX}tokens` spells {len(pieces) - len(vocab)} tokens like others; convert the model again")
    architecture = metadata.get("general.architecture")
    with refusing("the vocabulary inside the GGUF file is inconsistent"):
        if is_sentence_piece:
            tokenizer = _sentence_piece(keys, vocab, types)
        else:
            tokenizer = _byte_level(keys, vocab, "gpt-2" if architecture == "gpt2" else "none")
        _add_tokens(tokenizer, pieces, types, has_right_strip=is_sentence_piece and architecture == "phi3")
        _add_frame(tokenizer, keys, special_token_ids(metadata), pieces, is_sentence_piece)
    return tokenizer


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn whatever the `tokenizers` package raises, its panics included, into a BadFile that begins with `what`."""
    try:
        yield
    except (KvartoError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        raise BadFile(f"{what}: {error!s:.200}") from error


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids by role, for those that the file names and the vocabulary has."""
    num_tokens = len(MetadataKeys(metadata, PREFIX).texts("tokens"))
    ids = {role: metadata.get(f"{PREFIX}{name}_token_id") for name, role in _ROLES.items()}
    return {role: value for role, value in ids.items() if type(value) is int and 0 <= value < num_tokens}


def _vocabulary(keys: MetadataKeys) -> tuple[list[str], list[int]]:
    pieces = keys.texts("tokens")
    longest = max(map(len, pieces))
    if len(pieces) > MAX_TOKENS or longest > MAX_PIECE_CHARS or sum(map(len, pieces)) > MAX_CHARS:
        raise BadFile(
            f"`{PREFIX}tokens` has {len(pieces)} tokens, the longest of {longest} characters; at most {MAX_TOKENS} "
            f"tokens of {MAX_PIECE_CHARS} characters and {MAX_CHARS} in all are read"
        )
    types = [int(TokenType.NORMAL)] * len(pieces)
    if keys.has("token_type"):
        types = [int(kind) for kind in keys.numbers("token_type")]
    if len(types) != len(pieces):
        raise BadFile(f"`{PREFIX}token_type` has {len(types)} entries for {len(pieces)} tokens")
    return pieces, types


def _byte_level(keys: MetadataKeys, vocab: dict[str, int], default_cut: str) -> Tokenizer:
    cut = _word_cut(keys.text("pre", default_cut))
    merges = [merge.split(" ") for merge in keys.texts("merges")]
    if any(len(merge) != 2 for merge in merges):
        raise BadFile(f"`{PREFIX}merges` must hold two spellings with one space between them in each entry")
    pairs = [(left, right) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=cut.is_whole_word_first))
    tokenizer.pre_tokenizer = cut.pre_tokenizer()
    if cut.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_cut(name: str) -> WordCut:
    cut = WORD_CUTS.get(name)
    if cut is None:
        raise UnsupportedModel(
            f"the GGUF file cuts words by `{PREFIX}pre` = `{name:.40}`, which is not built in; built in are "
            f"{', '.join(sorted(WORD_CUTS))}. A folder with `tokenizer.json` works for every model"
        )
    return cut


def _sentence_piece(keys: MetadataKeys, vocab: dict[str, int], types: list[int]) -> Tokenizer:
    scores = keys.numbers("scores")
    if len(scores) != len(vocab):
        raise BadFile(f"`{PREFIX}scores` must have one entry for each of the {len(vocab)} tokens")
    unknown = next((piece for piece, index in vocab.items() if types[index] == TokenType.UNKNOWN), None)
    merges = _merges_by_score(vocab, types, scores)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_space_prefix = keys.flag("add_space_prefix", True)
    marks = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *marks] if has_space_prefix else marks)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_space_prefix else steps)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best token first: SentencePiece merges what scores highest."""
    mergeable = {piece for piece, index in vocab.items() if types[index] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if types[index] != TokenType.NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                found.append((-scores[index], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, pieces: list[str], types: list[int], has_right_strip: bool) -> None:
    """Control tokens and user-defined ones are found in a text before anything else; only the former are special."""
    control: list[AddedToken] = []
    others: list[AddedToken] = []
    for piece, kind in zip(pieces, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            # Phi-3's tokenizer swallows the white space after its turn marks; GGUF has no place to say so.
            strips = has_right_strip and piece.startswith("<|") and piece != "<|endoftext|>"
            control.append(AddedToken(piece, special=True, normalized=False, rstrip=strips))
        elif kind == TokenType.USER_DEFINED:
            others.append(AddedToken(piece, special=False, normalized=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(others)


def _add_frame(
    tokenizer: Tokenizer, keys: MetadataKeys, ids: dict[str, int], pieces: list[str], is_sentence_piece: bool
) -> None:
    """The tokens that the model wants around a text."""
    adds_bos = is_sentence_piece or keys.text("pre", "none") in ("llama3", "llama-v3", "llama-bpe", "tekken")
    has_bos = keys.flag("add_bos_token", adds_bos) and "bos_token" in ids
    has_eos = keys.flag("add_eos_token", False) and "eos_token" in ids
    frame = [ids["bos_token"]] if has_bos else []
    tail = [ids["eos_token"]] if has_eos else []
    if not frame and not tail:
        return
    parts = [f"t{index}" for index in frame] + ["$A"] + [f"t{index}" for index in tail]
    # The names inside the template are ours: spellings may hold characters that templates give a meaning.
    special = [{"id": f"t{i}", "ids": [i], "tokens": [pieces[i]]} for i in dict.fromkeys(frame + tail)]
    tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(parts), special_tokens=special)
