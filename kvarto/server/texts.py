"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import Request

from kvarto.core.errors import InvalidRequest
from kvarto.server.protocol import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from kvarto.server.service import Service


async def tokenize(service: Service, request: Request) -> TokenizeAnswer:
    """Token ids of a prompt, or of messages in the model's chat template."""
    body = await service.bodies.read(request, TokenizeRequest)
    service.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
    limit = service.engine.ready.max_model_len
    if body.messages is not None:
        tokens = await service.prompts.from_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            template_kwargs=body.chat_template_kwargs,
            max_model_len=limit,
        )
    else:
        add_special = body.add_special_tokens is not False
        tokens = await service.prompts.encode(body.prompt or "", add_special_tokens=add_special, max_model_len=limit)
    texts = [service.model.tokens.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeAnswer(count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=texts)


async def detokenize(service: Service, request: Request) -> DetokenizeAnswer:
    """The text of token ids, special tokens included."""
    body = await service.bodies.read(request, DetokenizeRequest)
    service.adapter_of(body.model)
    vocab_size = service.engine.ready.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"`tokens` has {wrong}; token ids are 0 to {vocab_size - 1}", param="tokens")
    return DetokenizeAnswer(service.model.tokenizer.decode(body.tokens, skip_special_tokens=False))
