"""What vllm-0.5 requests start from: conversations and prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import Chat, Ids, Text
from gateway.dialects.vllm05 import messages, schema
from tests.fakes.vllm05 import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    TOKENIZE,
    changed,
    refusal,
    resolve,
)


def chat(**fields: Any) -> Chat:
    prompt = resolve(CHAT, changed(CHAT, **fields)).prompts[0]
    assert isinstance(prompt, Chat)
    return prompt


def prompts(value: Any, **fields: Any) -> list[Text | Ids | Chat]:
    return list(resolve(COMPLETION, changed(COMPLETION, prompt=value, **fields)).prompts)


def test_text_parts_are_joined_with_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == (("user", "a\nb"),)
    assert chat(messages=[{"role": "user", "content": []}]).messages == (("user", ""),)


def test_turns_without_content_are_left_out_and_only_role_and_content_stay() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    found = chat(
        messages=[
            {"role": "user", "content": "q", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
            {"role": "critic"},
            {"role": "assistant", "content": ""},
        ]
    )
    assert found.messages == (("user", "q"), ("tool", "42"), ("assistant", ""))


@pytest.mark.parametrize("endpoint", [CHAT, TOKENIZE])
def test_an_empty_conversation_is_refused(endpoint: str) -> None:
    error = refusal(endpoint, {"model": "MODEL", "messages": []})
    assert (error.field, error.message) == ("messages", "messages must not be empty")


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("parts", "told", "field"),
    [
        ([{"type": "video"}], "Unknown part type: video", "messages[1].content[0].type"),
        ([IMAGE, {"type": "x"}], "Unknown part type: x", "messages[1].content[1].type"),
        (
            [IMAGE, {"type": "audio_url"}],
            "Multiple multimodal inputs is currently not supported.",
            "messages[1].content",
        ),
        (
            [IMAGE],
            "Unknown model type: text (this model reads no images and no audio)",
            "messages[1].content",
        ),
        (
            [{"type": "text"}],
            "messages[1].content[0].text must be a string",
            "messages[1].content[0].text",
        ),
        (
            [{"type": "text", "text": 5}],
            "messages[1].content[0].text must be a string",
            "messages[1].content[0].text",
        ),
    ],
)
def test_parts_that_a_text_model_cannot_read(parts: Any, told: str, field: str) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "user", "content": parts}]
    error = refusal(CHAT, changed(CHAT, messages=turns))
    assert (error.status, error.message, error.field) == (400, told, field)


def test_tools_reach_the_template_whole() -> None:
    parameters = {"type": "object", "properties": {"b": {}, "a": {"default": 2**70}}}
    function = {"name": "f", "description": "é", "parameters": parameters}
    found = chat(tools=[{"function": function}, {"type": "function", "function": {"name": "g"}}])
    assert [json.loads(text) for text in found.tools_json] == [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "g", "description": None, "parameters": None}},
    ]
    assert list(json.loads(found.tools_json[0])) == ["type", "function"]


def test_documents_and_template_variables_are_json() -> None:
    found = chat(documents=[{"title": "t"}], chat_template_kwargs={"x": [1, None]})
    assert found.documents_json == ('{"title":"t"}',)
    assert found.template_kwargs_json == '{"x":[1,null]}'
    assert chat(chat_template_kwargs={}).template_kwargs_json is None


def test_the_requests_template_comes_before_the_servers() -> None:
    def template(text: str | None, default: str | None) -> str | None:
        raw = json.dumps(changed(CHAT, chat_template=text)).encode()
        return messages.conversation(schema.parse_chat(raw, None), default).chat_template

    assert template("mine", "servers") == "mine"
    assert template("", "servers") == "servers"
    assert template(None, "servers") == "servers"
    assert template(None, None) is None


def test_a_number_that_json_cannot_say_is_refused() -> None:
    raw = json.dumps(changed(CHAT, chat_template_kwargs={"x": 0})).replace("0", "1e400").encode()
    with pytest.raises(Exception, match="chat_template_kwargs contains a number"):
        messages.conversation(schema.parse_chat(raw, None))


def test_prompt_forms() -> None:
    assert prompts("a") == [Text("a")]
    assert prompts(["a", "b"]) == [Text("a"), Text("b")]
    assert prompts([1, 2, 3]) == [Ids((1, 2, 3))]
    assert prompts([[1, 2], [3]]) == [Ids((1, 2)), Ids((3,))]


def test_truncation_keeps_the_last_tokens() -> None:
    assert prompts([1, 2, 3], truncate_prompt_tokens=2) == [Ids((2, 3))]
    assert prompts([[1, 2], [3]], truncate_prompt_tokens=1) == [Ids((2,)), Ids((3,))]
    assert prompts("a b c", truncate_prompt_tokens=2) == [Text("a b c", truncate_to=2)]
    assert prompts("a", add_special_tokens=False) == [Text("a", add_special_tokens=False)]


@pytest.mark.parametrize("value", [[], [[]], [[], [1]]])
@pytest.mark.parametrize(("endpoint", "field"), [(COMPLETION, "prompt"), (EMBEDDING, "input")])
def test_no_prompt_at_all(endpoint: str, field: str, value: Any) -> None:
    error = refusal(endpoint, changed(endpoint, **{field: value}))
    assert error.message == "please provide at least one prompt"


@pytest.mark.parametrize(
    ("endpoint", "field", "value", "where"),
    [
        (COMPLETION, "prompt", [3, -1], "prompt"),
        (COMPLETION, "prompt", [[3], [4, -7]], "prompt[1]"),
        (EMBEDDING, "input", [-1], "input"),
        (DETOKENIZE, "tokens", [1, -1], "tokens"),
    ],
)
def test_negative_ids_are_a_400(endpoint: str, field: str, value: Any, where: str) -> None:
    error = refusal(endpoint, changed(endpoint, **{field: value}))
    assert (error.status, error.field) == (400, where)
    assert error.message.startswith(f"{where} contains the negative token id -")


def test_embedding_dimensions_are_refused() -> None:
    assert refusal(EMBEDDING, changed(EMBEDDING, dimensions=64)).message == (
        "dimensions is currently not supported"
    )
    assert resolve(EMBEDDING, changed(EMBEDDING, dimensions=None))
    unknown_model = refusal(EMBEDDING, {"model": "nope", "input": "x", "dimensions": 64})
    assert unknown_model.status == 404


def test_tokenize_forms() -> None:
    assert resolve(TOKENIZE, {"model": "MODEL", "prompt": ""}).prompts == [Text("")]
    turns = [{"role": "user", "content": "a"}]
    assert resolve(
        TOKENIZE, {"model": "MODEL", "messages": turns, "add_generation_prompt": False}
    ).prompts == [Chat((("user", "a"),), add_generation_prompt=False)]


def test_ids_that_no_token_can_have_vanish() -> None:
    assert resolve(DETOKENIZE, changed(DETOKENIZE, tokens=["7", 2**32, 8])).prompts == [Ids((7, 8))]
