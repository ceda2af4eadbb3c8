"""Sample: one token per row, drawn as `core.step` says, and log-probabilities of the raw logits.

Rows are processed one by one, so that none can depend on another. A row: raw logits -> log-probabilities; + bias,
penalties -> greedy: arg max. Otherwise / temperature -> top-k, top-p, min-p -> arg max of logits + Gumbel noise. The
lowest id wins among equals everywhere.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvarto.core.ops import Sample
from kvarto.core.step import SamplingRows, StepResult
from kvarto.core.units import align_up
from kvarto.ops.reference.activation import VECTOR
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.candidates import filtered, likeliest
from kvarto.ops.reference.exponential import exp_nonpositive_
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.noise import GumbelNoise, noise_key
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.sums import tree_sum_


class SampleKernel(Kernel[Sample]):
    """See `core.ops.Sample`."""

    @classmethod
    def scratch(cls, op: Sample, sizes: Sizes) -> Pieces:
        """Two rows, and a block of noise."""
        row = Piece((align_up(sizes.width(op.logits), VECTOR),))
        return {"adjusted": row, "terms": row} | GumbelNoise.scratch()

    def __init__(self, op: Sample, views: Views, scratch: Tensors) -> None:
        self._logits = views.buffers[op.logits]
        self._adjusted = scratch["adjusted"][: self._logits.shape[1]]
        self._terms = scratch["terms"]
        self._noise = GumbelNoise(scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.Sample`. Fills in `batch.result`."""
        rows = batch.step.sampling
        batch.result = result = _empty_result(rows, batch.num_samples)
        if batch.num_samples == 0:
            return
        maxima = self._logits[: batch.num_samples].amax(dim=1).cpu().numpy()  # NaN wins
        result.is_finite[:] = np.isfinite(maxima)
        for s in np.flatnonzero(result.is_finite):
            row = self._logits[s]
            result.token_ids[s] = self._draw(row, batch, int(s))
            self._report(row, float(maxima[s]), rows, result, int(s))

    def _draw(self, row: torch.Tensor, batch: Batch, s: int) -> int:
        rows = batch.step.sampling
        adjusted = self._adjust(row, batch, s)
        temperature = float(rows.temperature[s])
        if temperature == 0.0:
            return int(adjusted.argmax())
        scaled = self._scale(adjusted, temperature)
        key = noise_key(int(rows.seed[s]), int(rows.choice[s]), int(rows.position[s]))
        total = self._sum_exp(scaled, 0.0) if rows.top_p[s] < 1.0 else math.nan
        ids = filtered(scaled, total, int(rows.top_k[s]), float(rows.top_p[s]))
        if rows.min_p[s] > 0.0:  # at least min_p times as likely as the likeliest, whose logit is 0
            scaled.masked_fill_(scaled < math.log(float(rows.min_p[s])), float("-inf"))
        if ids is None:
            self._noise.add_(scaled, key)
            return int(scaled.argmax())
        ids = ids.sort().values
        chosen = scaled[ids]
        self._noise.add_chosen_(chosen, ids, key)
        return int(ids[chosen.argmax()])

    def _adjust(self, row: torch.Tensor, batch: Batch, s: int) -> torch.Tensor:
        """The row with bias and penalties; the row itself where none is asked."""
        rows = batch.step.sampling
        bias = slice(int(rows.bias_indptr[s]), int(rows.bias_indptr[s + 1]))
        seen = slice(int(rows.seen_indptr[s]), int(rows.seen_indptr[s + 1]))
        if bias.start == bias.stop and seen.start == seen.stop:
            return row
        adjusted = self._adjusted.copy_(row)
        ids = self._ids(rows.bias_ids[bias], batch)
        adjusted.index_add_(0, ids, batch.upload(rows.bias_values[bias]))
        self._penalise_(adjusted, batch, s, seen)
        return adjusted

    def _penalise_(self, adjusted: torch.Tensor, batch: Batch, s: int, seen: slice) -> None:
        rows = batch.step.sampling
        ids = self._ids(rows.seen_ids[seen], batch)
        counts = batch.upload(rows.seen_output_counts[seen].astype(np.float32))
        values = adjusted[ids]
        repetition = float(rows.repetition_penalty[s])
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= counts * float(rows.frequency_penalty[s])
        values -= (counts > 0) * float(rows.presence_penalty[s])
        adjusted[ids] = values

    def _ids(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]], batch: Batch) -> torch.Tensor:
        is_inside = len(ids) == 0 or (ids.min() >= 0 and ids.max() < self._logits.shape[1])
        assert is_inside, f"ids in [{ids.min()}, {ids.max()}], {self._logits.shape[1]} logits"
        return batch.upload(ids.astype(np.int64))

    def _scale(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """`(logits - max) / temperature`: at most 0, so that a small temperature cannot overflow upwards."""
        return torch.sub(logits, logits.amax(), out=self._adjusted).div_(temperature)

    def _sum_exp(self, logits: torch.Tensor, maximum: float) -> float:
        torch.sub(logits, maximum, out=self._terms[: len(logits)])
        exp_nonpositive_(self._terms)
        return float(tree_sum_(self._terms[: len(logits)]))

    def _report(self, row: torch.Tensor, maximum: float, rows: SamplingRows, result: StepResult, s: int) -> None:
        """Log-probabilities in float64, rounded once; NaN where none are asked."""
        count = int(rows.num_logprobs[s])
        if count < 0:
            return
        log_total = maximum + math.log(self._sum_exp(row, maximum))
        target = int(rows.target[s])
        token = target if target >= 0 else int(result.token_ids[s])
        assert token < len(row), f"token {token}, {len(row)} logits"
        result.logprobs[s] = float(row[token]) - log_total
        if count > 0:
            ids = likeliest(row, count)
            result.top_ids[s, :count] = ids.cpu().numpy()
            result.top_logprobs[s, :count] = row[ids].cpu().numpy().astype(np.float64) - log_total


def _empty_result(rows: SamplingRows, num_samples: int) -> StepResult:
    """Token 0 and NaN: what rows that are not finite keep."""
    width = int(rows.num_logprobs.max(initial=0))
    return StepResult(
        token_ids=np.zeros(num_samples, np.int32),
        logprobs=np.full(num_samples, np.nan, np.float32),
        top_ids=np.zeros((num_samples, width), np.int32),
        top_logprobs=np.full((num_samples, width), np.nan, np.float32),
        is_finite=np.zeros(num_samples, np.bool_),
    )
