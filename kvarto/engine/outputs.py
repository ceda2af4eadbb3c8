"""What a request yields, choice by choice: the engine's tokens with their text, cut at stop strings.

One `Choice` holds everything that its client may already have, which is also what a fresh engine needs to go on. The
client of the engine process and the in-process `LLM` share it. Knows nothing of processes or HTTP.
"""

from __future__ import annotations

import msgspec

from kvarto.core.sampling import SamplingParams
from kvarto.engine.detokenizer import Detokenizer, TokenBytes
from kvarto.engine.messages import ResumedChoice, TokenLogprobs, TokensOut


class ChoiceOutput(msgspec.Struct, kw_only=True):
    """What came newly for one choice of one prompt."""

    prompt_index: int
    """Which of the prompts that were submitted together."""
    choice: int
    """0 to `n` - 1."""
    text: str
    """Text that is now certain; may be empty while a stop string or a character is unfinished."""
    token_ids: tuple[int, ...]
    """The new tokens, an end token included."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of prompt tokens 1…, with a choice's first output, when asked for."""
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache; with a request's first output."""
    finish_reason: str | None = None
    """`stop`, `length`, `deadline` or `error`; None while the choice goes on."""
    stop_reason: str | int | None = None
    """The stop string or the token that ended it; None for the model's own end of text, and for other reasons."""

    @property
    def is_plain(self) -> bool:
        """Is there nothing but text and tokens?"""
        return (
            self.finish_reason is None
            and self.logprobs is None
            and self.num_cached_tokens is None
            and self.prompt_logprobs is None
        )


class Choice:
    """One choice while it runs: its tokens so far, its text, and whether it has ended."""

    def __init__(self, sampling: SamplingParams, tokenizer: TokenBytes, eos_token_ids: tuple[int, ...]) -> None:
        self.token_ids: list[int] = []
        self.is_finished = False
        self._keeps_stop = sampling.include_stop_str_in_output
        self._eos_token_ids = eos_token_ids
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )

    def feed(self, tokens: TokensOut, prompt_index: int) -> ChoiceOutput:
        """Take new tokens of the engine. After a stop string the choice is finished and later tokens do not count."""
        text = []
        num_taken = 0
        for num_taken, token_id in enumerate(tokens.token_ids, start=1):
            if self._is_hidden_end(tokens, num_taken):
                continue
            text.append(self._detokenizer.feed(token_id))
            if self._detokenizer.stop_found is not None:
                break
        self.token_ids.extend(tokens.token_ids[:num_taken])
        finish_reason, stop_reason = self._ending(tokens)
        if finish_reason is not None:
            text.append(self._detokenizer.finish())
            self.is_finished = True
        return ChoiceOutput(
            prompt_index=prompt_index,
            choice=tokens.choice,
            text="".join(text),
            token_ids=tokens.token_ids[:num_taken],
            logprobs=None if tokens.logprobs is None else tokens.logprobs[:num_taken],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def feed_next(self, token_id: int, prompt_index: int) -> ChoiceOutput:
        """Take the next token, with which the engine goes on: what `feed` makes of it, for less."""
        self.token_ids.append(token_id)
        output = ChoiceOutput(
            prompt_index=prompt_index, choice=0, text=self._detokenizer.feed(token_id), token_ids=(token_id,)
        )
        if self._detokenizer.stop_found is not None:
            output.text += self._detokenizer.finish()
            output.finish_reason, output.stop_reason = "stop", self._detokenizer.stop_found
            self.is_finished = True
        return output

    def _is_hidden_end(self, tokens: TokensOut, position: int) -> bool:
        """Is this the token that ended the choice, and not to be shown?"""
        is_last = position == len(tokens.token_ids)
        return is_last and tokens.token_ids[-1] == tokens.stop_token_id and not self._keeps_stop

    def _ending(self, tokens: TokensOut) -> tuple[str | None, str | int | None]:
        if self._detokenizer.stop_found is not None:
            return "stop", self._detokenizer.stop_found
        if tokens.stop_token_id in self._eos_token_ids:
            return tokens.finish_reason, None
        return tokens.finish_reason, tokens.stop_token_id


class RequestOutputs:
    """The choices of one prompt. Turns the engine's frames into outputs, and into what a fresh engine must know."""

    def __init__(
        self,
        sampling: SamplingParams,
        tokenizer: TokenBytes,
        *,
        eos_token_ids: tuple[int, ...] = (),
        prompt_index: int = 0,
    ) -> None:
        self.choices = [Choice(sampling, tokenizer, eos_token_ids) for _ in range(sampling.n)]
        self.prompt_index = prompt_index
        self.has_begun = False
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def is_finished(self) -> bool:
        """Have all choices ended?"""
        return all(choice.is_finished for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def feed(self, tokens: TokensOut) -> ChoiceOutput | None:
        """Take new tokens; None when their choice has ended before."""
        choice = self.choices[tokens.choice]
        if choice.is_finished:
            return None
        if tokens.prompt_logprobs is not None:  # empty for a prompt of one token
            self._prompt_logprobs = tokens.prompt_logprobs
        is_first = not choice.token_ids
        output = choice.feed(tokens, self.prompt_index)
        output.prompt_logprobs = self._prompt_logprobs if is_first else None
        if not self.has_begun:
            output.num_cached_tokens = tokens.num_cached_tokens
            self.has_begun = True
        return output

    def feed_next(self, token_id: int) -> ChoiceOutput | None:
        """Take a token of the first choice of which nothing else is to be said; None when that has ended before."""
        choice = self.choices[0]
        if choice.is_finished:
            return None
        self.has_begun = True
        return choice.feed_next(token_id, self.prompt_index)

    def resumed(self) -> tuple[ResumedChoice, ...] | None:
        """The choices that still run, with their tokens; None when nothing has begun."""
        if not self.has_begun:
            return None
        return tuple(
            ResumedChoice(index, tuple(choice.token_ids))
            for index, choice in enumerate(self.choices)
            if not choice.is_finished
        )
