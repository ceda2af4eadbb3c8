"""Backends with real Programs in a planned arena: chunkings, batches, memory, pages."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import UsageError
from kvarto.ops.reference import ReferenceBackend
from tests.ops.one_op import Array, assert_same_bits
from tests.ops.opened import GEMMA, KINDS, LLAMA, MIXTRAL, TINY, Opened, open_backend
from tests.ops.steps import sampling_rows


@pytest.fixture(params=KINDS)
def llama(request: pytest.FixtureRequest) -> Iterator[Opened]:
    opened = open_backend(LLAMA, request.param)
    yield opened
    opened.backend.close()


def whole_prompts(opened: Opened, prompts: Sequence[Array]) -> list[Array]:
    """Logits of every token; prompts one by one, each in one step."""
    logits = []
    for prompt in prompts:
        opened.poison()
        opened.backend.run(opened.step([(prompt, opened.tables([len(prompt)])[0], 0, len(prompt))]))
        logits.append(opened.backend.logits_of_last_step())
    return logits


def mixed_batches(opened: Opened, prompts: Sequence[Array], max_chunk: int) -> list[Array]:
    """The same, all prompts together: random chunks of random subsets until all are done."""
    rng = np.random.default_rng(max_chunk)
    opened.poison()
    tables = opened.tables([len(prompt) for prompt in prompts])
    done = np.zeros(len(prompts), np.int64)
    logits: list[list[Array]] = [[] for _ in prompts]
    while left := [s for s, prompt in enumerate(prompts) if done[s] < len(prompt)]:
        chosen = rng.permutation(left)[: rng.integers(1, len(left) + 1)]
        ends = [min(len(prompts[s]), int(done[s]) + int(rng.integers(1, max_chunk + 1))) for s in chosen]
        opened.backend.run(
            opened.step([(prompts[s], tables[s], int(done[s]), end) for s, end in zip(chosen, ends, strict=True)])
        )
        rows = np.split(opened.backend.logits_of_last_step(), np.cumsum(ends - done[chosen])[:-1])
        for s, end, part in zip(chosen, ends, rows, strict=True):
            logits[s].append(part)
            done[s] = end
    return [np.concatenate(parts) for parts in logits]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {}),
        (LLAMA, {"dtype": DType.BF16, "kv_dtype": DType.F16}),
        (GEMMA, {"kv_dtype": DType.BF16}),
        (MIXTRAL, {"dtype": DType.F16}),
    ],
    ids=["llama", "llama bf16 weights, f16 kv", "gemma bf16 kv", "mixtral f16"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_same_bits_in_any_batch_chunking_and_page_size(
    config: dict[str, Any], options: dict[str, Any], kind: str
) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, TINY["vocab_size"], n) for n in (1, 5, 40, 63, 64, 90, 130, 150)]
    opened = open_backend(config, kind, page_size=16, **options)
    want = whole_prompts(opened, prompts)
    assert all(np.isfinite(logits).all() and logits.std() > 0.1 for logits in want)
    opened.backend.close()
    for page_size, max_chunk in ((8, 3), (32, 19), (256, 19)):
        opened = open_backend(config, kind, page_size=page_size, threads=1 if kind == "reference" else 2, **options)
        for got, logits in zip(mixed_batches(opened, prompts, max_chunk), want, strict=True):
            assert_same_bits(got, logits)
        opened.backend.close()


def test_long_contexts_cross_spans_with_the_same_bits(llama: Opened) -> None:
    prompt = llama.rng.integers(0, TINY["vocab_size"], 1300)
    results = []
    for sizes in ([160], [97, 3]):
        llama.poison()
        table = llama.tables([len(prompt)])[0]
        first, step = 0, 0
        while first < len(prompt):
            end = min(len(prompt), first + sizes[step % len(sizes)])
            llama.backend.run(llama.step([(prompt, table, first, end)]))
            first, step = end, step + 1
        results.append(llama.backend.logits_of_last_step()[-1])
    assert_same_bits(results[0], results[1])


def test_a_run_writes_only_its_slots_and_activations(llama: Opened) -> None:
    assert llama.backend.arena is not None
    arena = llama.backend.arena.array
    assert len(arena) == llama.layout.total_bytes
    prompt = llama.rng.integers(0, TINY["vocab_size"], 50)
    table = llama.tables([50])[0]
    before = arena.copy()
    llama.backend.run(llama.step([(prompt, table, 0, 50)]))
    np.testing.assert_array_equal(arena[: llama.layout.weights.end], before[: llama.layout.weights.end])
    pages = arena[llama.layout.pages.offset :].reshape(llama.layout.num_pages, -1)
    old_pages = before[llama.layout.pages.offset :].reshape(pages.shape)
    changed = np.flatnonzero((pages != old_pages).any(axis=1))
    assert set(changed) == set(table.ravel().tolist())


def test_copied_pages_hold_the_same_tokens(llama: Opened) -> None:
    prompt = llama.rng.integers(0, TINY["vocab_size"], 60)
    original, copy = llama.tables([60, 60])
    llama.backend.run(llama.step([(prompt, original, 0, 59)]))
    llama.backend.run(llama.step([(prompt, original, 59, 60)]))
    want = llama.backend.logits_of_last_step()
    for source, target in zip(original.ravel(), copy.ravel(), strict=True):
        llama.backend.copy_page(int(source), int(target))
    llama.backend.run(llama.step([(prompt, copy, 59, 60)]))
    assert_same_bits(llama.backend.logits_of_last_step(), want)


def test_steps_without_samples_and_without_tokens_run(llama: Opened) -> None:
    prompt = llama.rng.integers(0, TINY["vocab_size"], 20)
    table = llama.tables([20])[0]
    step = llama.step([(prompt, table, 0, 19)])
    step.sample_rows, step.sampling = step.sample_rows[:0], sampling_rows(0)
    assert len(llama.backend.run(step).token_ids) == 0
    llama.backend.run(llama.step([(prompt, table, 19, 20)]))
    got = llama.backend.logits_of_last_step()
    assert_same_bits(got, whole_prompts(llama, [prompt])[0][19:])


def test_a_row_may_be_sampled_more_than_once(llama: Opened) -> None:
    prompt = llama.rng.integers(0, TINY["vocab_size"], 9)
    step = llama.step([(prompt, llama.tables([9])[0], 0, 9)])
    step.sample_rows = np.array([8, 2, 8], np.int32)
    step.sampling = sampling_rows(3, temperature=1.0, seed=4, choice=[0, 0, 1])
    llama.backend.run(step)
    logits = llama.backend.logits_of_last_step()
    assert_same_bits(logits[0], logits[2])
    assert not np.array_equal(logits[0], logits[1])


def test_a_step_beyond_the_plan_breaks_an_invariant(llama: Opened) -> None:
    prompt = llama.rng.integers(0, TINY["vocab_size"], 161)
    with pytest.raises((AssertionError, ValueError), match="161"):
        llama.backend.run(llama.step([(prompt, llama.tables([161])[0], 0, 161)]))


WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 3000, "vocab_size": 20_000, "num_hidden_layers": 2}
WIDE_LIMITS = StepLimits(max_tokens=512, max_seqs=12, max_samples=64, max_context=1500)
ALLOWED_BYTES = 1 << 20


def test_a_step_allocates_next_to_nothing() -> None:
    """All that is big lies in the plan: against 18 MiB of activations, a step may take 1 MiB elsewhere."""
    opened = open_backend(WIDE, limits=WIDE_LIMITS, dtype=DType.BF16, kv_dtype=DType.F16)
    assert opened.layout.activations.size_bytes > 18 * ALLOWED_BYTES
    prompt = opened.rng.integers(0, 20_000, 512)
    step = opened.step([(prompt, opened.tables([512])[0], 0, 512)])
    step.sample_rows = step.sample_rows[-64:]
    step.sampling = sampling_rows(64, num_logprobs=5, temperature=[0.0, 1.0] * 32, top_k=[0, 0, 50, 50] * 16)
    opened.backend.run(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        opened.backend.run(step)
    assert 0 < _peak_bytes(profile) < ALLOWED_BYTES
    tracemalloc.start()
    opened.backend.run(step)
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert numpy_peak < ALLOWED_BYTES
    opened.backend.close()


def _peak_bytes(profile: Any) -> int:
    """Most bytes that PyTorch's allocator had handed out at once during the profile."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max(initial=0))


def test_unusable_devices_are_refused_by_name() -> None:
    for device in ("nonsense", "cuda:99", "meta:x"):
        with pytest.raises(UsageError, match=device):
            ReferenceBackend(device)


def test_fingerprints_name_what_bits_depend_on() -> None:
    fingerprint = ReferenceBackend(threads=1).fingerprint
    assert fingerprint == ReferenceBackend().fingerprint
    assert torch.__version__ in fingerprint
    assert fingerprint.endswith("-1")


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu_and_is_batch_invariant() -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, TINY["vocab_size"], n) for n in (5, 64, 150)]
    cpu, gpu = open_backend(LLAMA), open_backend(LLAMA, device="cuda:0")
    gpu.poison = lambda: None  # type: ignore[method-assign]  # its arena is not an array
    want = whole_prompts(cpu, prompts)
    whole, mixed = whole_prompts(gpu, prompts), mixed_batches(gpu, prompts, 19)
    for on_cpu, on_gpu, again in zip(want, whole, mixed, strict=True):
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=0, atol=1e-4 * np.abs(on_cpu).max())
        assert_same_bits(again, on_gpu)
    cpu.backend.close()
    gpu.backend.close()
