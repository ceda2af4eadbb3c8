"""How byte-level BPE cuts a text into words, by the names that GGUF files use for it.

The patterns are those of the models' own `tokenizer.json`; several names share one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3 = f"{_CONTRACTION}|{_WORD}|" + r"\p{N}{1,3}" + f"|{_MARKS}|{_TAIL}"
_QWEN2 = f"{_CONTRACTION}|{_WORD}|" + r"\p{N}" + f"|{_MARKS}|{_TAIL}"
_TEKKEN = f"{_CASED_WORDS % ('', '')}|" + r"\p{N}" + f"|{_MARKS_AND_SLASH}|{_TAIL}"
_GPT4O = f"{_CASED_WORDS % (_CONTRACTION + '?', _CONTRACTION + '?')}|" + r"\p{N}{1,3}" + f"|{_MARKS_AND_SLASH}|{_TAIL}"


@dataclass(frozen=True, slots=True)
class WordCut:
    """One way of cutting; `pattern` None is GPT-2's own, which `tokenizers` has built in."""

    pattern: str | None = None
    has_single_digits: bool = False
    """Every digit is a word, before anything else."""
    is_composed: bool = False
    """Text is brought into NFC first."""
    is_whole_word_first: bool = False
    """A word that is a token stays one, whatever the merges say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The steps, the byte alphabet last."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.has_single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)


_GPT2_CUT = WordCut()
_DIGITS_CUT = WordCut(has_single_digits=True)
_LLAMA3_CUT = WordCut(_LLAMA3, is_whole_word_first=True)
_QWEN2_CUT = WordCut(_QWEN2, is_composed=True)

WORD_CUTS: dict[str, WordCut] = {
    "gpt-2": _GPT2_CUT,
    "phi-2": _GPT2_CUT,
    "olmo": _GPT2_CUT,
    "smollm": _DIGITS_CUT,
    "starcoder": _DIGITS_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "llama-bpe": _LLAMA3_CUT,
    "smaug-bpe": WordCut(_LLAMA3),
    "dbrx": WordCut(_LLAMA3),
    "qwen2": _QWEN2_CUT,
    "deepseek-r1-qwen": WordCut(_QWEN2),
    "tekken": WordCut(_TEKKEN, is_whole_word_first=True),
    "gpt-4o": WordCut(_GPT4O, is_whole_word_first=True),
}
