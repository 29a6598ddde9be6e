"""How embeddings look."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.dialects.vllm05.heading import new_id, usage


def body(
    vectors: Sequence[Sequence[float]],
    *,
    model: str,
    created: int,
    num_prompt_tokens: int,
    as_base64: bool,
) -> bytes:
    """The response. `model` is the name as it was asked for, unlike everywhere else."""
    data: list[dict[str, Any]] = [
        {"index": i, "object": "embedding", "embedding": packed(v) if as_base64 else list(v)}
        for i, v in enumerate(vectors)
    ]
    return orjson.dumps(
        {
            "id": new_id("embd-"),
            "object": "list",
            "created": created,
            "model": model,
            "data": data,
            "usage": usage(num_prompt_tokens, 0),
        }
    )


def packed(vector: Sequence[float]) -> str:
    """Base64 of little-endian float32, which is what OpenAI's clients unpack."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
