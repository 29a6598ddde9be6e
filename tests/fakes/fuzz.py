"""Bodies that are almost right: valid requests of the dialect, changed in one to three places.

Knows the endpoints and what a valid body looks like; the changes know nothing of either. The same seed gives
the same bytes on every machine. Knows nothing of servers or answers.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EMBEDDING, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
WEIGHTS = {CHAT: 45, COMPLETION: 35, TOKENIZE: 8, DETOKENIZE: 6, EMBEDDING: 6}


@dataclass(frozen=True)
class Shot:
    """One request."""

    number: int
    path: str
    raw: bytes
    content_type: str | None = "application/json"


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "yes" | "no" WORD\nWORD: /[a-z]{1,5}/\n'

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 6},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "seed": 5, "max_tokens": 5},
    {"n": 2, "best_of": 3, "temperature": 1.0, "max_tokens": 4},
    {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2},
    {"stop": ["the", "a b"], "include_stop_str_in_output": True, "max_tokens": 8},
    {"stop_token_ids": [5, 6], "ignore_eos": True, "min_tokens": 2, "max_tokens": 6},
    {"use_beam_search": True, "best_of": 2, "temperature": 0, "max_tokens": 4},
    {"logit_bias": {"100": 5, "200": -100}, "max_tokens": 4},
    {"prompt_logprobs": 2, "max_tokens": 2},
    {"truncate_prompt_tokens": 3, "max_tokens": 3},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False, "max_tokens": 3},
    {"length_penalty": 1.0, "early_stopping": False, "user": "someone", "max_tokens": 3},
    {"response_format": {"type": "json_object"}, "max_tokens": 8},
    {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?", "max_tokens": 8},
    {"guided_regex": "[a-c]{2,4}x?", "max_tokens": 8},
    {"guided_choice": ["yes", "no", "a.b(c)"], "guided_decoding_backend": "outlines"},
    {"guided_grammar": GRAMMAR, "max_tokens": 8},
    {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 6},
    {"stream": True, "stream_options": {"continuous_usage_stats": False}, "n": 2, "max_tokens": 4},
)
HELLO = [{"role": "user", "content": "Say hello."}]
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": HELLO},
    {"messages": [{"role": "system", "content": "Be brief."}, *HELLO], "logprobs": True},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "logprobs": True,
        "top_logprobs": 3,
    },
    {"messages": HELLO, "tools": [TOOL]},
    {
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ]
    },
    {"messages": [*HELLO, {"role": "assistant", "content": "Well,"}], "echo": True},
    {"messages": HELLO, "add_generation_prompt": False, "add_special_tokens": True},
    {
        "messages": HELLO,
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ x }}{% endfor %}",
        "chat_template_kwargs": {"x": "!"},
        "documents": [{"title": "t", "text": "u"}],
    },
)
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time"},
    {"prompt": ["One", "two three"], "logprobs": 2},
    {"prompt": [504, 1132, 2305], "echo": True, "logprobs": 1},
    {"prompt": [[504, 1132], [338]], "allowed_token_ids": [504, 1132, 2305]},
    {"prompt": "Echo me", "echo": True, "max_tokens": 0},
    {"prompt": "Plain", "add_special_tokens": False, "suffix": None, "logprobs": 0},
)
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    EMBEDDING: (
        {"input": "hello", "encoding_format": "base64"},
        {"input": ["a", "b"], "encoding_format": "float", "user": "u", "dimensions": None},
        {"input": [[5, 6], [7]], "additional_data": {"a": 1}},
    ),
    TOKENIZE: (
        {"prompt": "hello world", "add_special_tokens": False},
        {"messages": HELLO, "add_generation_prompt": False, "add_special_tokens": True},
    ),
    DETOKENIZE: ({"tokens": [504, 1132, 2305, 5050]}, {"tokens": []}),
}

LEGAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, None, 1e-12, 0.004, 0.7, 2, 1e308),
    "top_p": (1, None, 1e-9, 0.3, 0.999),
    "top_k": (-1, 1, 2, 50, 10**9),
    "min_p": (0, 0.5, 1),
    "n": (1, 2, 5, 128),
    "best_of": (None, 5, 8),
    "seed": (None, -1, 0, 2**63 - 1, -(2**63)),
    "max_tokens": (1, 2, 30, 200, None),
    "min_tokens": (0, 1, 2),
    "frequency_penalty": (-2, 2, 0.1, None),
    "presence_penalty": (-2, 2, None),
    "repetition_penalty": (1e-300, 0.001, 1, 2),
    "logit_bias": (
        {},
        None,
        {"0": 100},
        {"5": 1e308, "6": -1e308},
        {str(i): -100 for i in range(999)},
    ),
    "stop": ([], None, "e", [" "], ["the", "th", "t"], ["zzz" * 40], ["."] * 300, ["\0", "😀"]),
    "stop_token_ids": ([], None, [0, 1, 2], [10**9, -5], list(range(0, 40000, 7))),
    "stream": (True, False),
    "echo": (True, False),
    "ignore_eos": (True, False),
    "include_stop_str_in_output": (True, False),
    "skip_special_tokens": (True, False),
    "guided_regex": (None, ".*", "(ab)*", "a|", "[^a]{3}", "\\d+(\\.\\d+)?", "漢?b", "(a{99}){9}"),
    "guided_choice": (None, ["a"], ["a", "ab", "abc"], [""], ["漢字", "👩‍🚀"], ["x" * 999]),
    "guided_json": (None, {}, "{}", {"type": "string"}, {"enum": [1, "a", None]}, SCHEMA),
    "guided_grammar": (None, GRAMMAR, 'start: "a"*', "start: start", 'start: ("a"|"b")+ "c"'),
    "response_format": (None, {"type": "text"}, {"type": "json_object"}),
    "truncate_prompt_tokens": (None, 1, 2, 10**6),
    "use_beam_search": (False, True),
}
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 20, 21, 64, 255, 1024, 49151, 49152, 65536, 0.5, -0.5, 1.5, 2.0, 1e-12),
    *(-0.0, 1e308, -1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**40),
)
TEXTS: tuple[str, ...] = (
    *("", " ", "a", "\0", "\n", "null", "none", "auto", "1", "-1", "1e3", "NaN", "true", "[", "{}"),
    *("é", "e\u0301", "漢字", "👩‍🚀🌍", "\u202eabc", "\ufeff", "\ufffd", "\U0010ffff", "\u2028"),
    *("<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "%s%n{0}${x}", "{{ 7*7 }}", "{% x"),
    *("(a+)+b", "(?=x)", "a{1000000}", "[", "\\", "start:", "start: start", "%import common.WORD"),
    *("json_object", "text", "function", "float", "base64", "user", "assistant", "tool", "../etc"),
    "{% for i in range(99999999) %}x{% endfor %}",
    "lm-format-enforcer",
)
NAMES: tuple[str, ...] = (
    *("max_completion_tokens", "store", "metadata", "functions", "parallel_tool_calls", "prompt"),
    *("messages", "input", "tokens", "stream", "n", "best_of", "logprobs", "top_logprobs", "echo"),
    *("temperature", "max_tokens", "stop", "seed", "model", "guided_json", "guided_regex", "tools"),
    *("guided_choice", "tool_choice", "prompt_logprobs", "stream_options", "__proto__", "", "a.b"),
    *("min_tokens", "logit_bias", "best_of", "suffix", "$ref", "properties", "anyOf", "pattern"),
)
CONTENT_TYPES: tuple[str | None, ...] = (
    *(None, "application/json; charset=utf-8", "APPLICATION/JSON", "text/plain", "application/xml"),
    *("application/vnd.api+json", "multipart/form-data; boundary=x", "application/json;;;", "json"),
)


@dataclass(frozen=True)
class Names:
    """Served models."""

    generates: str
    embeds: str

    def at(self, path: str) -> str:
        """The one that serves a path."""
        return self.embeds if path == EMBEDDING else self.generates


def shots(count: int, seed: int, models: Names) -> Iterator[Shot]:
    """So many requests; the n-th is the same however many are asked for."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        path = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        body = _valid(rng, path, models.at(path))
        for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
            body = rng.choice(_CHANGES)(rng, body)
        raw = _encode(body)
        kind: str | None = "application/json"
        if rng.random() < 0.12:
            raw = rng.choice(_DAMAGES)(rng, raw)
        if rng.random() < 0.03:
            kind = rng.choice(CONTENT_TYPES)
        yield Shot(number, path, raw, kind)


def valid(count: int, seed: int, models: Names) -> Iterator[Shot]:
    """What the changes start from, unchanged."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        path = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        yield Shot(number, path, _encode(_valid(rng, path, models.at(path))))


def _valid(rng: random.Random, path: str, model: str) -> dict[str, Any]:
    if path in OTHERS:
        return {"model": model, **copy.deepcopy(rng.choice(OTHERS[path]))}
    base = copy.deepcopy(rng.choice(CHATS if path == CHAT else COMPLETIONS))
    extra = copy.deepcopy(rng.choice(SAMPLING))
    body = {"model": model, "max_tokens": 5, **extra, **base}
    if body.get("guided_json") or body.get("guided_regex") or body.get("guided_choice"):
        body.pop("tool_choice", None)
    if "guided_grammar" in body or "use_beam_search" in body:
        body.pop("tool_choice", None)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    if not body["max_tokens"]:
        body.pop("min_tokens", None)
    return body


# --- changes of the value -----------------------------------------------------------------------------

Path = tuple[Any, ...]


def _paths(value: Any, here: Path = ()) -> Iterator[Path]:
    yield here
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*here, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from _paths(value[index], (*here, index))


def _pick(rng: random.Random, body: Any, *, depth: int = 1) -> Path | None:
    found = [path for path in _paths(body) if len(path) >= depth]
    return rng.choice(found) if found else None


def _get(body: Any, path: Path) -> Any:
    for step in path:
        body = body[step]
    return body


def _put(body: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    _get(body, path[:-1])[path[-1]] = value
    return body


def _anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 2 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice((None, True, False, [], {}))
    if kind < 8:
        return [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(NAMES): _anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def _replace(rng: random.Random, body: Any) -> Any:
    path = _pick(rng, body)
    return body if path is None else _put(body, path, _anything(rng))


def _nudge(rng: random.Random, body: Any) -> Any:
    """Another value of the same type."""
    path = _pick(rng, body)
    if path is None:
        return body
    old = _get(body, path)
    if isinstance(old, bool):
        return _put(body, path, not old)
    if isinstance(old, int | float):
        return _put(body, path, rng.choice(NUMBERS))
    if isinstance(old, str):
        return _put(body, path, rng.choice((rng.choice(TEXTS), old + rng.choice(TEXTS), old * 9)))
    return body


def _retype(rng: random.Random, body: Any) -> Any:
    """The same value in another type."""
    path = _pick(rng, body)
    if path is None:
        return body
    old = _get(body, path)
    text = old if isinstance(old, str) else json.dumps(old)
    return _put(body, path, rng.choice((text, [old], {"a": old}, [old, old], [[old]])))


def _drop(rng: random.Random, body: Any) -> Any:
    path = _pick(rng, body)
    if path is not None:
        del _get(body, path[:-1])[path[-1]]
    return body


def _add(rng: random.Random, body: Any) -> Any:
    places = [p for p in _paths(body) if isinstance(_get(body, p), dict | list)]
    if not places:
        return body
    place = _get(body, rng.choice(places))
    if isinstance(place, list):
        place.insert(rng.randrange(len(place) + 1), _anything(rng))
    else:
        place[rng.choice(NAMES)] = _anything(rng)
    return body


def _graft(rng: random.Random, body: Any) -> Any:
    """A part of the body somewhere else."""
    source, target = _pick(rng, body), _pick(rng, body)
    if source is None or target is None:
        return body
    return _put(body, target, copy.deepcopy(_get(body, source)))


def _repeat(rng: random.Random, body: Any) -> Any:
    """Many of something."""
    path = _pick(rng, body)
    if path is None:
        return body
    old = _get(body, path)
    times = rng.choice((2, 17, 130, 700))
    if isinstance(old, str):
        return _put(body, path, (old + " ") * times)
    if isinstance(old, list):
        return _put(body, path, old * times)
    return _put(body, path, [old] * times)


def _nest(rng: random.Random, body: Any) -> Any:
    path = _pick(rng, body)
    if path is None or max(map(len, _paths(body))) > 400:
        return body  # deeper than Python's own encoder would go
    value = _get(body, path)
    is_list = rng.random() < 0.5
    for _ in range(rng.choice((3, 30, 190, 400))):
        value = [value] if is_list else {"properties": value}
    return _put(body, path, value)


def _more_fields(rng: random.Random, body: Any) -> Any:
    """The sampling fields of another valid body on top."""
    if isinstance(body, dict) and ("messages" in body or "prompt" in body) and len(body) > 3:
        body.update(copy.deepcopy(rng.choice(SAMPLING)))
    return body


def _tune(rng: random.Random, body: Any) -> Any:
    """Other values of fields, each legal by itself."""
    if isinstance(body, dict) and ("messages" in body or "prompt" in body) and len(body) > 3:
        for name in rng.sample(sorted(LEGAL), 3):
            body[name] = copy.deepcopy(rng.choice(LEGAL[name]))
    return body


_CHANGES: tuple[Callable[[random.Random, Any], Any], ...] = (
    *(_replace, _replace, _nudge, _nudge, _nudge, _retype, _drop, _add, _add, _graft),
    *(_repeat, _nest, _more_fields, _more_fields, _tune, _tune, _tune, _tune),
)


def _encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


# --- damages of the bytes -----------------------------------------------------------------------------


def _cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def _flip(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(max(1, len(raw)))
    return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]


def _insert(rng: random.Random, raw: bytes) -> bytes:
    parts = (
        b"\xff",
        b"\xc3",
        b"\\ud800",
        b"NaN",
        b"Infinity",
        b"\0",
        b",",
        b'"',
        b"\xf0\x9f",
        b"[",
    )
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + rng.choice(parts) + raw[at:]


def _twice(rng: random.Random, raw: bytes) -> bytes:
    """A key that comes twice."""
    return raw[:-1] + b',"%s":%d}' % (rng.choice((b"model", b"n", b"stream", b"max_tokens")), 1)


def _wide(rng: random.Random, raw: bytes) -> bytes:
    text = raw.decode("utf-8", "replace")
    return text.encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig")))


def _surround(rng: random.Random, raw: bytes) -> bytes:
    return (
        rng.choice((b" \n", b"\xef\xbb\xbf", b"[" * 5000, b"", b"x"))
        + raw
        + rng.choice((b" ", b"{}", b"\0", b""))
    )


def _surrogate(rng: random.Random, raw: bytes) -> bytes:
    """Half a character inside a text."""
    return raw.replace(b"o", rng.choice((b"\\ud83d", b"\\ude00", b"\\ud83d\\ude00")), 1)


_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_cut, _flip, _insert, _twice, _wide, _surround, _surrogate),
)
