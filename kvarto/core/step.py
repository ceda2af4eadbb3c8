"""Step: all that a backend needs for one pass, as flat arrays. Nothing below `engine/` sees a request.

Sampling works on rows. Row s takes the logits of `Step.sample_rows[s]`, applies bias and penalties, divides by the
temperature, filters by top-k, top-p and min-p, and takes the arg max of logits + Gumbel noise. The noise is a
counter-based function of (seed, choice, position, vocabulary id), so that a token does not depend on the batch, and
a resumed, forked or recomputed request draws the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(slots=True)
class SamplingRows:
    """Parameters of the rows to sample; arrays are `[num_samples]` unless said otherwise.

    `bias_*` and `seen_*` are ragged: the entries of row s are `[indptr[s], indptr[s + 1])`.
    """

    temperature: Float32
    """0 is greedy."""
    top_k: Int32
    """0 keeps all."""
    top_p: Float32
    min_p: Float32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    seed: Int64
    """0 ≤ seed < 2^63."""
    choice: Int32
    """Index of the choice, for `n` > 1."""
    position: Int32
    """Position in its sequence of the token that is drawn: the prompt's length for the first."""
    num_logprobs: Int32
    """Likeliest alternatives to report; 0 reports none beside the token's own, -1 not even that: it is NaN then."""
    target: Int32
    """A token whose log-probability is asked (prompt logprobs); -1 where the drawn token is meant."""
    bias_indptr: Int32
    """[num_samples + 1]"""
    bias_ids: Int32
    bias_values: Float32
    """Added to the raw logits; -inf forbids a token."""
    seen_indptr: Int32
    """[num_samples + 1]. Rows without penalties have no entries."""
    seen_ids: Int32
    """Distinct tokens of prompt and output."""
    seen_output_counts: Int32
    """Occurrences in the output; 0 for tokens that are in the prompt alone."""


@dataclass(slots=True)
class Step:
    """One pass over a ragged batch: chunks of prompts and decode tokens alike."""

    token_ids: Int32
    """[num_tokens]"""
    positions: Int32
    """[num_tokens], absolute in their sequence."""
    cu_seqlens: Int32
    """[num_seqs + 1]: tokens of sequence s are `[cu_seqlens[s], cu_seqlens[s + 1])`, positions ascending by 1."""
    context_lens: Int32
    """[num_seqs]: tokens of the sequence in pages once this step has written its own."""
    page_tables: Int32
    """[num_groups, num_seqs, max_pages]; `NO_PAGE` where nothing is kept, which is never read."""
    slot_mapping: Int64
    """[num_groups, num_tokens]: slot = page * page_size + offset, where each token's KV goes."""
    sample_rows: Int32
    """[num_samples]: rows of `token_ids` whose next token is asked; a row may be named more than once (`n` > 1)."""
    sampling: SamplingRows
    adapters: Int32 | None = None
    """[num_seqs]: the handle of each sequence's adapter (`Backend.bind_adapter`), or NO_ADAPTER. None: no sequence has
    one, and the step costs nothing for adapters."""
    adapter_starts: Int32 | None = None
    """[num_seqs]: the first position at which the adapter is active; 0 unless it is called by invocation tokens. None
    exactly where `adapters` is."""

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.context_lens)

    @property
    def num_samples(self) -> int:
        """Rows to sample."""
        return len(self.sample_rows)


@dataclass(slots=True)
class StepResult:
    """What sampling yields; full logits stay with the backend."""

    token_ids: Int32
    """[num_samples]: the drawn tokens."""
    logprobs: Float32
    """[num_samples]: of the drawn token, or of `target` where one is named; NaN where none is asked."""
    top_ids: Int32
    """[num_samples, k], k the largest `num_logprobs`; likeliest first, lower id first among equals."""
    top_logprobs: Float32
    """[num_samples, k]"""
    is_finite: NDArray[np.bool_]
    """[num_samples]: False where the row's logits hold NaN or +inf; its request fails, others go on."""
