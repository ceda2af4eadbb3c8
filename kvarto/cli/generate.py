"""`kvarto generate PROMPT`: continue one prompt in this process, and print the text."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvarto.cli.flags import count, takes
from kvarto.core.errors import UsageError
from kvarto.core.sampling import SamplingParams
from kvarto.engine.config import EngineConfig


@takes(engine=EngineConfig)
def generate(
    prompt: str | None = None,
    *,
    engine: EngineConfig,
    max_tokens: Annotated[int, Parameter(converter=count)] = 128,
    n: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: tuple[str, ...] = (),
    json: bool = False,
) -> None:
    """Continue one prompt and print the text.

    Parameters
    ----------
    prompt
        Text to continue; without it, what comes on standard input.
    max_tokens
        Longest output.
    n
        Choices; they share the pages of the prompt.
    temperature
        0 is greedy.
    top_k
        Keep the k likeliest tokens; 0 keeps all.
    top_p
        Keep the smallest set of tokens whose probability reaches this.
    min_p
        Keep tokens at least this many times as likely as the likeliest.
    stop
        Text that ends the output and is not part of it; may be repeated.
    json
        Print one JSON object with token ids and why each choice ended.
    """
    from kvarto.engine.llm import LLM

    text = _read(prompt)
    sampling = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, stop=stop
    )
    with LLM(**msgspec.structs.asdict(engine)) as llm:
        output = llm.generate(text, sampling)[0]
    if json:
        print(msgspec.json.encode(output).decode())
        return
    for choice in output.outputs:
        if n > 1:
            print(f"--- {choice.index + 1} of {n}")
        print(choice.text)


def _read(prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise UsageError("there is no prompt; give one, or send it to standard input: `echo … | kvarto generate`")
    return sys.stdin.read()
