"""Bodies of the vllm-0.5 dialect: JSON, pre-validators, types, and how their errors read."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.vllm05 import requests, schema
from gateway.dialects.vllm05.errors import DialectError
from tests.fakes.vllm05 import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    ENDPOINTS,
    LEAST,
    TOKENIZE,
    Resolved,
    changed,
    refusal,
    resolve,
    resolve_raw,
)

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}


def refusal_of_bytes(raw: bytes, content_type: str | None = None) -> DialectError:
    with pytest.raises(DialectError) as caught:
        schema.parse_chat(raw, content_type)
    assert caught.value.status == 400
    return caught.value


# --- JSON ---------------------------------------------------------------------------------------------


def test_malformed_json_says_where() -> None:
    assert refusal_of_bytes(b'{"a": 1,}').message == (
        "[{'type': 'json_invalid', 'loc': ('body', 8), 'msg': 'JSON decode error', 'input': {},"
        " 'ctx': {'error': 'Expecting property name enclosed in double quotes: line 1 column 9"
        " (char 8)'}}]"
    )


@pytest.mark.parametrize("raw", [b"", b"null"])
def test_no_body_is_a_missing_field(raw: bytes) -> None:
    assert refusal_of_bytes(raw).message == (
        "[{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}]"
    )


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("raw", [b"[]", b"5", b'"x"', b"true"])
def test_a_body_that_is_no_object_is_a_400(endpoint: str, raw: bytes) -> None:
    with pytest.raises(DialectError, match="Input should be a valid dictionary") as caught:
        resolve_raw(endpoint, raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"temperature": -Infinity}', "-Infinity is not JSON"),
        (b'{"user": "\\ud800"}', "hex escape"),
        (b'{"user": "\xff"}', "Invalid utf-8 text"),
        (b"[" * 3000 + b"]" * 3000, "Nested too deeply"),
        (b'{"x":' + b"[" * 100_000, "Nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
)
def test_what_is_no_strict_json_is_refused(raw: bytes, reason: str) -> None:
    message = refusal_of_bytes(raw).message
    assert "JSON decode error" in message
    assert reason in message


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_other_encodings_of_json_are_read(encoding: str) -> None:
    raw = json.dumps(LEAST[CHAT]).encode(encoding)
    assert schema.parse_chat(raw, None).model == "MODEL"


def test_the_last_of_equal_keys_wins() -> None:
    raw = b'{"model":"a","model":"b","prompt":"x"}'
    assert schema.parse_completion(raw, None).model == "b"


@pytest.mark.parametrize(
    "content_type",
    [None, "", "application/json", "Application/JSON; charset=utf-8", "application/x+json"],
)
def test_json_content_types(content_type: str | None) -> None:
    raw = json.dumps(LEAST[CHAT]).encode()
    assert schema.parse_chat(raw, content_type).model == "MODEL"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "x"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_other_content_types_are_a_400(endpoint: str, content_type: str) -> None:
    raw = json.dumps(LEAST[endpoint]).encode()
    with pytest.raises(DialectError, match="Input should be application/json"):
        resolve_raw(endpoint, raw, content_type)


# --- pre-validators -----------------------------------------------------------------------------------


def test_a_pre_validator_hides_everything_else_and_echoes_the_body() -> None:
    body = {"tool_choice": "auto", "foo": 1}
    assert refusal(CHAT, body).message == (
        "[{'type': 'value_error', 'loc': ('body',), 'msg': 'Value error, Currently only named tools are"
        " supported.', 'input': {'tool_choice': 'auto', 'foo': 1}, 'ctx': {'error': ValueError("
        "'Currently only named tools are supported.')}}]"
    )


ONE_GUIDE = "You can only use one kind of guided decoding"
GUIDE_OR_TOOL = "You can only either use guided decoding or tools, not both."
OPTIONS = "Stream options can only be defined when `stream=True`."


def test_chat_pre_validators_in_order() -> None:
    """Each step mends what the step before was about."""
    body = changed(
        CHAT,
        tool_choice="auto",
        guided_json="{}",
        guided_regex="a",
        stream=True,
        prompt_logprobs=1,
        top_logprobs=-1,
        stream_options={"include_usage": False},
        foo=1,
    )
    steps: list[tuple[str, dict[str, Any]]] = [
        ("Currently only named tools are supported.", {"tool_choice": NAMED}),
        ("When using `tool_choice`, `tools` must be set.", {"tools": [TOOL]}),
        (ONE_GUIDE, {"guided_json": None}),
        (GUIDE_OR_TOOL, {"guided_regex": None}),
        ("`prompt_logprobs` are not available when `stream=True`.", {"prompt_logprobs": -1}),
        ("`prompt_logprobs` must be a positive value.", {"prompt_logprobs": 0}),
        ("`top_logprobs` must be a positive value.", {"top_logprobs": 0}),
        ("when using `top_logprobs`, `logprobs` must be set to true.", {"logprobs": True}),
        ("Extra inputs are not permitted", {"stream": False}),
        (OPTIONS, {"stream": True, "foo": None}),
    ]
    for message, mended in steps:
        assert message in refusal(CHAT, body).message
        body.update(mended)
    del body["foo"]
    assert resolve(CHAT, body)


def test_completion_pre_validators_in_order() -> None:
    body = changed(
        COMPLETION,
        stream_options={"include_usage": True},
        prompt_logprobs=-1,
        logprobs=-1,
        guided_choice=["a"],
        guided_regex="a",
    )
    steps: list[tuple[str, dict[str, Any]]] = [
        (OPTIONS, {"stream": True}),
        ("`prompt_logprobs` must be a positive value.", {"prompt_logprobs": 1}),
        ("`prompt_logprobs` are not available when `stream=True`.", {"prompt_logprobs": 0}),
        ("`logprobs` must be a positive value.", {"logprobs": 0}),
        (ONE_GUIDE, {"guided_regex": None}),
    ]
    for message, mended in steps:
        assert message in refusal(COMPLETION, body).message
        body.update(mended)
    assert resolve(COMPLETION, body)


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        (CHAT, "top_logprobs"),
        (CHAT, "prompt_logprobs"),
        (COMPLETION, "logprobs"),
        (COMPLETION, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("value", ["5", [], {}])
def test_a_wrong_type_in_a_compared_field_is_a_400(endpoint: str, field: str, value: Any) -> None:
    error = refusal(endpoint, changed(endpoint, **{field: value}))
    assert error.field == field
    assert "'msg': 'Input should be a valid integer'" in error.message


@pytest.mark.parametrize(
    "field", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"]
)
def test_no_guide_goes_with_a_named_tool(field: str) -> None:
    value: Any = ["a"] if field == "guided_choice" else "{}"
    body = changed(CHAT, tools=[TOOL], tool_choice=NAMED, **{field: value})
    assert GUIDE_OR_TOOL in refusal(CHAT, body).message


# --- types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_unknown_fields_are_refused_everywhere(endpoint: str) -> None:
    error = refusal(endpoint, changed(endpoint, foo=1))
    assert "Extra inputs are not permitted" in error.message
    assert error.field == "foo"


def test_only_functions_are_tools() -> None:
    body = changed(CHAT, tools=[{**TOOL, "type": "retrieval"}])
    assert "Input should be 'function'" in refusal(CHAT, body).message
    body = changed(CHAT, tools=[TOOL], tool_choice={**NAMED, "type": "x"})
    assert "Input should be 'function'" in refusal(CHAT, body).message


def test_values_are_read_the_lax_way() -> None:
    raw = json.dumps(
        changed(CHAT, n="3", max_tokens=2.0, stream="yes", temperature="0.5", logprobs=1)
    ).encode()
    request = schema.parse_chat(raw, None)
    assert (request.n, request.max_tokens, request.stream) == (3, 2, True)
    assert (request.temperature, request.logprobs) == (0.5, True)


def test_errors_of_fields_come_in_field_order_and_unknown_ones_last() -> None:
    body = {"foo": 1, "n": "x", "temperature": [], "messages": 5, "model": 1}
    found = refusal(CHAT, body).message
    places = [
        found.index(f"'{name}')") for name in ("messages", "model", "n", "temperature", "foo")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("value", [1e400, "nan", "inf"])
def test_numbers_are_finite(value: Any) -> None:
    raw = json.dumps(changed(CHAT, temperature=value)).replace("Infinity", "1e400").encode()
    with pytest.raises(DialectError, match="Input should be a finite number"):
        schema.parse_chat(raw, None)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "critic", "content": "x", "name": "n"},
        {"role": "system", "content": [{"type": "text", "text": "x", "cache": 1}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "", "refusal": None, "function_call": None},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
        {"role": "function", "content": None, "name": "f"},
    ],
)
def test_message_shapes(message: dict[str, Any]) -> None:
    assert resolve(CHAT, changed(CHAT, messages=[message]))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "id": 7}, "messages[0].id"),
        ({"role": "tool", "tool_call_id": "c"}, "messages[0].content"),
        ({"role": "tool", "content": "x", "tool_call_id": None}, "messages[0].tool_call_id"),
        ({"role": "function", "content": None}, "messages[0].name"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ("hi", "messages[0]"),
    ],
)
def test_messages_that_have_no_shape(message: Any, field: str) -> None:
    for endpoint in (CHAT, TOKENIZE):
        error = refusal(endpoint, {"model": "MODEL", "messages": [message]})
        assert error.status == 400
        if endpoint == CHAT:
            assert error.field == field


def test_tokenize_tells_the_errors_of_both_forms() -> None:
    message = refusal(TOKENIZE, {"model": "MODEL"}).message
    for form, field in (
        ("TokenizeCompletionRequest", "prompt"),
        ("TokenizeChatRequest", "messages"),
    ):
        assert f"'loc': ('body', '{form}', '{field}'), 'msg': 'Field required'" in message


def test_tokenize_takes_one_form_at_a_time() -> None:
    body = {**LEAST[TOKENIZE], "messages": LEAST[CHAT]["messages"]}
    assert "Extra inputs are not permitted" in refusal(TOKENIZE, body).message


def test_the_echo_of_a_value_is_bounded() -> None:
    error = refusal(CHAT, changed(CHAT, tool_choice="auto", user="x" * 1_000_000))
    assert len(error.message) < 20_000
    assert "Currently only named tools are supported." in error.message
    many = {f"unknown{i}": "y" * 1000 for i in range(200)}
    error = refusal(CHAT, changed(CHAT, **many))
    assert len(error.message) < 30_000
    assert error.message.count("Extra inputs are not permitted") == 64


CROWD = {f"k{i}": "x" for i in range(200_000)}


@pytest.mark.parametrize(
    ("endpoint", "fields", "told"),
    [
        (CHAT, CROWD, "not 200002 fields"),
        (CHAT, {"messages": [{"role": "user", **CROWD}]}, "not 200001 fields"),
        (CHAT, {"stream": True, "stream_options": CROWD}, "not 200000 fields"),
        (CHAT, {"tools": [{"function": CROWD}]}, "not 200000 fields"),
        (CHAT, {"documents": [CROWD]}, "not 200000 fields"),
        (CHAT, {"logit_bias": CROWD}, "Input should be a valid number"),
        (CHAT, {"logit_bias": {str(i): 1 for i in range(300_001)}}, "at most 300000 keys"),
        (CHAT, {"stop": [[]] * 200_000}, "Input should be a valid string"),
        (COMPLETION, {"prompt": [[i] for i in range(65_537)]}, "at most 65536 prompts"),
        (COMPLETION, {"prompt": [[1]] * 50_000 + [["x"]]}, "Input should be a valid integer"),
        (DETOKENIZE, {"tokens": ["x"] * 200_000}, "Input should be a valid integer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_crowd_of_errors_costs_little(endpoint: str, fields: dict[str, Any], told: str) -> None:
    """Wrong elements must not become as many errors, each for every type it could have been."""
    raw = json.dumps(changed(endpoint, **fields)).encode()
    began_at = time.process_time()
    with pytest.raises(DialectError) as caught:
        resolve_raw(endpoint, raw)
    assert time.process_time() - began_at < 1.0
    assert told in caught.value.message
    assert len(caught.value.message) < 30_000


# --- anything -----------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["none", "text", "json_object", "{}", "[1]", "user", "outlines", "MODEL"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "function", "name", "parameters", "5", "a"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = {
    CHAT: sorted(requests.ChatRequest.model_fields),
    COMPLETION: sorted(requests.CompletionRequest.model_fields),
    EMBEDDING: sorted(requests.EmbeddingRequest.model_fields),
    TOKENIZE: ["add_generation_prompt", "add_special_tokens", "messages", "model", "prompt"],
    DETOKENIZE: sorted(requests.DetokenizeRequest.model_fields),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A legal body with some fields replaced by anything."""
    endpoint = draw(st.sampled_from(ENDPOINTS))
    names = draw(st.lists(st.sampled_from(FIELDS[endpoint]), max_size=4))
    return endpoint, changed(endpoint, **{name: draw(JSON) for name in names})


@settings(max_examples=400, deadline=None)
@given(bodies())
def test_any_body_is_resolved_or_refused(request: tuple[str, dict[str, Any]]) -> None:
    try:
        assert isinstance(resolve(*request), Resolved)
    except DialectError as error:
        assert error.status in (400, 404)
        told = json.loads(error.body())
        assert told["code"] == error.status and told["message"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(ENDPOINTS), st.binary(max_size=40) | JSON.map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_are_resolved_or_refused(endpoint: str, raw: bytes) -> None:
    try:
        assert isinstance(resolve_raw(endpoint, raw), Resolved)
    except DialectError as error:
        assert error.status in (400, 404)
