"""What request bodies are made of: messages and nested objects, with the declarations of their fields.

Unknown keys are errors everywhere except inside content parts, tool calls and free objects.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from gateway.dialects.fields import Rule

MAX_KEYS = 256
"""Keys of an object whose fields are declared; there are far fewer of those."""
MAX_MAP_KEYS = 300_000
"""Keys of a free map; one for every token of a large vocabulary fits."""
MAX_MESSAGES = 16_384
"""Turns of a conversation; checking a million of them would hold up everybody else for seconds."""
MAX_IDS = 1_000_000
"""Elements of a list of token ids."""
MAX_KWARGS = 10_000
"""Variables of a template."""
MAX_PROMPTS = 65_536
"""Elements of a list of prompts."""


def few_keys(value: Any) -> Any:
    """Refuse a crowd of unknown fields before each of them becomes an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise PydanticCustomError(
            "too_many_fields",
            "Extra inputs are not permitted, certainly not {count} fields",
            {"count": len(value)},
        )
    return value


Crowd = BeforeValidator(few_keys)


def at_most(limit: int, what: str) -> BeforeValidator:
    """Refuse a list or object of more than `limit` elements before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise PydanticCustomError(
                "too_long",
                "{what} should have at most {limit} elements, not {count}",
                {"what": what, "limit": limit, "count": len(value)},
            )
        return value

    return BeforeValidator(check)


def _few_prompts(value: Any) -> Any:
    is_long = isinstance(value, list) and len(value) > MAX_PROMPTS
    if is_long and isinstance(value[0], int) and len(value) > MAX_IDS:
        raise PydanticCustomError(
            "too_long",
            "List should have at most {limit} token ids, not {count}",
            {"limit": MAX_IDS, "count": len(value)},
        )
    if is_long and not isinstance(value[0], int):
        raise PydanticCustomError(
            "too_many_prompts",
            "List should have at most {limit} prompts, not {count}",
            {"limit": MAX_PROMPTS, "count": len(value)},
        )
    return value


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        if len(value) > MAX_MAP_KEYS:
            raise PydanticCustomError(
                "too_many_keys",
                "Dictionary should have at most {limit} keys, not {count}",
                {"limit": MAX_MAP_KEYS, "count": len(value)},
            )
        if not all(isinstance(bias, int | float) for bias in value.values()):
            raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


# One bad element is enough to know: a list of a million wrong ones must not become a million errors.
IdList = Annotated[list[int], Field(fail_fast=True)]
TextList = Annotated[list[str], Field(fail_fast=True)]
IdLists = Annotated[list[IdList], Field(fail_fast=True)]
PromptValue = Annotated[str | IdList | TextList | IdLists, BeforeValidator(_few_prompts)]
Biases = Annotated[dict[str, float], BeforeValidator(_few_biases)]
Document = Annotated[dict[str, str], Crowd]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
Seed = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
AtLeastOne = Annotated[int, Field(ge=1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, value: Any) -> Any:
        return few_keys(value)


# --- messages -----------------------------------------------------------------------------------------


class Part(TypedDict):
    """A piece of content. What further keys mean is decided when the conversation is made."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: str


Content = str | Annotated[list[Annotated[Part, Crowd]], Field(fail_fast=True)]


class Message(TypedDict):
    """A turn of any role."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: str
    content: NotRequired[Content]
    name: NotRequired[str | None]


class FunctionCall(TypedDict):
    """The function of a call made earlier."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call made earlier."""

    id: str
    type: Literal["function"]
    function: Annotated[FunctionCall, Crowd]


class AssistantMessage(TypedDict):
    """An earlier answer."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: Literal["assistant"]
    content: NotRequired[Content | None]
    name: NotRequired[str | None]
    refusal: NotRequired[str | None]
    function_call: NotRequired[Annotated[FunctionCall, Crowd] | None]
    tool_calls: NotRequired[
        Annotated[list[Annotated[ToolCall, Crowd]], Field(fail_fast=True)] | None
    ]


class ToolMessage(TypedDict):
    """What a tool returned."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: Literal["tool"]
    content: Content
    tool_call_id: str


class FunctionMessage(TypedDict):
    """What a function returned, in the older spelling."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: Literal["function"]
    content: Content | None
    name: str


def _shape(message: Any) -> str:
    """The shape that a message is held against.

    Every role may use the common shape, so a special shape is chosen only where it allows more.
    """
    if isinstance(message, dict):
        role = message.get("role")
        if role == "assistant":
            return "assistant"
        if role == "tool" and "tool_call_id" in message:
            return "tool"
        if role == "function" and "content" in message and message["content"] is None:
            return "function"
    return "message"


AnyMessage = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[FunctionMessage, Tag("function")],
    Discriminator(_shape),
    Crowd,
]
MessageList = Annotated[
    list[AnyMessage], Field(fail_fast=True), at_most(MAX_MESSAGES, "A conversation")
]


# --- nested objects -----------------------------------------------------------------------------------


class StreamOptions(Body):
    """What a stream says about usage."""

    include_usage: Annotated[
        bool | None,
        Rule(
            "Adds a last chunk with the usage of the whole request.",
            ("chat-stream-include-usage-true", "chat-stream-include-usage-false"),
        ),
    ] = True
    continuous_usage_stats: Annotated[
        bool | None,
        Rule(
            "Puts the numbers so far into every chunk; without effect when include_usage is off.",
            ("chat-stream-usage-final-only", "comp-stream-empty-options"),
        ),
    ] = True


class ResponseFormat(Body):
    """The form of the answer."""

    type: Annotated[
        Literal["text", "json_object"],
        Rule(
            "With json_object the answer is a JSON object or array, with text anything.",
            ("rf-json-object-start", "rf-json-schema", "rf-unknown"),
        ),
    ]


class FunctionDefinition(Body):
    """A function that the model may be told of."""

    name: Annotated[
        str,
        Rule("Name of the function; tool_choice refers to it.", ("tool-named-empty-tools",)),
    ]
    description: Annotated[
        str | None,
        Rule("Handed to the chat template.", ("test_tools_reach_the_template_whole",)),
    ] = None
    parameters: Annotated[
        dict[str, Any] | None,
        Rule(
            "JSON schema of the arguments: handed to the chat template, and enforced when this tool is"
            " the named one. Absent or {} enforces nothing.",
            ("test_named_tool_enforces_its_parameters", "test_tools_reach_the_template_whole"),
        ),
    ] = None


class Tool(Body):
    """A tool that the model may be told of."""

    type: Annotated[
        Literal["function"],
        Rule("Only functions exist.", ("test_only_functions_are_tools",)),
    ] = "function"
    function: Annotated[
        FunctionDefinition,
        Rule(
            "The function; further keys such as strict are refused.", ("extra-nested-tool-strict",)
        ),
    ]


class NamedFunction(Body):
    """The function that must be called."""

    name: Annotated[
        str,
        Rule("Name of one of the tools.", ("tool-named-empty-tools", "tool-named-stream")),
    ]


class NamedToolChoice(Body):
    """The tool that must be called."""

    function: Annotated[
        NamedFunction,
        Rule("The function that the answer is a call of.", ("tool-named-stream",)),
    ]
    type: Annotated[
        Literal["function"],
        Rule("Only functions exist.", ("test_only_functions_are_tools",)),
    ] = "function"
