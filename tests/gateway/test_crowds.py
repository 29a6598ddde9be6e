"""Bodies of legal size that are a crowd are refused before each member is looked at."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.dialects.vllm05 import schema
from gateway.dialects.vllm05.errors import DialectError
from gateway.dialects.vllm05.shapes import MAX_IDS, MAX_KWARGS, MAX_MESSAGES

TURN = {"role": "user", "content": "a"}


def refused(parse: Any, body: dict[str, Any]) -> str:
    raw = orjson.dumps({"model": "MODEL", **body})
    with pytest.raises(DialectError) as caught:
        parse(raw, "application/json")
    assert caught.value.status == 400
    return str(caught.value)


def test_a_conversation_of_a_million_turns_is_one_short_error() -> None:
    told = refused(schema.parse_chat, {"messages": [TURN] * 1_000_000})
    assert f"at most {MAX_MESSAGES} elements, not 1000000" in told


def test_variables_of_a_template_are_counted() -> None:
    kwargs = {str(i): 1 for i in range(MAX_KWARGS + 1)}
    told = refused(schema.parse_chat, {"messages": [TURN], "chat_template_kwargs": kwargs})
    assert f"at most {MAX_KWARGS} elements" in told


@pytest.mark.parametrize(
    ("parse", "field"),
    [(schema.parse_completion, "prompt"), (schema.parse_detokenize, "tokens")],
    ids=["prompt", "tokens"],
)
def test_token_ids_are_counted(parse: Any, field: str) -> None:
    assert f"at most {MAX_IDS}" in refused(parse, {field: [5] * (MAX_IDS + 1)})


def test_what_is_just_not_a_crowd_passes() -> None:
    body = {"model": "MODEL", "messages": [TURN] * MAX_MESSAGES}
    request = schema.parse_chat(orjson.dumps(body), "application/json")
    assert len(request.messages) == MAX_MESSAGES
