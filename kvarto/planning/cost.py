"""What a step costs, predicted from the Program: FLOPs, bytes, and seconds on a machine of given speed. Pure.

An op takes the longer of its arithmetic and its memory traffic (the roofline: Williams et al., CACM 2009); ops follow
one another, so their times add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core.buffers import Cost, StepShape
from kvarto.core.program import Program


def chunk_shape(first_token: int, num_tokens: int, num_samples: int = 0) -> StepShape:
    """A step that computes tokens `[first_token, first_token + num_tokens)` of one sequence."""
    end = first_token + num_tokens
    # Token i reads i + 1 tokens: itself and all before it.
    context_tokens = (end * (end + 1) - first_token * (first_token + 1)) // 2
    return StepShape(num_tokens, num_samples, context_tokens, end if num_tokens else 0)


def cost(program: Program, shape: StepShape) -> Cost:
    """FLOPs and bytes of all ops together."""
    return sum((op.cost(program, shape) for op in program.ops), Cost(0, 0, 0))


def step_seconds(program: Program, shape: StepShape, flops_per_s: float, bytes_per_s: float) -> float:
    """Predicted time of one step."""
    costs = (op.cost(program, shape) for op in program.ops)
    return sum(max(c.flops / flops_per_s, (c.bytes_read + c.bytes_written) / bytes_per_s) for c in costs)


def recompute_seconds(
    program: Program, num_tokens: int, flops_per_s: float, bytes_per_s: float, *, first_token: int = 0
) -> float:
    """Predicted time to compute the KV of `num_tokens` tokens again, in a pass of their own."""
    return step_seconds(program, chunk_shape(first_token, num_tokens), flops_per_s, bytes_per_s)


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Seconds to compute tokens again within a pass that runs anyway: arithmetic alone, since weights are read anyway.

    O(1) per question, for the prefix cache, which asks for every page. Sliding windows are counted as full attention.
    """

    seconds_per_token: float
    seconds_per_context_token: float

    @classmethod
    def of(cls, program: Program, flops_per_s: float) -> RecomputeCost:
        """From a program's FLOPs, which are linear in tokens and in the tokens that these attend to."""
        per_context = _flops(program, 1, 1) - _flops(program, 1, 0)
        return cls(_flops(program, 1, 0) / flops_per_s, per_context / flops_per_s)

    def __call__(self, first_token: int, num_tokens: int) -> float:
        """Seconds for tokens `[first_token, first_token + num_tokens)`."""
        context_tokens = chunk_shape(first_token, num_tokens).context_tokens
        return num_tokens * self.seconds_per_token + context_tokens * self.seconds_per_context_token


def _flops(program: Program, num_tokens: int, context_tokens: int) -> int:
    return cost(program, StepShape(num_tokens, 0, context_tokens, context_tokens)).flops
