"""Chat templates: what they can use, how they fail, and what they cannot do."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from candor.errors import InvalidArgument
from tokenizer_svc.chat_template import ChatTemplate, Conversation, TemplateCache, TemplateLimits

HI = [{"role": "user", "content": "hi"}]


def render(
    text: str,
    messages: list[dict[str, Any]] | None = None,
    limits: TemplateLimits | None = None,
    **more: Any,
) -> str:
    template = ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}, limits)
    return template.render(Conversation(HI if messages is None else messages, **more))


def refusal(
    text: str, messages: list[dict[str, Any]] | None = None, **more: Any
) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        render(text, messages, **more)
    assert caught.value.reason == "TEMPLATE_FAILED"
    assert caught.value.http_status == 400
    return caught.value


# --- what templates rely on --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages[0].role }}", "user"),
        ("{{ pad_token }}", ""),
        ("{% if tools is none %}none{% endif %}", "none"),
        ("{% if documents %}some{% else %}none{% endif %}", "none"),
        ("{% if add_generation_prompt %}open{% endif %}", "open"),
        ("{{ {'b': 'é<&>', 'a': [1, none]} | tojson }}", '{"b": "é<&>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% generation %}said {{ bos_token }}{% endgeneration %}.", "said <s>."),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}"
         "{% endif %}{{ i }}{% endfor %}", "02"),
        # Blocks leave no line of their own.
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}"
         "{%- endfor -%}{{ ns.n }}", "1"),
        ("{{ messages[0].content.strip().upper() | trim }}", "HI"),
        ("{{ '<b>' }}", "<b>"),
    ],
)  # fmt: skip
def test_templates_find_what_hugging_face_gives_them(template: str, expected: str) -> None:
    assert render(template) == expected


def test_the_clock_is_the_one_given() -> None:
    noon = datetime.datetime(2024, 8, 14, 12)
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", {}, now=lambda: noon)
    assert template.render(Conversation(HI)) == "14 August 2024"


def test_messages_are_rendered_as_given() -> None:
    template = "{% for m in messages %}{{ m.keys() | list | join(',') }};{% endfor %}"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
    ]
    assert render(template, messages) == "role,content;role,tool_calls;role,content,tool_call_id;"


def test_tools_documents_and_the_generation_prompt_arrive() -> None:
    template = "{{ tools[0].function.name }} {{ documents[0].title }} {{ add_generation_prompt }}"
    text = render(
        template,
        tools=[{"type": "function", "function": {"name": "get_time"}}],
        documents=[{"title": "Doc"}],
        add_generation_prompt=False,
    )
    assert text == "get_time Doc False"


def test_kwargs_are_variables_and_may_replace_special_tokens() -> None:
    assert render("{{ foo }}{{ bos_token }}", kwargs={"foo": "hello", "bos_token": "!"}) == "hello!"


def test_several_system_messages_stay_in_order() -> None:
    roles = ["system", "system", "user", "system", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, "ABCDE", strict=True)]
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", messages) == "ABCDE"


# --- how they fail -----------------------------------------------------------------------------------


def test_a_template_that_objects_is_quoted() -> None:
    error = refusal("{{ raise_exception('boom') }}")
    assert (error.message, error.field) == ("boom", "messages")


def test_the_message_names_the_role_the_template_dislikes() -> None:
    template = "{{ raise_exception('Unknown role ' ~ messages[0].role) }}"
    assert (
        refusal(template, [{"role": "tool_use", "content": "x"}]).message == "Unknown role tool_use"
    )


def test_roles_that_do_not_alternate_are_refused_in_the_template_s_words() -> None:
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert refusal(template, twice).message == "Conversation roles must alternate"
    assert render(template) == "hi"


def test_a_syntax_error_is_the_fault_of_the_template_and_shows_no_source() -> None:
    error = refusal("secret line\n{% if %}")
    assert error.field == "chat_template"
    assert error.message == "Expected an expression, got 'end of statement block'"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ '<' + messages[1].content }}", "list object has no element 1"),
        ("{{ 'x' + messages[0].thinking }}", "has no attribute 'thinking'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ messages | nofilter }}", "No filter named 'nofilter'"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_any_other_failure_is_a_refusal_too(template: str, words: str) -> None:
    assert words in refusal(template).message


def test_no_messages_are_refused_by_name() -> None:
    error = refusal("static text", messages=[])
    assert error.field == "messages" and error.message.startswith("messages must not be empty")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "tokenize"]
)
def test_a_kwarg_that_repeats_a_fixed_name_is_refused(name: str) -> None:
    error = refusal("x", kwargs={name: False})
    assert error.message.endswith(f"got multiple values for keyword argument '{name}'")
    assert error.field == "chat_template_kwargs"


# --- what they cannot do -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range(1000000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    refusal(template)
    assert HI == [{"role": "user", "content": "hi"}]


def test_sizes_are_bounded() -> None:
    limits = TemplateLimits(max_template_characters=100, max_rendered_characters=50)
    error = refusal("x" * 101, limits=limits)
    assert error.field == "chat_template" and "101 characters; at most 100" in error.message
    assert render("{% for i in range(50) %}x{% endfor %}", limits=limits) == "x" * 50
    error = refusal("{% for i in range(51) %}x{% endfor %}", limits=limits)
    assert "more than 50 characters" in error.message
    assert len(refusal("{{ raise_exception('x' * 9999) }}").message) == 2000


def test_the_cache_keeps_the_latest_templates_only() -> None:
    cache = TemplateCache(2, TemplateLimits())
    one = cache.get("1", {})
    assert cache.get("1", {}) is one
    assert cache.get("1", {"bos_token": "x"}) is not one  # same text, other tokens
    cache.get("1", {})
    cache.get("2", {})
    assert len(cache) == 2
    assert cache.get("1", {}) is one
    cache.get("3", {})
    cache.get("4", {})
    assert cache.get("1", {}) is not one
    with pytest.raises(InvalidArgument):
        cache.get("{% if %}", {})
    assert len(cache) == 2
