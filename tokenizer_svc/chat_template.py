"""Messages → prompt text, by a Jinja template as Hugging Face models carry it.

Knows the names and filters such templates rely on, and turns whatever a template does wrong into a refusal
that carries the template's own words and none of its source. Renders what it is given: which messages a
dialect drops was decided before. It bounds what comes out; time and memory of a template that a stranger
sent are bounded by `template_pool`, which runs it in a process of its own.

Message texts go into the prompt as they are; that one which spells a control token does not write that token
is the business of `markers`.
"""

from __future__ import annotations

import datetime
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from candor.errors import InvalidArgument

NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat "
    "template if the tokenizer does not define one."
)
_MAX_MESSAGE_CHARACTERS = 2000
_FIXED_NAMES = {"conversation", "chat_template", "tokenize"} | {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
}
"""What the caller of a template passes itself, under the names of Hugging Face's function."""


@dataclass(frozen=True)
class TemplateLimits:
    """How large templates and their results may be."""

    max_template_characters: int = 100_000
    max_rendered_characters: int = 4_000_000


@dataclass(frozen=True)
class Conversation:
    """Everything a template may look at."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further template variables."""

    def check(self) -> None:
        """Raises InvalidArgument for what no template can make good."""
        if not self.messages:
            raise InvalidArgument(
                "messages must not be empty: a chat prompt is made from at least one message",
                reason="TEMPLATE_FAILED",
                field="messages",
            )
        for name in self.kwargs:
            if name in _FIXED_NAMES:
                raise InvalidArgument(
                    f"apply_chat_template() got multiple values for keyword argument '{name}'",
                    reason="TEMPLATE_FAILED",
                    field="chat_template_kwargs",
                )


class ChatTemplate:
    """One compiled template."""

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`special_tokens`: bos_token, eos_token ... → text. Raises InvalidArgument (field chat_template)."""
        self._limits = limits or TemplateLimits()
        if len(text) > self._limits.max_template_characters:
            raise InvalidArgument(
                f"the chat template has {len(text)} characters; at most "
                f"{self._limits.max_template_characters} are allowed",
                reason="TEMPLATE_FAILED",
                field="chat_template",
            )
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(now).from_string(text)
        except Exception as error:
            raise _refusal(error, "chat_template") from error

    def render(self, conversation: Conversation) -> str:
        """The prompt text. Raises InvalidArgument with the template's own words."""
        conversation.check()
        variables = self._special_tokens | {
            **conversation.kwargs,
            "messages": conversation.messages,
            "tools": conversation.tools or None,
            "documents": conversation.documents or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        parts, size, limit = [], 0, self._limits.max_rendered_characters
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > limit:
                    break
        except Exception as error:
            raise _refusal(error, "messages") from error
        if size > limit:
            raise InvalidArgument(
                f"the chat template rendered more than {limit} characters",
                reason="TEMPLATE_FAILED",
                field="messages",
            )
        return "".join(parts)


class TemplateCache:
    """The most recently used compiled templates, at most `capacity` of them."""

    def __init__(self, capacity: int, limits: TemplateLimits) -> None:
        self._capacity, self._limits = capacity, limits
        self._compiled: OrderedDict[tuple[str, tuple[tuple[str, str], ...]], ChatTemplate]
        self._compiled = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, text: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """The template, compiled now or earlier. Raises InvalidArgument when it cannot be."""
        key = (text, tuple(sorted(special_tokens.items())))
        template = self._compiled.pop(key, None) or ChatTemplate(text, special_tokens, self._limits)
        self._compiled[key] = template
        if len(self._compiled) > self._capacity:
            self._compiled.popitem(last=False)
        return template


def _refusal(error: Exception, at: str) -> InvalidArgument:
    # A syntax error's str() shows template lines; its message does not.
    message = error.message if isinstance(error, jinja2.TemplateError) else str(error)
    if isinstance(error, MemoryError):
        message = "the chat template needs more memory than it may have"
    text = (message or type(error).__name__)[:_MAX_MESSAGE_CHARACTERS]
    return InvalidArgument(text, reason="TEMPLATE_FAILED", field=at)


# --- what Hugging Face templates rely on -------------------------------------------------------------


def _environment(now: Callable[[], datetime.datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
    )
    # Jinja's own tojson escapes for HTML, which a model would then read.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
