"""How /tokenize and /detokenize answer."""

from __future__ import annotations

from collections.abc import Sequence

import orjson


def tokenize_body(token_ids: Sequence[int], max_model_len: int) -> bytes:
    """The response of /tokenize; its length is never checked against the context."""
    return orjson.dumps(
        {"count": len(token_ids), "max_model_len": max_model_len, "tokens": list(token_ids)}
    )


def detokenize_body(text: str) -> bytes:
    """The response of /detokenize."""
    return orjson.dumps({"prompt": text})
