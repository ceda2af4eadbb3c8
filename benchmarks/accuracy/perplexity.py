"""What does narrow arithmetic cost in quality? Perplexity of the demo model in each, beside the reference backend's.

    python -m benchmarks.accuracy.perplexity [--windows 20] [--window-tokens 1024] [--llama-perplexity PATH]

Teacher-forced: every window of the text is a prompt whose log-probabilities are asked for, so each token but a window's
first counts, given those before it in its window. The text is prose of Python's own documentation, which every machine
has; it differs a little from one Python to the next, so figures of two machines compare only where its digest is equal.
Differences are of the mean log-probability; their standard error is that of paired tokens, which is far smaller than
the one of a perplexity. With `--llama-perplexity`, llama.cpp reads the same text in the same windows. It counts the
second half of each, and so does the line of ours that stands beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

from kvarto import LLM, SamplingParams
from kvarto.core.dtype import DType
from kvarto.core.errors import UsageError
from kvarto.memory.limits import read_limits
from kvarto.models.demo import pull_demo
from kvarto.models.model import open_model

Windows = list[list[int]]
Logprobs = NDArray[np.float64]
"""[num_windows, window_tokens - 1]"""

MIN_PARAGRAPH_CHARS = 80
"""Shorter ones are headings and captions."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One way to compute the model, and how far its perplexity may be from the reference's."""

    name: str
    settings: dict[str, str]
    bound_percent: float | None = None


REFERENCE = Arithmetic("reference", {"backend": "reference", "kv_cache_dtype": "f32"})
OTHERS = (
    Arithmetic("f32, KV f32", {"activations": "f32", "kv_cache_dtype": "f32"}, 0.01),
    Arithmetic("int8, KV auto", {"activations": "int8"}, 0.3),
    Arithmetic("bf16, KV auto", {"activations": "bf16"}, 0.3),
    Arithmetic("f32, KV int8", {"activations": "f32", "kv_cache_dtype": "int8"}, 0.5),
    Arithmetic("int8, KV int8", {"activations": "int8", "kv_cache_dtype": "int8"}, 0.5),
    Arithmetic("bf16, KV int8", {"activations": "bf16", "kv_cache_dtype": "int8"}, 0.5),
)
"""All native. `auto` is bf16 with matrix tiles and int8 without, so it is always one of these."""


def prose() -> str:
    """Paragraphs of Python's documentation of the language, each once: topics quote each other, and indented ones are
    mostly grammar and code.
    """
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    kept = (" ".join(each.split()) for each in paragraphs if each[:1].isalpha() and len(each) >= MIN_PARAGRAPH_CHARS)
    return "\n".join(dict.fromkeys(kept))


def cut(token_ids: list[int], num_windows: int, window_tokens: int) -> Windows:
    """The first windows of the text; a last one that is not full is left out."""
    starts = range(0, min(len(token_ids) // window_tokens, num_windows) * window_tokens, window_tokens)
    return [token_ids[start : start + window_tokens] for start in starts]


def logprobs(path: Path, windows: Windows, arithmetic: Arithmetic, num_threads: int) -> tuple[Logprobs, str]:
    """Of every token but the first of each window; and the fingerprint of what computed it. Raises UsageError."""
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    max_model_len = len(windows[0]) + 1
    settings = {"threads": num_threads, "max_num_seqs": 1, "max_model_len": max_model_len, **arithmetic.settings}
    with LLM(str(path), **settings) as llm:
        outputs = llm.generate(windows, ask)
        return np.array([[each.logprob for each in output.prompt_logprobs or ()] for output in outputs]), (
            llm._engine.fingerprint
        )


def perplexity(values: Logprobs) -> float:
    """Of all that is given."""
    return float(np.exp(-values.mean()))


def difference_percent(values: Logprobs, reference: Logprobs) -> tuple[float, float]:
    """Of perplexities, with its standard error: tokens of one window are not independent, so windows are the sample."""
    differences = (reference - values).mean(axis=1)
    error = differences.std(ddof=1) / np.sqrt(len(differences)) if len(differences) > 1 else np.nan
    return 100 * float(np.expm1(differences.mean())), 100 * float(error)


def second_half(values: Logprobs) -> Logprobs:
    """What llama.cpp counts: the tokens behind position `window_tokens / 2`."""
    return values[:, (values.shape[1] + 1) // 2 :]


def llama_perplexity(program: str, path: Path, text: str, windows: Windows, num_threads: int) -> float:
    """llama.cpp's own figure. Raises UsageError."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [program, "-m", path, "-f", file.name, "-t", num_threads, "-ngl", 0]
        command += ["-c", len(windows[0]), "-b", len(windows[0]), "--chunks", len(windows)]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if found is None:
        raise UsageError(f"`{program}` gave no perplexity: {(done.stderr or done.stdout)[-400:]}")
    return float(found[1])


def compare(measure: Callable[[Arithmetic], tuple[Logprobs, str]]) -> tuple[dict[str, Logprobs], list[str]]:
    """Print a line for each; all figures, and the names of those beyond their bounds."""
    print(f"{'':16} {'perplexity':>10} {'difference':>11} {'± standard error':>17} {'bound':>7}")
    reference: Logprobs | None = None
    found: dict[str, Logprobs] = {}
    missed = []
    for arithmetic in (REFERENCE, *OTHERS):
        start = time.perf_counter()
        try:
            values, fingerprint = measure(arithmetic)
        except UsageError as error:
            print(f"{arithmetic.name:16} {error}")
            continue
        found[arithmetic.name] = values
        reference = values if reference is None else reference
        line = f"{arithmetic.name:16} {perplexity(values):10.4f}"
        if arithmetic.bound_percent is not None:
            percent, error_percent = difference_percent(values, reference)
            is_missed = not abs(percent) <= arithmetic.bound_percent
            missed += [arithmetic.name] * is_missed
            line += f" {percent:+10.4f}% {error_percent:16.4f}% {arithmetic.bound_percent:6}%"
            line += " MISSED" if is_missed else "       "
        print(f"{line:72} {time.perf_counter() - start:5.0f} s  {fingerprint}", flush=True)
    return found, missed


def main() -> int:
    """Print the table and one line of JSON; 1 when a bound is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="default: the demo model, which `kvarto pull` fetches")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--window-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=read_limits().num_cpus)
    parser.add_argument("--llama-perplexity", metavar="PATH", help="llama.cpp's program; the model is a GGUF file then")
    options = parser.parse_args()
    path = options.model or pull_demo()
    model, text = open_model(path, DType.F32), prose()
    token_ids = model.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    model.close()
    windows = cut(token_ids, options.windows, options.window_tokens)
    num_tokens = sum(map(len, windows))
    digest = hashlib.sha256(np.array(windows, np.int32).tobytes()).hexdigest()[:12]
    print(
        f"{model.name}; pydoc_data.topics of Python {platform.python_version()}: the first {num_tokens:,} of "
        f"{len(token_ids):,} tokens (digest {digest}) in {len(windows)} windows of {options.window_tokens:,}"
    )
    found, missed = compare(lambda arithmetic: logprobs(path, windows, arithmetic, options.threads))
    figures = {name: round(perplexity(values), 4) for name, values in found.items()}
    if options.llama_perplexity:
        figures["llama.cpp, second halves"] = llama_perplexity(
            options.llama_perplexity, path, text, windows, options.threads
        )
        halves = {name: round(perplexity(second_half(values)), 4) for name, values in found.items()}
        print("second halves of windows: " + ", ".join(f"{name} {value}" for name, value in halves.items()))
        print(f"llama.cpp: {figures['llama.cpp, second halves']}")
    print(json.dumps({"benchmark": "accuracy.perplexity", "tokens": num_tokens, "text": digest, **figures}))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
