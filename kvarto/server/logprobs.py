"""Log-probabilities in the two shapes of OpenAI's API, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarto.engine.messages import TokenLogprobs
from kvarto.engine.token_table import TokenTable
from kvarto.server.protocol import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class CompletionLogprobsBuilder:
    """Builds the lists of /v1/completions piece by piece; `text_offset` counts characters of tokens."""

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of an echoed prompt. Its first token follows nothing, so it has no log-probability."""
        first = self.output(token_ids[:1], [TokenLogprobs(token_ids[0], 0.0)])
        first.token_logprobs = [None]
        first.top_logprobs = [None]
        return joined([first, self.output(token_ids[1:], logprobs)])

    def output(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of tokens in the order in which they follow."""
        built = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            text = self._tokens.token_text(token_id)
            built.text_offset.append(self._offset)
            built.tokens.append(text)
            built.token_logprobs.append(_finite(entry.logprob))
            built.top_logprobs.append(self._top(entry))
            self._offset += len(text)
        return built

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest and the token itself. Of tokens with the same text the likelier one stands."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._tokens.token_text(token_id), _finite(logprob))
        return top


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Lists one after the other."""
    return CompletionLogprobs(
        [offset for part in parts for offset in part.text_offset],
        [logprob for part in parts for logprob in part.token_logprobs],
        [token for part in parts for token in part.tokens],
        [top for part in parts for top in part.top_logprobs],
    )


def chat_logprobs(tokens: TokenTable, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Of tokens of an answer."""
    return ChatLogprobs([_chat_token(tokens, entry) for entry in logprobs])


def _chat_token(tokens: TokenTable, entry: TokenLogprobs) -> ChatTokenLogprob:
    own = _top_logprob(tokens, entry.token_id, entry.logprob)
    top = [_top_logprob(tokens, token_id, logprob) for token_id, logprob in entry.top]
    return ChatTokenLogprob(own.token, own.logprob, own.bytes, top)


def _top_logprob(tokens: TokenTable, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(tokens.token_text(token_id), _finite(logprob), list(tokens.token_bytes(token_id)))


def prompt_logprobs(tokens: TokenTable, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """The list that vLLM gives: null for the first token, then for each the likeliest and the token itself, by id."""
    listed: list[dict[str, Any] | None] = [None]
    for entry in logprobs:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        listed.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": ranks.get(token_id),
                    "decoded_token": tokens.token_text(token_id),
                }
                for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))
            }
        )
    return listed


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
