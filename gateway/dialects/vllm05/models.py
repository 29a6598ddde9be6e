"""How the list of models looks: one card per name that requests may use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.catalog import ModelCard
from gateway.dialects.vllm05.heading import new_id


def body(models: Iterable[ModelCard], *, created: int) -> bytes:
    """The list. `created` is the time of this request, as this dialect has it."""
    cards = [_card(name, model, created) for model in models for name in model.names]
    return orjson.dumps({"object": "list", "data": cards})


def _card(name: str, model: ModelCard, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [
            {
                "id": new_id("modelperm-"),
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
