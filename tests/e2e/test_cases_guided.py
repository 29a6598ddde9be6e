"""Known faults of other servers with guided decoding and tools, against the real model.

Each test is named after the cases it holds off.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import pytest

from tests.fakes.agreement import of_body, of_stream
from tests.fakes.door import Door
from tests.fakes.fuzz import CHAT

RECIPE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(content: str) -> list[dict[str, str]]:
    """One turn."""
    return [{"role": "user", "content": content}]


def longest_space(text: str) -> int:
    """Characters of the longest run of white space outside of strings."""
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    return max(map(len, re.findall(r"\s+", outside)), default=0)


def test_b069_a_schema_is_followed_to_its_end_without_endless_space(door: Door) -> None:
    named = {"name": "r", "strict": True, "schema": RECIPE}
    wrapped = {"type": "json_schema", "json_schema": named}
    messages = ask("Return a recipe as JSON.")
    assert "'text' or 'json_object'" in door.refused(
        CHAT, messages=messages, response_format=wrapped
    )
    fields = {"temperature": 0, "max_tokens": 300}
    told = door.chat("Return a recipe as JSON.", guided_json=RECIPE, **fields)
    assert told.finish_reason == "stop"
    jsonschema.validate(json.loads(told.text), RECIPE)
    assert longest_space(told.text) <= 20


def test_b189_json_object_is_an_object_or_says_that_it_was_cut(door: Door) -> None:
    fields = {"temperature": 0, "max_tokens": 200, "response_format": {"type": "json_object"}}
    told = door.chat("Give JSON.", **fields)
    assert longest_space(told.text) <= 20
    if told.finish_reason == "stop":
        assert isinstance(json.loads(told.text), dict | list)
    else:
        assert told.finish_reason == "length"
    assert told == door.stream_chat("Give JSON.", **fields)


def test_b111_the_answer_is_one_of_the_choices(door: Door) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    told = door.chat("Mood of: I love it", guided_choice=["happy", "sad"], **fields)
    assert told.text in ("happy", "sad") and told.finish_reason == "stop"
    other = {"structured_outputs": {"choice": ["happy", "sad"]}}
    message = door.refused(CHAT, messages=ask("Mood of: I love it"), **fields, **other)
    assert "structured_outputs" in message and "Extra inputs are not permitted" in message


def test_b115_choices_are_texts_and_not_patterns(door: Door) -> None:
    special = ["a.b(c)", "a|b", "[x]*", "$5"]
    for choice in special:
        told = door.chat("Pick.", guided_choice=[choice], max_tokens=20)
        assert (told.text, told.finish_reason) == (choice, "stop")
    assert door.chat("Pick.", guided_choice=special, temperature=0).text in special
    prefixes, found = ["No", "No I do not", "None"], set()
    for seed in range(25):
        fields = {"temperature": 2, "seed": seed, "max_tokens": 20, "guided_choice": prefixes}
        found.add(door.chat("Pick.", **fields).text)
    assert found == set(prefixes)
    assert "guided_choice" in door.refused(CHAT, messages=ask("Pick."), guided_choice=[])
    two = {"guided_choice": ["a"], "guided_regex": "b"}
    assert "only use one kind" in door.refused(CHAT, messages=ask("Pick."), **two)


def test_b276_a_pattern_that_may_go_on_is_not_cut_at_its_first_match(door: Door) -> None:
    pattern = "Once upon a time.*"
    told = door.chat("Tell a story.", temperature=0, max_tokens=40, guided_regex=pattern)
    assert re.fullmatch(pattern, told.text) and len(told.text) > len("Once upon a time") + 20


def test_b290_choices_do_not_share_a_guide_or_a_seed(door: Door) -> None:
    fields = {
        **{"messages": ask("Give a JSON with a random name."), "n": 4, "temperature": 1},
        **{"seed": 11, "max_tokens": 60, "response_format": {"type": "json_object"}},
    }
    first, again = door.body(CHAT, **fields), door.body(CHAT, **fields)
    assert first["choices"] == again["choices"]
    texts = [c["message"]["content"] for c in first["choices"]]
    assert len(set(texts)) > 1
    for choice, text in zip(first["choices"], texts, strict=True):
        if choice["finish_reason"] == "stop":
            json.loads(text)
    assert first["usage"]["prompt_tokens"] == len(door.tokens(fields["messages"]))  # type: ignore[arg-type]


# --- tools --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_b006_b160_b293_choices_that_are_not_offered_are_refused(door: Door, choice: str) -> None:
    for stream in (False, True):
        message = door.refused(
            CHAT, messages=ask("Hello"), tools=[WEATHER], tool_choice=choice, stream=stream
        )
        assert "Currently only named tools are supported." in message


def test_b013_b128_b181_what_looks_like_a_call_is_ordinary_text(door: Door) -> None:
    """This dialect parses nothing, so markup comes as it was written, whatever tokens it came in."""
    markup = '<tool_call>{"arguments": {"a": 3, "b": 4}, "name": "plus"}</tool_call>'
    fields = {"guided_choice": [markup], "tools": [WEATHER], "temperature": 0, "max_tokens": 80}
    told = door.stream_chat("3+4 with the tool", **fields)
    assert (told.text, told.tool, told.finish_reason) == (markup, (), "stop")
    assert told == door.chat("3+4 with the tool", **fields)


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think>b<think>c</think>d",
        "<think>the tag `</think>` is text</think>ok",
        "hmm</think>",
    ],
)
def test_b035_b070_b184_b262_reasoning_is_ordinary_text(door: Door, text: str) -> None:
    """This dialect has no field for reasoning, so tags and all are content, streamed or not."""
    fields = {"guided_choice": [text], "temperature": 0, "max_tokens": 80}
    told = door.stream_chat("Think.", **fields)
    assert told.text == text and told == door.chat("Think.", **fields)


def test_b015_parallel_tool_calls_is_refused_by_name(door: Door) -> None:
    fields = {"tools": [WEATHER], "tool_choice": NAMED, "parallel_tool_calls": False}
    assert "parallel_tool_calls" in door.refused(CHAT, messages=ask("Weather?"), **fields)


def test_b032_b160_b219_b293_a_named_call_is_whole_and_the_same_both_ways(door: Door) -> None:
    fields = {"tools": [WEATHER], "tool_choice": NAMED, "temperature": 0, "max_tokens": 60}
    messages = ask("Weather in Rome, in c?")
    body = door.body(CHAT, messages=messages, **fields)
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert call["id"].startswith("chatcmpl-tool-") and call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
    # of_stream has checked that id, type and name come once and the parts of one call together.
    streamed = of_stream(door.events(CHAT, messages=messages, **fields))
    assert streamed.choices == of_body(body).choices
    assert body["choices"][0]["finish_reason"] == "stop"  # as this dialect has it for named tools


def test_b103_b202_long_arguments_end_and_nothing_of_a_cut_call_is_lost(door: Door) -> None:
    parameters = {
        **{"type": "object", "required": ["text"]},
        "properties": {"text": {"type": "string", "minLength": 4000}},
    }
    tool = {"type": "function", "function": {"name": "write_file", "parameters": parameters}}
    fields = {
        **{
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "write_file"}},
        },
        **{"temperature": 0.9, "seed": 4, "max_tokens": 120},
    }
    told = door.stream_chat("Call write_file with 3000 lines.", **fields)
    assert told.finish_reason == "length" and len(told.arguments) > 100 and told.text == ""
    assert told == door.chat("Call write_file with 3000 lines.", **fields)


def test_b036_earlier_calls_and_their_results_are_legal_turns(door: Door) -> None:
    """Only roles and contents reach the template in this dialect, so the call is left out, its result not."""
    call = {"id": "c1", "type": "function"}
    function = {"name": "get_weather", "arguments": '{"city":"Lima"}'}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather in Lima?"},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
    ]
    body = door.body(CHAT, messages=turns, tools=[WEATHER], max_tokens=8)
    prompt = door.text(door.tokens(turns))
    assert "18 C" in prompt and "Weather in Lima?" in prompt
    assert body["usage"]["prompt_tokens"] == len(door.tokens([turns[0], turns[2]]))


def test_b295_the_deepest_legal_schema_is_judged_at_once(door: Door) -> None:
    for depth in (60, 90):
        schema: dict[str, Any] = {}
        for _ in range(depth):
            schema = {"type": "object", "properties": {"a": schema}}
        began_at = time.monotonic()
        reply = door.send(CHAT, {"messages": ask("x"), "guided_json": schema, "max_tokens": 2})
        assert reply.status_code in (200, 400) and time.monotonic() - began_at < 10
        assert reply.status_code == 200 or "cannot be read" in reply.json()["message"]
