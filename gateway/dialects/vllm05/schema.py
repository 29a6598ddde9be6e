"""From the bytes of a body to a typed request, or to a 400 that says everything that is wrong with it.

Knows the order: JSON, then the pre-validators on the raw object (the first failure hides the rest), then
types and unknown fields, all listed together. The message is the Python text of a list of errors, as the
original writes it. Knows nothing of models, vocabularies or contexts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from gateway.dialects.vllm05.errors import DialectError
from gateway.dialects.vllm05.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeRequest,
)

Entry = dict[str, Any]
Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)

MAX_ENTRIES = 64
"""Errors listed in one message."""
MAX_ECHO_CHARS = 16_384
"""Length of the rejected values in one message: each is echoed, and can be as large as the body."""


def parse_chat(raw: bytes, content_type: str | None) -> ChatRequest:
    """A chat request."""
    return _parse(raw, content_type, ChatRequest, _before_chat)


def parse_completion(raw: bytes, content_type: str | None) -> CompletionRequest:
    """A completion request."""
    return _parse(raw, content_type, CompletionRequest, _before_completion)


def parse_embedding(raw: bytes, content_type: str | None) -> EmbeddingRequest:
    """An embedding request."""
    return _parse(raw, content_type, EmbeddingRequest)


def parse_detokenize(raw: bytes, content_type: str | None) -> DetokenizeRequest:
    """A request for the text of token ids."""
    return _parse(raw, content_type, DetokenizeRequest)


def parse_tokenize(raw: bytes, content_type: str | None) -> TokenizeRequest:
    """A request for token ids, in either form. What fits neither is told the errors of both."""
    data = _json(raw, content_type)
    entries: list[Entry] = []
    for form in (TokenizeCompletionRequest, TokenizeChatRequest):
        if not isinstance(data, dict):
            entries.append(_not_an_object(data, form.__name__))
            continue
        try:
            return form.model_validate(data)
        except ValidationError as error:
            entries += _entries(error, form.__name__)
    raise _refusal(entries, data)


def parse_json_text(text: str) -> Any:
    """The value of a JSON text inside a request. Raises DialectError in the words of Python's json module."""
    return _loads(text.encode(), lambda message, _: DialectError(message))


def _parse(
    raw: bytes,
    content_type: str | None,
    model: type[Body],
    before: Callable[[Json], None] = lambda data: None,
) -> Body:
    data = _json(raw, content_type)
    if not isinstance(data, dict):
        raise _refusal([_not_an_object(data)])
    before(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal(_entries(error), data) from None


# --- JSON ---------------------------------------------------------------------------------------------


def _json(raw: bytes, content_type: str | None) -> Any:
    if not raw:
        raise _refusal([_missing_body()])
    if not _is_json_type(content_type):
        raise _refusal(
            [
                {
                    "type": "content_type",
                    "loc": ("header", "content-type"),
                    "msg": "Input should be application/json",
                    "input": content_type,
                }
            ]
        )

    def refuse(message: str, position: int) -> DialectError:
        entry = {
            "type": "json_invalid",
            "loc": ("body", position),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": message},
        }
        return _refusal([entry])

    data = _loads(raw, refuse)
    if data is None:
        raise _refusal([_missing_body()])
    return data


def _is_json_type(content_type: str | None) -> bool:
    if not content_type:
        return True
    kind = content_type.partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _loads(raw: bytes, refuse: Callable[[str, int], DialectError]) -> Any:
    """Parse strictly: no NaN, no lone surrogates, no deep nesting; the last of equal keys wins.

    The strict parser's messages are its own, so the place of an error is asked of Python's parser, which
    also knows the byte order marks and wider encodings that the strict one does not.
    """
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        strict = str(error)
    if strict.startswith("recursion limit"):
        raise refuse("Nested too deeply", 0)
    try:
        text = raw.decode(json.detect_encoding(raw))
        json.loads(text, parse_constant=_refuse_constant)
        return from_json(text, allow_inf_nan=False)
    except UnicodeDecodeError as error:
        raise refuse(f"Invalid {error.encoding} text", error.start) from None
    except json.JSONDecodeError as error:
        raise refuse(str(error), error.pos) from None
    except RecursionError:
        raise refuse("Nested too deeply", 0) from None
    except ValueError as error:
        # What only the strict parser refuses: NaN, half a surrogate pair, numbers of thousands of digits.
        raise refuse(str(error)[:1].upper() + str(error)[1:], 0) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# --- pre-validators -----------------------------------------------------------------------------------

_ONE_GUIDE = (
    "You can only use one kind of guided decoding "
    "('guided_json', 'guided_regex' or 'guided_choice')."
)
_GUIDE_OR_TOOL = "You can only either use guided decoding or tools, not both."


def _before_chat(data: Json) -> None:
    _check_tool_choice(data)
    _check_guided(data)
    _check_prompt_logprobs(data)
    top = _number(data, "top_logprobs")
    if top is not None:
        if top < 0:
            raise _value_error(data, "`top_logprobs` must be a positive value.", "top_logprobs")
        if not data.get("logprobs"):
            raise _value_error(
                data,
                "when using `top_logprobs`, `logprobs` must be set to true.",
                "top_logprobs",
            )
    _check_stream_options(data)


def _before_completion(data: Json) -> None:
    _check_stream_options(data)
    _check_prompt_logprobs(data)
    logprobs = _number(data, "logprobs")
    if logprobs is not None and logprobs < 0:
        raise _value_error(data, "`logprobs` must be a positive value.", "logprobs")
    _check_guided(data)


def _check_tool_choice(data: Json) -> None:
    choice = data.get("tool_choice")
    if choice is None or choice == "none":
        return
    if not isinstance(choice, dict):
        raise _value_error(data, "Currently only named tools are supported.", "tool_choice")
    if data.get("tools") is None:
        raise _value_error(data, "When using `tool_choice`, `tools` must be set.", "tools")


def _check_guided(data: Json) -> None:
    names = ("guided_json", "guided_regex", "guided_choice")
    given = [name for name in names if data.get(name) is not None]
    if len(given) > 1:
        raise _value_error(data, _ONE_GUIDE, given[1])
    is_guided = given or data.get("guided_grammar") is not None
    if is_guided and isinstance(data.get("tool_choice"), dict):
        raise _value_error(data, _GUIDE_OR_TOOL, "tool_choice")


def _check_prompt_logprobs(data: Json) -> None:
    wanted = _number(data, "prompt_logprobs")
    if wanted is None:
        return
    if data.get("stream") and wanted > 0:
        raise _value_error(
            data, "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"
        )
    if wanted < 0:
        raise _value_error(data, "`prompt_logprobs` must be a positive value.", "prompt_logprobs")


def _check_stream_options(data: Json) -> None:
    if data.get("stream_options") and not data.get("stream"):
        raise _value_error(
            data, "Stream options can only be defined when `stream=True`.", "stream_options"
        )


def _number(data: Json, name: str) -> float | None:
    """The number in a field that is compared before it is typed; here no text counts as one."""
    value = data.get(name)
    if value is None or isinstance(value, int | float):
        return value
    entry = {
        "type": "int_type",
        "loc": ("body", name),
        "msg": "Input should be a valid integer",
        "input": value,
    }
    raise _refusal([entry], data)


# --- the list of errors -------------------------------------------------------------------------------


def _value_error(data: Json, text: str, field: str) -> DialectError:
    entry = {
        "type": "value_error",
        "loc": ("body",),
        "msg": f"Value error, {text}",
        "input": data,
        "ctx": {"error": ValueError(text)},
    }
    error = _refusal([entry])
    error.field = field
    return error


def _missing_body() -> Entry:
    return {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}


def _not_an_object(data: Any, *form: str) -> Entry:
    return {
        "type": "model_attributes_type",
        "loc": ("body", *form),
        "msg": "Input should be a valid dictionary or object to extract fields from",
        "input": data,
    }


def _entries(error: ValidationError, *form: str) -> Iterable[Entry]:
    found: Sequence[Mapping[str, Any]] = error.errors(include_url=False)
    return [{**entry, "loc": ("body", *form, *entry["loc"])} for entry in found[:MAX_ENTRIES]]


def _refusal(entries: Iterable[Entry], data: Any = None) -> DialectError:
    listed = list(entries)
    shown = [{**entry, "input": _shown(entry["input"], len(listed))} for entry in listed]
    return DialectError(repr(shown), field=_field([entry["loc"] for entry in listed], data))


def _shown(value: Any, num_entries: int) -> Any:
    """A rejected value, or its beginning where it is large: the words matter, the echo does not."""
    room = MAX_ECHO_CHARS // num_entries

    def beginning(inner: Any) -> Any:
        nonlocal room
        room -= 4
        if isinstance(inner, str):
            whole, room = inner, room - len(inner)
            return whole if room >= 0 else whole[: max(room + len(whole), 0)] + "…"
        if isinstance(inner, dict):
            kept: dict[Any, Any] = {}
            for key, item in inner.items():
                if room <= 0:
                    return {**kept, "…": "…"}
                kept[beginning(key)] = beginning(item)
            return kept
        if isinstance(inner, list):
            items: list[Any] = []
            for item in inner:
                if room <= 0:
                    return [*items, "…"]
                items.append(beginning(item))
            return items
        return inner

    return beginning(value)


def _field(locs: Sequence[Sequence[str | int]], data: Any) -> str | None:
    """messages[0].content: the deepest place that the errors of the first field point at."""
    first = locs[0][1:2]
    paths = [_path(loc[1:], data) for loc in locs if loc[1:2] == first]
    text = ""
    for step in max(paths, key=len):
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text or None


def _path(loc: Sequence[str | int], data: Any) -> list[str | int]:
    """A location without the names of types, which it also holds."""
    path: list[str | int] = []
    for index, step in enumerate(loc):
        is_last = index == len(loc) - 1
        if isinstance(step, int):
            if not isinstance(data, list) or step >= len(data):
                break
            data = data[step]
        elif not isinstance(data, dict) or (step not in data and not is_last):
            continue  # the name of a type
        else:
            data = data.get(step)
        path.append(step)
    return path
