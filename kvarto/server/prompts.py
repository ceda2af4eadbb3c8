"""From what a client sends as a prompt or as messages to token ids.

Text is tokenised off the event loop, on a few threads of its own, so that one client's book does not hold up
everybody's tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvarto.core.errors import ContextLengthExceeded, InvalidRequest
from kvarto.server.served_model import ServedModel

MAX_PROMPTS = 1024
"""Prompts in one request."""
_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize",
     "chat_template", "return_tensors", "return_dict", "padding", "truncation", "max_length", "self", "kwargs"}
)  # fmt: skip

T = TypeVar("T")


class Prompts:
    """Tokenises prompts and messages of one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvarto-text")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> list[int]:
        """Token ids of one text; control tokens spelt in it count as such.

        A text with more characters than `max_model_len` tokens can hold is refused as it is: to tokenise it could
        take half a minute and gigabytes.
        """
        if max_model_len is not None:
            self._check_length(len(text), max_model_len, "prompt")
        call = partial(self._model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._off_loop(call)

    async def from_prompt(
        self, prompt: str | list[Any], *, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> list[list[int]]:
        """Every form of OpenAI's `prompt`: text, texts, ids, or lists of ids; the answer has a list for each prompt."""
        return [
            await self.encode(each, add_special_tokens=add_special_tokens, max_model_len=max_model_len)
            if isinstance(each, str)
            else each
            for each in _as_list(prompt)
        ]

    async def from_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        add_special_tokens: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        template = self._model.chat_template
        if template is None:
            raise InvalidRequest(
                f"the model `{self._model.name}` has no chat template; use /v1/completions with a prompt",
                param="messages",
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "`continue_final_message` and `add_generation_prompt` exclude each other; send one of them",
                param="continue_final_message",
            )
        plain = [_plain_message(message, index) for index, message in enumerate(messages)]
        if not plain:
            raise InvalidRequest("`messages` is empty; at least 1 message is needed", param="messages")
        if max_model_len is not None:
            self._check_length(sum(len(message["content"]) for message in plain), max_model_len, "messages")
        kwargs = _checked_kwargs(template_kwargs or {})
        begins_answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        text = await self._off_loop(partial(template.render, plain, add_generation_prompt=begins_answer, **kwargs))
        if continue_final_message:
            text = _cut_after_final(text, str(plain[-1]["content"]))
        return await self.encode(text, add_special_tokens=bool(add_special_tokens), max_model_len=max_model_len)

    def _check_length(self, num_chars: int, max_model_len: int, param: str) -> None:
        max_chars = max_model_len * self._model.tokenizer.max_token_chars
        if num_chars > max_chars:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {max_model_len} tokens; `{param}` has {num_chars:,} "
                f"characters, and more than {max_chars:,} never fit; shorten it",
                param=param,
            )

    async def _off_loop(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def truncated(token_ids: list[int], truncate: int | None, max_model_len: int, max_tokens: int | None) -> list[int]:
    """The last `truncate` tokens, as vLLM's `truncate_prompt_tokens`; -1 keeps as many as leave room for the output."""
    if truncate is None:
        return token_ids
    if truncate == -1:
        truncate = max_model_len - max(1, max_tokens or 1)
    if not 1 <= truncate <= max_model_len:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` {truncate} is out of range; must be -1 or from 1 to {max_model_len}",
            param="truncate_prompt_tokens",
        )
    return token_ids[-truncate:]


def _as_list(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` is empty; send text or token ids", param="prompt")
    if type(prompt[0]) is not int and len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"`prompt` holds {len(prompt)} prompts; at most {MAX_PROMPTS}", param="prompt")
    if all(type(each) is int for each in prompt):
        return [prompt]
    if all(isinstance(each, str) for each in prompt):
        return list(prompt)
    if all(isinstance(each, list) and all(type(token) is int for token in each) for each in prompt):
        return list(prompt)
    raise InvalidRequest(
        "`prompt` must be text, a list of texts, a list of token ids, or a list of lists of token ids", param="prompt"
    )


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message with its content as one text."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"`messages[{index}].role` must be text such as `user`", param="messages")
    return {**message, "content": _content_text(message.get("content"), index)}


def _content_text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"`messages[{index}].content` must be text or a list of text parts", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"`messages[{index}].content` has a part of type `{str(kind)[:40]}`; this model reads text only",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _checked_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    taken = sorted(_TEMPLATE_ARGUMENTS & set(kwargs))
    odd = [name for name in kwargs if not name.isidentifier() or name.startswith("_")]
    if taken or odd:
        name = (taken or odd)[0][:64]
        raise InvalidRequest(
            f"`chat_template_kwargs` has `{name}`, which is not the template's to set; rename or remove it",
            param="chat_template_kwargs",
        )
    return kwargs


def _cut_after_final(text: str, content: str) -> str:
    """The text up to the end of the last message, so that the model goes on with it."""
    final = content.strip()
    start = text.rfind(final) if final else -1
    if start < 0:
        raise InvalidRequest(
            "`continue_final_message` needs a last message with text that the chat template keeps as it is",
            param="messages",
        )
    return text[: start + len(final)]
