"""Greedy tokens of the demo model equal those of `transformers` in float32, from the same quantised file.

`transformers` dequantises the GGUF with its own reader; a token that differs must be a near tie in its own logits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvarto
from tests.acceptance.prompts import varied_prompts

NUM_PROMPTS = 64
NUM_TOKENS = 64
TIE_GAP = 1e-3
"""Two float32 programs that add in different orders differ by about 1e-5 here; a gap below this is a tie."""


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> torch.nn.Module:
    """The demo model in `transformers`, float32."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def disagreements(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> list[float]:
    """Top-2 logit gap at each output token that is not the reference's arg max, given the same tokens before it."""
    logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    top = logits.topk(2).values
    wrong = logits.argmax(-1) != torch.tensor(output)
    return (top[:, 0] - top[:, 1])[wrong].tolist()


@pytest.mark.heavy
def test_greedy_tokens_equal_transformers(demo_model: Path, reference: torch.nn.Module) -> None:
    params = kvarto.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with kvarto.LLM(str(demo_model), dtype="f32", kv_cache_dtype="f32") as llm:
        results = llm.generate(varied_prompts(NUM_PROMPTS, seed=1), params)
    gaps: list[float] = []
    for result in results:
        output = list(result.outputs[0].token_ids)
        assert len(output) == NUM_TOKENS
        gaps += disagreements(reference, list(result.prompt_token_ids), output)
    largest = max(gaps, default=0.0)
    print(f"{NUM_PROMPTS} prompts x {NUM_TOKENS} tokens: {len(gaps)} differ, largest top-2 gap {largest:.1e}")
    assert all(gap < TIE_GAP for gap in gaps), gaps
