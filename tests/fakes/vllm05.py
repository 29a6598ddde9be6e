"""Drives the request side of the vllm-0.5 dialect without a server: body in, prompts and specs out.

A tokenizer that counts words stands in for the real one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.dialects import Chat, Ids, Text
from gateway.dialects.vllm05 import messages, sampling, schema
from gateway.dialects.vllm05.errors import DialectError, model_not_found
from gateway.spec import GenerationSpec

MAX_MODEL_LEN = 512
LIMITS = sampling.Limits(max_model_len=MAX_MODEL_LEN, vocab_size=1000, base_vocab_size=990)
NAMES = ("MODEL", "MODEL-ALIAS")

CHAT = "POST /v1/chat/completions"
COMPLETION = "POST /v1/completions"
EMBEDDING = "POST /v1/embeddings"
TOKENIZE = "POST /tokenize"
DETOKENIZE = "POST /detokenize"
ENDPOINTS = (CHAT, COMPLETION, EMBEDDING, TOKENIZE, DETOKENIZE)

LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "MODEL", "messages": [{"role": "user", "content": "Say something."}]},
    COMPLETION: {"model": "MODEL", "prompt": "Once upon a time"},
    EMBEDDING: {"model": "MODEL", "input": "hello world"},
    TOKENIZE: {"model": "MODEL", "prompt": "hello world"},
    DETOKENIZE: {"model": "MODEL", "tokens": [5, 6]},
}
"""The shortest body of each endpoint."""


@dataclass(frozen=True)
class Resolved:
    """What a legal request came to."""

    prompts: Sequence[Text | Ids | Chat]
    specs: Sequence[GenerationSpec] = ()


def resolve(endpoint: str, body: Any, limits: sampling.Limits = LIMITS) -> Resolved:
    """All steps before the engine, in the order of a server. Raises DialectError."""
    return resolve_raw(endpoint, json.dumps(body).encode(), "application/json", limits)


def resolve_raw(
    endpoint: str,
    raw: bytes,
    content_type: str | None = None,
    limits: sampling.Limits = LIMITS,
) -> Resolved:
    """The same from bytes."""
    if endpoint == CHAT:
        chat = schema.parse_chat(raw, content_type)
        _find(chat.model)
        conversation = messages.conversation(chat)
        return Resolved([conversation], [sampling.chat_spec(chat, length(conversation), limits)])
    if endpoint == COMPLETION:
        completion = schema.parse_completion(raw, content_type)
        _find(completion.model)
        prompts = messages.prompts(completion)
        lengths = [length(p) for p in prompts]
        return Resolved(prompts, sampling.completion_specs(completion, lengths, limits))
    if endpoint == EMBEDDING:
        embedding = schema.parse_embedding(raw, content_type)
        _find(embedding.model)
        inputs = messages.embedding_prompts(embedding)
        sampling.check_embedding_lengths([length(p) for p in inputs], limits)
        sampling.check_token_ids(embedding.input, "input", limits)
        return Resolved(inputs)
    if endpoint == TOKENIZE:
        tokenize = schema.parse_tokenize(raw, content_type)
        _find(tokenize.model)
        return Resolved([messages.tokenize_prompt(tokenize)])
    assert endpoint == DETOKENIZE, endpoint
    detokenize = schema.parse_detokenize(raw, content_type)
    _find(detokenize.model)
    return Resolved([Ids(tuple(messages.detokenize_ids(detokenize)))])


def refusal(endpoint: str, body: Any, limits: sampling.Limits = LIMITS) -> DialectError:
    """The error that a body is refused with; fails when it is accepted."""
    try:
        resolved = resolve(endpoint, body, limits)
    except DialectError as error:
        return error
    raise AssertionError(f"accepted: {resolved}")


def changed(endpoint: str, **fields: Any) -> dict[str, Any]:
    """The shortest body with these fields on top."""
    return {**LEAST[endpoint], **fields}


def length(prompt: Text | Ids | Chat) -> int:
    """Tokens of a prompt: one per word or id and two for a template, cut as a tokenizer would cut."""
    if isinstance(prompt, Ids):
        return len(prompt.token_ids)
    texts = (prompt.text,) if isinstance(prompt, Text) else [text for _, text in prompt.messages]
    count = sum(len(text.split()) for text in texts) + 2 * isinstance(prompt, Chat)
    return count if prompt.truncate_to is None else min(count, prompt.truncate_to)


def _find(name: str) -> None:
    if name not in NAMES:
        raise model_not_found(name)
