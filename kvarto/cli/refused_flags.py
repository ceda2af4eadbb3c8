"""Flags that other servers have and this one doesn't (yet): each is answered with what to do instead, never ignored."""

from __future__ import annotations

from collections.abc import Iterable

from kvarto.core.errors import UsageError

_NO_SLOTS = "adapters have no slots; they share the pages of the KV cache, and leave when those are needed"
_NO_TIERS = "there is no host tier yet, and a preempted request is computed again"
_NO_STREAMING = "weights stay resident; choose a smaller weight format or raise `--device-memory`"
_ONE_DEVICE = "one process serves on one device"
_FIXED_FORMAT = "the format is read from the model's own files"
_NO_TOOLS = "tool calls and reasoning are not parsed yet; the text is returned as it is"
_QUIET = "prompts are never logged"

REFUSED: dict[str, str] = {
    # vLLM: memory
    "num-gpu-blocks-override": "the number of pages follows from the budget; use `--kv-cache-memory-bytes`",
    "enforce-eager": "nothing is compiled or captured here, so there is nothing to turn off",
    "enable-sleep-mode": "a server can't sleep yet; stop it instead",
    # vLLM: offload
    "cpu-offload-gb": _NO_STREAMING,
    "kv-offloading-size": _NO_TIERS,
    "kv-offloading-backend": _NO_TIERS,
    "offload-group-size": _NO_STREAMING,
    "offload-num-in-group": _NO_STREAMING,
    "offload-prefetch-step": _NO_STREAMING,
    "swap-space": _NO_TIERS,
    # vLLM: LoRA
    "enable-lora": "naming adapters is enough: `--adapter-dir`, `--lora-modules` or `--max-lora-rank`",
    "max-loras": f"{_NO_SLOTS}; `--max-adapters-per-step` bounds what one step reads",
    "max-cpu-loras": "host memory is bounded by bytes: `--adapter-host-memory`",
    "lora-dtype": "adapters keep the types of their files; `--adapter-dtype int8` or `int4` makes them smaller",
    # vLLM: scheduler and model
    "enable-chunked-prefill": "long prompts always go in chunks of `--max-num-batched-tokens`",
    "no-enable-chunked-prefill": "long prompts always go in chunks; `--max-num-batched-tokens` says how large",
    "stream-interval": "every token is sent when it is there",
    "tokenizer": "the tokenizer is read from the model's own folder or file",
    "revision": "pull the revision into a folder first and serve the folder",
    "download-dir": "set `HF_HOME` for models of the hub, `KVARTO_HOME` for the demo model",
    "load-format": _FIXED_FORMAT,
    "quantization": _FIXED_FORMAT,
    "trust-remote-code": "code of a model's repository is never run",
    "chat-template": "the template is read from the model's own folder or file",
    "config": "give flags on the command line, or as environment variables such as `KVARTO_BLOCK_SIZE`",
    "tensor-parallel-size": _ONE_DEVICE,
    "pipeline-parallel-size": _ONE_DEVICE,
    "data-parallel-size": _ONE_DEVICE,
    # vLLM: front
    "enable-request-id-headers": "`X-Request-Id` is always sent back",
    "enable-force-include-usage": "ask for usage with `stream_options` in the request",
    "enable-prompt-tokens-details": "cached tokens are always part of the usage",
    "disable-access-log-for-endpoints": "there is no access log",
    "enable-log-requests": _QUIET,
    "max-log-len": _QUIET,
    "otlp-traces-endpoint": "traces are not exported yet; `/metrics` has the figures",
    "enable-auto-tool-choice": _NO_TOOLS,
    "tool-call-parser": _NO_TOOLS,
    "reasoning-parser": _NO_TOOLS,
    "kv-events-config": "events of the cache are not published yet; `/metrics` has the figures",
    "kv-cache-metrics": "`/metrics` always has them",
    "kv-cache-metrics-sample": "`/metrics` always has them",
    # SGLang
    "max-total-tokens": "use `--kv-cache-memory-bytes`; the plan prints how many tokens that holds",
    "schedule-policy": "use `--scheduling-policy fcfs` or `priority`",
    "radix-eviction-policy": "what is evicted follows from what it costs to compute again",
    "lora-paths": "use `--lora-modules name=path`, or `--adapter-dir`",
    "max-loras-per-batch": f"{_NO_SLOTS}; `--max-adapters-per-step` bounds what one step reads",
    "max-loaded-loras": _NO_SLOTS,
    "lora-eviction-policy": "what is evicted follows from what it costs to load again",
    "enable-lora-overlap-loading": "adapters always load in the background",
    "enable-metrics": "`/metrics` is always there",
}


def refuse_foreign(tokens: Iterable[str]) -> None:
    """Raise UsageError for the first token that is such a flag; what follows `--` is not looked at."""
    for token in tokens:
        if token == "--":
            return
        flag = token.partition("=")[0]
        reason = REFUSED.get(flag[2:].replace("_", "-")) if flag.startswith("--") else None
        if reason is not None:
            raise UsageError(f"`{flag}` is a flag of other servers: {reason}. Leave it out.")
