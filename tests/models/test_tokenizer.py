"""Tokenizers built from GGUF metadata equal the models' own, token by token."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers

from kvarto.core.errors import BadFile, InvalidRequest, UnsupportedModel
from kvarto.models.gguf import GGUFFiles
from kvarto.models.pretokenizers import WORD_CUTS
from kvarto.models.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "a\tb\n\n\n  c\r\n d   \n",
    "I'm you're HE'S they'LL we'd",
    "1 12 123 1234567890 ½ Ⅷ ٣٤ 3.14159e-10",
    "naïve café, ǅ, e\u0301\u0301, ﬁ",
    "中文测试，全角标点。日本語テスト 한국어",
    "👩‍👩‍👧‍👦🏳️‍🌈 \U0001f9d1\U0001f3fd",
    "Здравствуй Ελληνικά עברית العربية हिन्दी ไทย",
    "def f(x):\n\treturn x**2  # noqa\n",
    "https://example.org/a?b=c&d=%20#e",
    "\u200b\ufeff\u00a0\u2028\u0000\u0007",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseWORDSAndXMLHttp",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "▁ looks like a space ▁▁",
    "<0x41> <unk> </s> <s>",
)
ALPHABET = "ab Z9é中\n\t '’.,-_/<|>🙂\u0301"


def texts(seed: int, count: int = 200) -> list[str]:
    rng = random.Random(seed)
    drawn = ["".join(rng.choices(ALPHABET, k=rng.randrange(60))) for _ in range(count)]
    joined = ["".join(rng.sample(TEXTS, 3)) for _ in range(count // 4)]
    return [*TEXTS, *drawn, *joined]


@pytest.fixture(scope="module")
def metadata(demo_model: Path) -> dict[str, Any]:
    files = GGUFFiles(demo_model)
    files.close()
    return files.metadata


@pytest.fixture(scope="module")
def smollm2(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(metadata)


@pytest.fixture(scope="module")
def reference(metadata: dict[str, Any]) -> transformers.PreTrainedTokenizerBase:
    """SmolLM2's tokenizer as transformers has it: GPT-2's class and pre-tokenizer, digits split first."""
    pieces = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = transformers.GPT2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=[
            p for p, k in zip(pieces, metadata["tokenizer.ggml.token_type"], strict=True) if k == 3
        ],
    )
    backend = theirs.backend_tokenizer
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return theirs


def test_smollm2_equals_transformers(smollm2: Tokenizer, reference: transformers.PreTrainedTokenizerBase) -> None:
    for text in texts(1):
        ids = smollm2.encode(text)
        assert ids == reference.encode(text), repr(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == reference.decode(
            ids, clean_up_tokenization_spaces=False
        )
        assert smollm2.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert smollm2.piece_to_token("<|im_end|>") == 2
    assert smollm2.token_to_piece(49152) is None
    assert smollm2.token_bytes(10**6) == b""
    assert smollm2.is_special(2)
    assert not smollm2.is_special(4093)


def test_token_bytes_add_up_to_the_text(smollm2: Tokenizer) -> None:
    for text in texts(2):
        for parse_special in (True, False):
            ids = smollm2.encode(text, parse_special=parse_special)
            assert b"".join(map(smollm2.token_bytes, ids)).decode() == text


def test_spelt_control_tokens_are_text_unless_asked(smollm2: Tokenizer) -> None:
    for piece in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        text = f"a {piece}b{piece}"
        plain = smollm2.encode(text, parse_special=False)
        assert not smollm2.control_tokens & set(plain)
        assert smollm2.decode(plain, skip_special_tokens=True) == text
        assert smollm2.control_tokens & set(smollm2.encode(text))


def test_no_token_holds_more_characters_than_the_longest(smollm2: Tokenizer) -> None:
    most = smollm2.max_token_chars
    for text in ("\n" + " " * 80, "a" * 5000, " " * 5000, "word " * 500, "\U0001f600" * 100, "<|im_end|>" * 50):
        assert len(text) <= most * len(smollm2.encode(text, add_special_tokens=False))
    assert len(smollm2.encode("\n" + " " * (most - 1))) == 1


def test_threads_do_not_disturb_each_other(smollm2: Tokenizer) -> None:
    text = "x <|im_end|> y " * 50
    expected = {parse: smollm2.encode(text, parse_special=parse) for parse in (True, False)}
    wrong: list[bool] = []

    def encode(parse: bool) -> None:
        wrong.extend(parse for _ in range(100) if smollm2.encode(text, parse_special=parse) != expected[parse])

    threads = [threading.Thread(target=encode, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_text_that_is_not_unicode_is_the_clients_fault(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("a\ud800b")


def byte_level_metadata(pre: str, **extra: Any) -> dict[str, Any]:
    """A vocabulary trained on our texts, as a GGUF file would carry it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(
        [word for text in texts(3) for word in (text, *text.split(), *text.split(" "))], trainer
    )
    vocab = backend.get_vocab()
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in _merges(backend)]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*pieces, "<|end|>", "<tool>"],
        "tokenizer.ggml.token_type": np.array([1] * len(pieces) + [3, 4]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": len(pieces),
        "tokenizer.ggml.eos_token_id": len(pieces),
        "tokenizer.ggml.add_bos_token": False,
    } | extra


def _merges(backend: tokenizers.Tokenizer) -> list[Any]:
    import json

    merges: list[Any] = json.loads(backend.to_str())["model"]["merges"]
    return merges


def reference_of(pre: str, keys: dict[str, Any]) -> tokenizers.Tokenizer:
    """The class at Hugging Face that such files come from, with the same vocabulary."""
    vocab = {piece: i for i, piece in enumerate(keys["tokenizer.ggml.tokens"][:-2])}
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    if pre == "gpt-2":
        return transformers.GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    if pre == "qwen2":
        return transformers.Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    # Llama 3: the pattern of transformers' converter from tiktoken files.
    import inspect

    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=True))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    return backend


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_word_cuts_equal_transformers(pre: str) -> None:
    keys = byte_level_metadata(pre)
    ours, theirs = tokenizer_from_gguf(keys), reference_of(pre, keys)
    for text in texts(4):
        if "<" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("pre", sorted(WORD_CUTS))
def test_every_word_cut_keeps_the_text(pre: str) -> None:
    ours = tokenizer_from_gguf(byte_level_metadata(pre))
    for text in texts(5, 60):
        if pre != "qwen2":  # composes characters first
            assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_digits_are_cut_as_their_models_want() -> None:
    cut = {pre: WORD_CUTS[pre].pre_tokenizer().pre_tokenize_str("x 12345 we'LL") for pre in WORD_CUTS}
    words = {pre: [word for word, _ in found] for pre, found in cut.items()}
    assert words["gpt-2"] == ["x", "Ġ12345", "Ġwe", "'", "LL"]
    assert words["smollm"] == ["x", "Ġ", "1", "2", "3", "4", "5", "Ġwe", "'", "LL"]
    assert words["qwen2"] == ["x", "Ġ", "1", "2", "3", "4", "5", "Ġwe", "'LL"]
    assert words["llama-bpe"] == ["x", "Ġ", "123", "45", "Ġwe", "'LL"]
    assert words["gpt-4o"] == ["x", "Ġ", "123", "45", "Ġwe'LL"]
    assert words["tekken"] == ["x", "Ġ", "1", "2", "3", "4", "5", "Ġwe", "'LL"]


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_sentence_piece_equals_its_library(add_space_prefix: bool, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(line for text in texts(6) for line in text.split("\n")).replace("\0", ""))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "m"), model_type="bpe", vocab_size=700, byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=add_space_prefix, user_defined_symbols=["<turn>"], minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else
        4 if theirs.id_to_piece(i) == "<turn>" else 1
        for i in range(theirs.vocab_size())
    ]  # fmt: skip
    keys = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in range(theirs.vocab_size())],
        "tokenizer.ggml.scores": np.array([theirs.get_score(i) for i in range(theirs.vocab_size())]),
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }
    ours = tokenizer_from_gguf(keys)
    num_bytes = 0
    for text in texts(7):
        if "▁" in text or "<" in text or "\0" in text or not text:
            continue  # the library takes them for its own marks
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), repr(text)
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        assert ours.decode(ids) == text
        spelt = b"".join(map(ours.token_bytes, ids)).decode()
        assert spelt == (" " if add_space_prefix else "") + text
        num_bytes += sum(kinds[i] == 6 for i in ids)
    assert num_bytes > 20, "the test must reach the byte fallback"
    assert ours.encode("a<turn>b", add_special_tokens=False).count(theirs.piece_to_id("<turn>")) == 1


def test_the_frame_follows_the_file() -> None:
    keys = byte_level_metadata("gpt-2")
    end = keys["tokenizer.ggml.eos_token_id"]
    both = tokenizer_from_gguf(keys | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    plain = tokenizer_from_gguf(keys).encode("hi")
    assert both.encode("hi") == [end, *plain, end]
    assert both.encode("hi", add_special_tokens=False) == plain
    # Llama 3's files may leave it unsaid.
    unsaid = byte_level_metadata("llama-bpe")
    del unsaid["tokenizer.ggml.add_bos_token"]
    assert tokenizer_from_gguf(unsaid).encode("hi")[0] == end


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"tokenizer.ggml.pre": "viking"}, UnsupportedModel, "`viking`.*gpt-2.*smollm"),
        ({"tokenizer.ggml.pre": None}, UnsupportedModel, "`none`"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "`t5`"),
        ({"tokenizer.ggml.model": None}, UnsupportedModel, "`none`"),
        ({"tokenizer.ggml.tokens": None}, BadFile, "tokens` is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": None}, BadFile, "like others"),
        ({"tokenizer.ggml.tokens": ["a" * 600]}, BadFile, "600 characters"),
        ({"tokenizer.ggml.token_type": np.array([1])}, BadFile, "1 entries for"),
        ({"tokenizer.ggml.merges": None}, BadFile, "merges` is missing"),
        ({"tokenizer.ggml.merges": ["a b c"]}, BadFile, "one space"),
        ({"tokenizer.ggml.merges": ["zz qqq"]}, BadFile, "inconsistent"),
        ({"tokenizer.ggml.model": "llama"}, BadFile, "scores"),
    ],
)
def test_vocabularies_that_cannot_be_built(change: dict[str, Any], error: type[Exception], says: str) -> None:
    keys = byte_level_metadata("gpt-2")
    changed = {key: value for key, value in (keys | change).items() if value is not None}
    with pytest.raises(error, match=says):
        tokenizer_from_gguf(changed)


def test_a_folder_equals_its_backend(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "model_max_length": 8192}'
    )
    folder = tokenizer_from_folder(tmp_path)
    assert folder.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    for text in texts(8, 40):
        assert folder.encode(text) == smollm2.encode(text)
        assert folder.encode(text, parse_special=False) == smollm2.encode(text, parse_special=False)


def test_truncation_and_padding_in_the_file_are_ignored(smollm2: Tokenizer, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(smollm2._backend.to_str())
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_from_folder(tmp_path).encode("word " * 30) == smollm2.encode("word " * 30)


def test_missing_and_broken_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no `tokenizer\.json`; write it with"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(BadFile, match=r"`tokenizer\.model` alone is not read"):
        tokenizer_from_folder(tmp_path)
    for broken in (b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE", "vocab": {"a": 4294967296}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(BadFile, match="is not a tokenizer"):
            tokenizer_from_folder(tmp_path)
