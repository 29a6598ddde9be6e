"""Known ways in which servers fail clients, as requests to the vllm-0.5 dialect: accepted or refused.

Each case is named by its number in the collection that it comes from. What a case asks of the answer (its
finish reasons, its status line) is tested where answers are made; here is whether and as what it gets through.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.dialects import Chat
from gateway.dialects.vllm05.errors import DialectError
from tests.fakes.vllm05 import (
    CHAT,
    COMPLETION,
    MAX_MODEL_LEN,
    TOKENIZE,
    Resolved,
    changed,
    resolve,
    resolve_raw,
)

Case = tuple[str, str, dict[str, Any]]
EXTRA = "Extra inputs are not permitted"
LENGTH = "maximum context length"
TEXT = [{"type": "text", "text": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "sqrt", "arguments": '{"x": 50}'}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


ACCEPTED: list[Case] = [
    ("B002", CHAT, user(TEXT)),
    ("B008", CHAT, turns(("system", "A"), ("system", "B"), ("user", "hi"), ("system", "C"))),
    ("B010 no part", CHAT, user([])),
    ("B019 many", CHAT, {"logit_bias": {str(i): -1 for i in range(300)}}),
    ("B019 all", CHAT, {"logit_bias": {str(i): -1 for i in range(990)}}),
    ("B019 above 100", CHAT, {"logit_bias": {"5": 101}}),
    ("B048", CHAT, user("hello", name="user_1")),
    ("B067", CHAT, {"seed": None}),
    ("B071 any role", CHAT, turns(("foo", "x"))),
    ("B071 hot", CHAT, {"temperature": 3.5}),
    ("B112", CHAT, turns(("system", TEXT), ("user", [*TEXT, *TEXT]))),
    ("B122 one", CHAT, {"top_p": 1}),
    ("B130 chat", CHAT, {"max_tokens": None}),
    ("B130 completion", COMPLETION, {"max_tokens": None}),
    ("B136 off", COMPLETION, {"top_k": -1, "seed": 1}),
    ("B136 one", COMPLETION, {"top_k": 1, "seed": 1}),
    ("B136 huge", COMPLETION, {"top_k": 100_000_000, "seed": 1}),
    ("B140", CHAT, {"tool_choice": "none"}),
    ("B140 tools", CHAT, {"tool_choice": "none", "tools": [TOOL]}),
    ("B165", CHAT, turns(("user", "A"), ("assistant", ""), ("user", "B"))),
    ("B166 best_of", COMPLETION, {"best_of": 3, "n": 1}),
    ("B166 stream", COMPLETION, {"best_of": 2, "stream": True}),
    ("B235 largest", COMPLETION, {"seed": 2**63 - 1}),
    ("B235 none", COMPLETION, {"seed": -1}),
    ("B235 whole", COMPLETION, {"seed": 1e3}),
    ("B280 one", CHAT, {"n": 1.0}),
    ("B280 two", CHAT, {"n": 2}),
]

REFUSED: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("B009", CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
    ("B009", CHAT, {"max_tokens": 0, "stream": True}, "max_tokens", "at least 1, got 0"),
    ("B010 image", CHAT, user([IMAGE]), "messages[0].content", "reads no images"),
    ("B010 no text", CHAT, user([{"type": "text"}]), "messages[0].content[0].text", "a string"),
    ("B010 number", CHAT, user(5), "messages[0].content", "valid string"),
    ("B010 null", CHAT, user(None), "messages[0].content", "valid string"),
    ("B012", CHAT, {"messages": []}, "messages", "must not be empty"),
    ("B018 top", CHAT, {"metadata": {"k": "v"}}, "metadata", EXTRA),
    ("B018 store", CHAT, {"store": False}, "store", EXTRA),
    ("B018 message", CHAT, user("hi", id=7), "messages[0].id", EXTRA),
    ("B019 word", CHAT, {"logit_bias": {"hello": 5}}, "logit_bias", "not an integer"),
    ("B019 value", CHAT, {"logit_bias": {"5": "x"}}, "logit_bias.5", "valid number"),
    ("B019 fraction", CHAT, {"logit_bias": {"5.0": 1}}, "logit_bias", "not an integer"),
    ("B019 list", CHAT, {"logit_bias": [[5, 1]]}, "logit_bias", "valid dictionary"),
    ("B020", CHAT, user("word " * 200_000), "messages", LENGTH),
    ("B033", CHAT, user("x", thinking="hmm"), "messages[0].thinking", EXTRA),
    ("B045", CHAT, user([*TEXT, {"type": "weird"}]), "messages[0].content[1].type", "weird"),
    ("B102", CHAT, {**user("word " * 200_000), "stream": True}, "messages", LENGTH),
    ("B113 null", CHAT, {"messages": None}, "messages", "valid list"),
    ("B113 number", CHAT, {"messages": 123}, "messages", "valid list"),
    ("B113 object", CHAT, {"messages": {"role": "user"}}, "messages", "valid list"),
    ("B119", COMPLETION, {"top_k": 0}, "top_k", "must be -1 (disable), or at least 1, got 0."),
    ("B122 zero", CHAT, {"top_p": 0.0}, "top_p", "must be in (0, 1], got 0.0."),
    ("B130", CHAT, {"max_completion_tokens": None}, "max_completion_tokens", EXTRA),
    ("B136 below", COMPLETION, {"top_k": -2}, "top_k", "got -2."),
    ("B136 fraction", COMPLETION, {"top_k": 1.5}, "top_k", "fractional part"),
    ("B140", CHAT, {"tools": [], "tool_choice": "auto"}, "tool_choice", "Currently only named"),
    ("B166", COMPLETION, {"best_of": 1, "n": 3}, "best_of", "greater than or equal to n"),
    ("B178", CHAT, {"messages": [], "stream": True}, "messages", "must not be empty"),
    ("B185", CHAT, {"max_tokens": -5}, "max_tokens", "at least 1, got -5."),
    ("B195", CHAT, {"max_completion_tokens": 5}, "max_completion_tokens", EXTRA),
    ("B235 over", COMPLETION, {"seed": 2**63}, "seed", "less than or equal to 9223372036854775807"),
    ("B235 far over", COMPLETION, {"seed": 2**64}, "seed", "less than or equal to"),
    ("B235 under", COMPLETION, {"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
    ("B235 fraction", COMPLETION, {"seed": 1.5}, "seed", "fractional part"),
    ("B242", COMPLETION, {"max_tokens": MAX_MODEL_LEN}, "max_tokens", LENGTH),
    ("B242", CHAT, {"max_tokens": MAX_MODEL_LEN}, "max_tokens", LENGTH),
    ("B263", CHAT, {"stream": True, "n": 0}, "n", "n must be at least 1, got 0."),
    ("B263", COMPLETION, {"stream": True, "n": 0}, "n", "n must be at least 1, got 0."),
    ("B280", CHAT, {"n": -1}, "n", "n must be at least 1, got -1."),
    ("B280 fraction", CHAT, {"n": 1.5}, "n", "fractional part"),
    ("B280 over", CHAT, {"n": 1_000_000}, "n", "at most 1024 sequences"),
]


def named(case: tuple[Any, ...]) -> str:
    return f"{case[0]} {case[1].rpartition('/')[2]}"


@pytest.mark.parametrize("case", ACCEPTED, ids=named)
def test_accepted(case: Case) -> None:
    _, endpoint, fields = case
    assert isinstance(resolve(endpoint, changed(endpoint, **fields)), Resolved)


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_refused(case: tuple[str, str, dict[str, Any], str, str]) -> None:
    _, endpoint, fields, field, told = case
    with pytest.raises(DialectError) as caught:
        resolve(endpoint, changed(endpoint, **fields))
    error = caught.value
    assert (error.status, error.field, error.in_band) == (400, field, False)
    assert told in error.message


def test_b113_b218_what_is_missing_is_named() -> None:
    for body, field in (({"model": "MODEL"}, "messages"), ({"messages": []}, "model")):
        with pytest.raises(DialectError, match="Field required") as caught:
            resolve(CHAT, body)
        assert (caught.value.status, caught.value.field) == (400, field)


def test_b079_nulls_are_as_good_as_absent() -> None:
    names = [
        *("temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "n"),
        *("logit_bias", "user", "tools", "tool_choice", "response_format", "stream_options"),
        *("logprobs", "top_logprobs"),
    ]
    base = changed(CHAT, max_tokens=4, temperature=1)
    assert resolve(CHAT, {**base, **dict.fromkeys(names)}) == resolve(CHAT, base)


def test_b150_the_default_of_completions_is_sixteen() -> None:
    assert resolve(COMPLETION, changed(COMPLETION)).specs[0].max_tokens == 16


def test_b162_sampling_fields_mean_the_same_on_both_routes() -> None:
    fields = {"temperature": 2, "seed": 5, "stop": ["x"], "max_tokens": 3}
    assert (
        resolve(CHAT, changed(CHAT, **fields)).specs
        == resolve(COMPLETION, changed(COMPLETION, **fields)).specs
    )


def conversation(*messages: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    prompt = resolve(CHAT, changed(CHAT, messages=list(messages))).prompts[0]
    assert isinstance(prompt, Chat)
    return prompt.messages


def test_b112_parts_reach_the_template_in_order_as_text() -> None:
    parts = [{"type": "text", "text": "Colour of "}, {"type": "text", "text": "the sky?"}]
    assert conversation({"role": "user", "content": parts}) == (("user", "Colour of \nthe sky?"),)


def test_b257_no_calls_are_as_good_as_absent() -> None:
    said = {"role": "assistant", "content": "ok"}
    assert conversation({**said, "tool_calls": []}) == conversation(said)


def test_b301_a_turn_that_only_calls_is_the_same_with_and_without_null() -> None:
    asked = {"role": "user", "content": "Root of 50?"}
    called = {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "7.07"}
    without = conversation(asked, called, result)
    assert without == conversation(asked, {**called, "content": None}, result)
    assert without == (("user", "Root of 50?"), ("tool", "7.07"))


def nested(opening: str, closing: str, depth: int, middle: str = "") -> str:
    return opening * depth + middle + closing * depth


@pytest.mark.parametrize(
    "fields",
    [
        '"tools":' + nested("[", "]", 3000),
        '"tools":[{"type":"function","function":{"name":"f","parameters":'
        + nested('{"a":', "}", 20_000, "1")
        + "}}]",
        '"x":' + nested("[", "]", 10_000),
        '"logit_bias":' + nested("[", "]", 10_000),
        '"guided_json":' + nested('{"type":"object","properties":{"a":', "}}", 5000, "{}"),
    ],
    ids=["B011", "B094", "B264", "B264 logit_bias", "B295"],
)
def test_deep_nesting_is_refused_at_once(fields: str) -> None:
    raw = ('{"model":"MODEL","messages":[{"role":"user","content":"hi"}],' + fields + "}").encode()
    began_at = time.process_time()
    with pytest.raises(DialectError, match="Nested too deeply") as caught:
        resolve_raw(CHAT, raw)
    assert caught.value.status == 400
    assert time.process_time() - began_at < 1.0


def test_b295_deep_nesting_inside_a_schema_text_is_refused() -> None:
    deep = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000
    with pytest.raises(DialectError, match="Nested too deeply"):
        resolve(CHAT, changed(CHAT, guided_json=deep))


@pytest.mark.parametrize(
    ("endpoint", "raw"),
    [
        (TOKENIZE, rb'{"model":"MODEL","prompt":"x\udbc1y"}'),
        (CHAT, rb'{"model":"MODEL","messages":[{"role":"user","content":"a\ud800b"}]}'),
        (CHAT, rb'{"model":"MODEL","messages":[{"role":"user","content":"a"}],"stop":"\udc00"}'),
    ],
    ids=["B230", "B240", "B240 stop"],
)
def test_half_a_surrogate_pair_is_refused(endpoint: str, raw: bytes) -> None:
    with pytest.raises(DialectError, match="JSON decode error"):
        resolve_raw(endpoint, raw)


def test_b240_a_whole_surrogate_pair_is_a_character() -> None:
    raw = json.dumps(changed(CHAT, **user("\U0001f600"))).encode()
    assert rb"\ud83d\ude00" in raw
    prompt = resolve_raw(CHAT, raw).prompts[0]
    assert isinstance(prompt, Chat) and prompt.messages == (("user", "\U0001f600"),)
