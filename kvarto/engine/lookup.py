"""Guess the next tokens by look-up: what followed the last time that the same few tokens stood there.

Summaries, edits, code and structured answers repeat what is in the prompt. Guesses are verified in the step that draws
the next token anyway, so they change how fast tokens come and never which: a step is a read of all weights, and a few
more rows in it cost little. Source: prompt look-up decoding (Saxena, 2023); verification as in speculative decoding
(arXiv:2211.17192, at temperature 0; with counter-based noise a drawn token is as fixed as a greedy one).
"""

from __future__ import annotations

from array import array

import numpy as np

LONGEST_NGRAM = 4
SHORTEST_NGRAM = 2
"""Shorter matches are right too rarely to be worth their rows."""
MAX_PAUSE = 16
"""Steps without a guess after guesses that were all wrong, at most; doubles from 1."""


def guess_next(tokens: array[int], last_token: int, count: int) -> tuple[int, ...]:
    """Up to `count` tokens that may follow `tokens + [last_token]`; the latest match of the longest n-gram decides.

    Costs one pass over `tokens`: about 1 µs per 1,000.
    """
    known = np.frombuffer(tokens, dtype=np.int32)
    matches = np.flatnonzero(known == last_token)  # where an n-gram ends
    length = 1
    while length < min(LONGEST_NGRAM, len(known)):
        longer = matches[matches >= length]
        longer = longer[known[longer - length] == known[len(known) - length]]
        if not len(longer):
            break
        matches = longer
        length += 1
    if length < SHORTEST_NGRAM or not len(matches):
        return ()
    start = int(matches[-1]) + 1
    return tuple([*known[start : start + count].tolist(), last_token][:count])


class Pause:
    """Steps to wait before the next guess: none while guesses help, more and more while they do not."""

    __slots__ = ("_left", "_length")

    def __init__(self) -> None:
        self._length = 1
        self._left = 0

    def is_over(self) -> bool:
        """Whether to guess in this step. Call once per step."""
        if self._left:
            self._left -= 1
            return False
        return True

    def learn(self, num_right: int) -> None:
        """Of the last guess `num_right` tokens were right."""
        if num_right:
            self._length = 1
        else:
            self._left = self._length
            self._length = min(2 * self._length, MAX_PAUSE)
