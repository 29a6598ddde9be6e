"""What a request starts from: the conversation as a template sees it, or prompts as texts and ids.

Knows how content is flattened and in which forms prompts come. Rendering, encoding and the vocabulary are
other people's: what a template refuses is said by the tokenizer service.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.dialects import Chat, Ids, Text
from gateway.dialects.vllm05.errors import DialectError
from gateway.dialects.vllm05.guided import constraint
from gateway.dialects.vllm05.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from gateway.dialects.vllm05.shapes import AnyMessage

TEXT_ONLY = "text (this model reads no images and no audio)"
"""What a request with media is told the model's type is."""

_MEDIA = ("image_url", "audio_url")
_MAX_ID = 2**32 - 1


def conversation(request: ChatRequest, default_template: str | None = None) -> Chat:
    """The turns and everything else that the template may look at."""
    kwargs = request.chat_template_kwargs
    return Chat(
        messages=turns(request.messages),
        tools_json=tuple(to_json(tool.model_dump(), "tools") for tool in request.tools or ()),
        documents_json=tuple(to_json(d, "documents") for d in request.documents or ()),
        add_generation_prompt=request.add_generation_prompt,
        chat_template=request.chat_template or default_template,
        template_kwargs_json=to_json(kwargs, "chat_template_kwargs") if kwargs else None,
        add_special_tokens=request.add_special_tokens,
        truncate_to=_cut(request.truncate_prompt_tokens),
    )


def turns(messages: Sequence[AnyMessage]) -> tuple[tuple[str, str], ...]:
    """(role, content) of every turn that has content; nothing else of a message reaches a template."""
    if not messages:
        raise DialectError("messages must not be empty", field="messages")
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if content is None:
            continue
        if not isinstance(content, str):
            content = _flat(content, f"messages[{index}].content")
        found.append((message["role"], content))
    return tuple(found)


def _flat(parts: Sequence[Any], where: str) -> str:
    texts: list[str] = []
    num_media = 0
    for index, part in enumerate(parts):
        kind = part["type"]
        if kind in _MEDIA:
            num_media += 1
        elif kind != "text":
            raise DialectError(f"Unknown part type: {kind}", field=f"{where}[{index}].type")
        else:
            text = part.get("text")
            if not isinstance(text, str):
                field = f"{where}[{index}].text"
                raise DialectError(f"{field} must be a string", field=field)
            texts.append(text)
    if num_media > 1:
        raise DialectError("Multiple multimodal inputs is currently not supported.", field=where)
    if num_media:
        raise DialectError(f"Unknown model type: {TEXT_ONLY}", field=where)
    return "\n".join(texts)


def prompts(request: CompletionRequest) -> list[Text | Ids]:
    """The prompts of a completion, after the checks that come before encoding."""
    if request.suffix is not None:
        raise DialectError("suffix is not currently supported", field="suffix")
    constraint(request)  # a wrong guide is told before anything about the prompts
    return _prompts(
        request.prompt, "prompt", request.add_special_tokens, _cut(request.truncate_prompt_tokens)
    )


def embedding_prompts(request: EmbeddingRequest) -> list[Text | Ids]:
    """The inputs of an embedding request; special tokens are always added to texts."""
    if request.dimensions is not None:
        raise DialectError("dimensions is currently not supported", field="dimensions")
    return _prompts(request.input, "input", True, None)


def tokenize_prompt(request: TokenizeRequest, default_template: str | None = None) -> Text | Chat:
    """What /tokenize encodes. A conversation is rendered by the server's template only."""
    if not isinstance(request, TokenizeChatRequest):
        return Text(request.prompt, request.add_special_tokens)
    return Chat(
        messages=turns(request.messages),
        add_generation_prompt=request.add_generation_prompt,
        chat_template=default_template,
        add_special_tokens=request.add_special_tokens,
    )


def detokenize_ids(request: DetokenizeRequest) -> list[int]:
    """The ids to decode. Ids that no tokenizer can have vanish here; those of no token, when decoded."""
    _check_not_negative(request.tokens, "tokens")
    return [i for i in request.tokens if i <= _MAX_ID]


def to_json(value: Any, field: str) -> str:
    """Compact JSON in the order the client sent. Numbers beyond a double have no JSON form."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise DialectError(f"{field} contains a number that is out of range", field=field) from None


def _prompts(
    value: Any, field: str, add_special_tokens: bool, truncate_to: int | None
) -> list[Text | Ids]:
    if isinstance(value, str):
        return [Text(value, add_special_tokens, truncate_to)]
    if not value or value[0] == []:
        raise DialectError("please provide at least one prompt", field=field)
    if isinstance(value[0], str):
        return [Text(text, add_special_tokens, truncate_to) for text in value]
    is_one = isinstance(value[0], int)
    found: list[Text | Ids] = []
    for index, ids in enumerate([value] if is_one else value):
        _check_not_negative(ids, field if is_one else f"{field}[{index}]")
        found.append(Ids(tuple(ids[-truncate_to:] if truncate_to else ids)))
    return found


def _cut(truncate_to: int | None) -> int | None:
    """A bound that no prompt can reach is none; it may be a number that no message between services holds."""
    return None if truncate_to is None or truncate_to > _MAX_ID else truncate_to


def _check_not_negative(ids: Sequence[int], where: str) -> None:
    if ids and min(ids) < 0:
        raise DialectError(f"{where} contains the negative token id {min(ids)}", field=where)
