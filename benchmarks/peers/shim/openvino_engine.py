"""OpenVINO GenAI behind the shim: `python -m benchmarks.peers.shim.openvino_engine MODEL [FLAG...]`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found,unused-ignore]  # lives in the peer's environment
import openvino_genai  # type: ignore[import-not-found,unused-ignore]

from benchmarks.peers.shim.lines import Answer, Lines, Request


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="GGUF file, or folder of OpenVINO's own format")
    parser.add_argument("--property", action="append", default=[], metavar="NAME=VALUE", help="of the CPU plugin")
    parser.add_argument("--cache-gb", type=int, default=2, help="KV cache")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--no-prefix-caching", action="store_true")
    return parser.parse_args()


def pipeline(flags: argparse.Namespace) -> Any:
    """Continuous batching with room for the widest column."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = flags.cache_gb
    scheduler.max_num_batched_tokens = flags.max_num_batched_tokens
    scheduler.max_num_seqs = 256
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = not flags.no_prefix_caching
    properties = dict(pair.split("=", 1) for pair in flags.property)
    return openvino_genai.ContinuousBatchingPipeline(flags.model, scheduler, "CPU", properties)


def start(engine: Any, request: Request) -> Any:
    """Greedy, to the last token asked for."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = request.max_tokens
    config.ignore_eos = True
    config.do_sample = False
    ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
    return engine.add_request(request.id, ids, config)


def new_tokens(handle: Any) -> list[int]:
    """Tokens since the last call."""
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return tokens


def main() -> None:
    """Step while anything runs."""
    flags = arguments()
    lines = Lines()
    engine = pipeline(flags)
    running: dict[int, tuple[Any, int]] = {}  # handle and tokens to come
    while True:
        for request in lines.take(is_blocking=not running):
            running[request.id] = (start(engine, request), request.max_tokens)
        engine.step()
        answers = []
        for number, (handle, num_left) in list(running.items()):
            if tokens := new_tokens(handle):
                num_left -= len(tokens)
                running[number] = (handle, num_left)
                answers.append(Answer(number, tokens, num_left <= 0))
                if num_left <= 0:
                    del running[number]
        lines.give(answers)


if __name__ == "__main__":
    main()
