"""Which guide a request asks for, as a constraint for the engine.

Knows the order in which the guided fields win and what is wrong with them before any compiling; whether a
schema, pattern or grammar can be followed is the engine's to say.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.dialects.vllm05.errors import DialectError
from gateway.dialects.vllm05.requests import ChatRequest, GenerationRequest
from gateway.dialects.vllm05.schema import parse_json_text
from gateway.dialects.vllm05.shapes import NamedToolChoice
from gateway.spec import ConstraintSpec

BACKENDS = ("outlines", "lm-format-enforcer")
"""Names of the original's guiding engines. Both are accepted and mean the one that there is."""


def constraint(request: GenerationRequest) -> ConstraintSpec | None:
    """The first of: named tool, guided_json, _regex, _choice, _grammar, response_format.

    Refuses what is wrong with the guided fields themselves.
    """
    schema = _tool_schema(request) if isinstance(request, ChatRequest) else None
    backend = request.guided_decoding_backend
    if backend is not None and backend not in BACKENDS:
        raise DialectError(
            f"Unknown guided decoding backend '{backend}'. Must be one of"
            " 'outlines, 'lm-format-enforcer'",
            field="guided_decoding_backend",
        )
    if request.guided_choice == []:
        raise DialectError("guided_choice must not be empty", field="guided_choice")
    if schema or request.guided_json:
        text = _schema_text(schema or request.guided_json)
        return ConstraintSpec(
            "json_schema", text, whitespace_pattern=request.guided_whitespace_pattern or None
        )
    if request.guided_regex:
        return ConstraintSpec("regex", request.guided_regex)
    if request.guided_choice:
        return ConstraintSpec("choice", choices=tuple(request.guided_choice))
    if request.guided_grammar:
        return ConstraintSpec("grammar", request.guided_grammar)
    if request.response_format is not None and request.response_format.type == "json_object":
        return ConstraintSpec("json_object")
    return None


def _tool_schema(request: ChatRequest) -> dict[str, Any] | None:
    choice = request.tool_choice
    if not isinstance(choice, NamedToolChoice):
        return None
    name = choice.function.name
    for tool in request.tools or ():
        if tool.function.name == name:
            return tool.function.parameters
    raise DialectError(
        f"Tool '{name}' has not been passed in `tools`.", field="tool_choice.function.name"
    )


def _schema_text(schema: str | dict[str, Any] | None) -> str:
    value = parse_json_text(schema) if isinstance(schema, str) else schema
    if not isinstance(value, dict):
        raise DialectError("guided_json must be a JSON object", field="guided_json")
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise DialectError(
            "guided_json contains a number that is out of range", field="guided_json"
        ) from None
