"""Judges a server by the vectors of a dialect: one request each, predicates that must all hold.

    python -m tests.vectors.runner URL FILE --max-model-len N [--have FEATURE] [--server KEY=JSON] ...

The predicates and macros are those of the vector file: dotted paths into the JSON answer, `@{MAX_MODEL_LEN-1}`,
`@{T1}` to `@{T5}` for five ids of ordinary text tokens. A vector that names a server configuration or a
feature which was not declared is left out and counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Vector = dict[str, Any]
MISSING: Any = object()


@dataclass(frozen=True)
class Target:
    """The server under judgement and what is known about it."""

    url: str
    max_model_len: int
    model: str = "MODEL"
    token_ids: Sequence[int] = (5, 6, 7, 8, 9)
    features: frozenset[str] = frozenset()
    server: dict[str, Any] = field(default_factory=dict)
    use_alternatives: bool = True
    timeout_s: float = 300


@dataclass(frozen=True)
class Answer:
    """What came back; `cut` when the body ended early."""

    status: int
    headers: dict[str, str]
    text: str
    cut: bool


def load(path: Path) -> list[Vector]:
    """The vectors of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def applies(vector: Vector, target: Target) -> bool:
    """Whether the target has what the vector needs."""
    configured = all(target.server.get(k) == v for k, v in vector.get("server", {}).items())
    return configured and set(vector.get("needs", [])) <= target.features


def judge(vector: Vector, target: Target) -> list[str]:
    """Send the vector's request; every predicate that did not hold, in words."""
    expected = vector["expect"]
    if target.use_alternatives:
        expected = vector.get("alt_expect", expected)
    expected = _expand(expected, target)
    answer = _send(vector["endpoint"], vector["request"], target, vector)
    problems: list[str] = []
    if answer.status != expected["status"]:
        problems.append(f"status {answer.status}, want {expected['status']}: {answer.text[:200]}")
    problems += _headers(expected, answer)
    if "body_equals_text" in expected and answer.text != expected["body_equals_text"]:
        problems.append(f"body {answer.text[:100]!r}")
    if "sse" in expected:
        if answer.status == 200:
            problems += _stream(expected["sse"], answer, vector, target)
    elif any(name.startswith("json") or name in _WHOLE_BODY for name in expected):
        try:
            body = json.loads(answer.text)
        except ValueError:
            return [*problems, "body is not JSON"]
        problems += _body(expected, body)
        if answer.status == 200:
            problems += _other_requests(expected, body, target)
    return problems


# --- requests ---------------------------------------------------------------------------------------


def _expand(value: Any, target: Target) -> Any:
    if isinstance(value, dict):
        return {str(_expand(k, target)): _expand(v, target) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, target) for v in value]
    if not isinstance(value, str):
        return value
    value = re.sub(r"\bMODEL\b", target.model, value)
    whole = re.fullmatch(r"@\{([^}]*)\}", value)
    if whole:
        return _macro(whole[1], target)
    return re.sub(r"@\{([^}]*)\}", lambda m: str(_macro(m[1], target)), value)


def _macro(text: str, target: Target) -> int:
    if re.fullmatch(r"T[1-5]", text):
        return target.token_ids[int(text[1]) - 1]
    length = re.fullmatch(r"MAX_MODEL_LEN([+-]\d+)?", text)
    assert length, f"unknown macro {text}"
    return target.max_model_len + int(length[1] or 0)


def _send(endpoint: str, request: Any, target: Target, extra: Vector | None = None) -> Answer:
    extra = extra or {}
    method, path = endpoint.split(" ", 1)
    headers, body = dict(extra.get("headers") or {}), None
    if extra.get("raw_body") is not None:
        body = str(_expand(extra["raw_body"], target)).encode()
    elif method == "POST":
        body = json.dumps(_expand(request, target)).encode()
        headers.setdefault("Content-Type", "application/json")
    where = urllib.parse.urlsplit(target.url)
    connection = http.client.HTTPConnection(
        str(where.hostname), where.port, timeout=target.timeout_s
    )
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response, cut = connection.getresponse(), False
        try:
            data = response.read()
        except http.client.IncompleteRead as error:
            data, cut = error.partial, True
        except ConnectionError:
            data, cut = b"", True
        received = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, received, data.decode(errors="replace"), cut)
    finally:
        connection.close()


# --- predicates -------------------------------------------------------------------------------------


def _get(value: Any, path: str) -> Any:
    if path in ("$", ""):
        return value
    for step in re.findall(r"[^.\[\]]+|\[-?\d+\]", path):
        if step.startswith("["):
            index = int(step[1:-1])
            if not isinstance(value, list) or not -len(value) <= index < len(value):
                return MISSING
            value = value[index]
        elif not isinstance(value, dict) or step not in value:
            return MISSING
        else:
            value = value[step]
    return value


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | dict) else -1


def _equal(value: Any, wanted: Any) -> bool:
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


_PER_PATH: dict[str, Callable[[Any, Any], bool]] = {
    "json_path_equals": _equal,
    "json_path_type": lambda v, want: (
        _kind(v) == want or (want == "number" and _kind(v) == "integer")
    ),
    "json_path_regex": lambda v, want: isinstance(v, str) and re.search(want, v) is not None,
    "json_path_contains": lambda v, want: isinstance(v, str) and want in v,
    "json_path_not_contains": lambda v, want: not isinstance(v, str) or want not in v,
    "json_path_in": lambda v, want: v in want,
    "json_path_len": lambda v, want: _length(v) == want,
    "json_path_len_lte": lambda v, want: 0 <= _length(v) <= want,
    "json_path_len_gte": lambda v, want: _length(v) >= want,
    "json_path_gte": lambda v, want: isinstance(v, int | float) and v >= want,
    "json_keys_exact": lambda v, want: isinstance(v, dict) and set(v) == set(want),
    "json_unique_len": lambda v, want: len({json.dumps(x) for x in v}) == want,
    "json_last_equals": lambda v, want: all(v[-1].get(k) == x for k, x in want.items()),
    "json_map_values_keys": lambda v, want: all(
        re.fullmatch(r"\d+", key) and set(entry) == set(want) for key, entry in v.items()
    ),
}
_MAY_BE_MISSING = {"json_path_not_contains"}
_WHOLE_BODY = {
    "bytes_match_token",
    "text_offset_consistent",
    "equal_to_request",
    "differs_from_request",
    "logprob_spread_ratio",
}


def _headers(expected: Vector, answer: Answer) -> Iterator[str]:
    prefix = expected.get("content_type_prefix", "")
    if not answer.headers.get("content-type", "").startswith(prefix):
        yield f"content-type {answer.headers.get('content-type')!r}, want {prefix!r}"
    for name in expected.get("headers_absent", []):
        if name in answer.headers:
            yield f"header {name} is present"
    for name, value in expected.get("header_equals", {}).items():
        if answer.headers.get(name) != value:
            yield f"header {name} is {answer.headers.get(name)!r}, want {value!r}"


def _body(expected: Vector, body: Any) -> Iterator[str]:
    for name, holds in _PER_PATH.items():
        for path, wanted in expected.get(name, {}).items():
            value = _get(body, path)
            if value is MISSING and name in _MAY_BE_MISSING:
                continue
            if value is MISSING or not holds(value, wanted):
                shown = "missing" if value is MISSING else repr(value)[:300]
                yield f"{name} {path}: {shown}, want {wanted!r}"
    for path in expected.get("json_path_absent", []):
        if _get(body, path) is not MISSING:
            yield f"{path} must be absent"
    for path in expected.get("json_path_present", []):
        if _get(body, path) is MISSING:
            yield f"{path} must be present"
    for path, parts in expected.get("json_sum", {}).items():
        if _get(body, path) != sum(_get(body, part) for part in parts):
            yield f"{path} is not the sum of {parts}"
    for left, right in expected.get("json_paths_equal", []):
        if _get(body, left) != _get(body, right):
            yield f"{left} differs from {right}"
    for path, number in expected.get("json_len_equals_path", {}).items():
        if _length(_get(body, path)) != _get(body, number):
            yield f"len({path}) {_length(_get(body, path))} is not {number} {_get(body, number)}"
    if "bytes_match_token" in expected:
        for entry in _get(body, expected["bytes_match_token"]):
            if list(entry["token"].encode()) != entry["bytes"]:
                yield f"bytes do not spell the token: {entry}"
    if "text_offset_consistent" in expected:
        logprobs, offset = _get(body, expected["text_offset_consistent"]), 0
        for token, found in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if found != offset:
                yield f"text_offset {found}, want {offset}"
            offset += len(token)


def _other_requests(expected: Vector, body: Any, target: Target) -> Iterator[str]:
    for name, must_equal in (("equal_to_request", True), ("differs_from_request", False)):
        if other := expected.get(name):
            answer = _send(other["endpoint"], other["request"], target)
            second = json.loads(answer.text)
            for here, there in other["paths"].items():
                a, b = _get(body, here), _get(second, there)
                if a is MISSING or b is MISSING or (a == b) is not must_equal:
                    yield f"{name}: {here} {a!r}, there {b!r} (status {answer.status})"
    if other := expected.get("logprob_spread_ratio"):
        second = json.loads(_send(other["endpoint"], other["request"], target).text)
        here, there = _spread(body), _spread(second)
        if abs(here - other["ratio"] * there) > other["tol"] * max(1.0, abs(here)):
            yield f"logprob spread {here}, other {there}, want ratio {other['ratio']}"


def _spread(body: Any) -> float:
    values = _get(body, "choices[0].logprobs.top_logprobs[0]").values()
    return float(max(values) - min(values))


def _delta_text(chunk: Any) -> str:
    choice = chunk["choices"][0]
    return str((choice["delta"].get("content") if "delta" in choice else choice["text"]) or "")


def _stream(expected: Vector, answer: Answer, vector: Vector, target: Target) -> Iterator[str]:
    events = [event for event in answer.text.split("\n\n") if event]
    data = [event[6:] for event in events if event.startswith("data: ")]
    if len(data) != len(events):
        yield "an event is not a data line"
    done = bool(data) and data[-1] == "[DONE]"
    if answer.cut or (expected.get("done_last") and not done):
        yield "no [DONE] at the end"
    chunks = [json.loads(text) for text in data if text != "[DONE]"]
    with_choice = [chunk for chunk in chunks if chunk.get("choices")]
    text = "".join(_delta_text(chunk) for chunk in with_choice)
    if "chunk_count" in expected and len(chunks) != expected["chunk_count"]:
        yield f"{len(chunks)} chunks, want {expected['chunk_count']}"
    for key, wanted in expected.get("chunks", {}).items():
        index = int(key)
        if not -len(chunks) <= index < len(chunks):
            yield f"there is no chunk {key}"
            continue
        yield from (f"chunk {key}: {problem}" for problem in _body(wanted, chunks[index]))
    for index, chunk in enumerate(chunks):
        for problem in _body(expected.get("all_chunks", {}), chunk):
            yield f"chunk {index}: {problem}"
    for key in expected.get("same_across_chunks", []):
        if len({json.dumps(chunk.get(key)) for chunk in chunks}) != 1:
            yield f"{key} differs between chunks"
    if expected.get("chunks_have_one_choice") and any(len(c["choices"]) > 1 for c in chunks):
        yield "a chunk has more than one choice"
    indexes = sorted({chunk["choices"][0]["index"] for chunk in with_choice})
    if "index_set" in expected and indexes != expected["index_set"]:
        yield f"choice indexes {indexes}, want {expected['index_set']}"
    if "echo_prefix" in expected and not text.startswith(expected["echo_prefix"]):
        yield f"text does not begin with the prompt: {text!r}"
    if "concat_text" in expected and text != expected["concat_text"]:
        yield f"joined text {text!r}, want {expected['concat_text']!r}"
    if expected.get("concat_equals_nonstream"):
        plain = {
            k: v for k, v in vector["request"].items() if k not in ("stream", "stream_options")
        }
        choice = json.loads(_send(vector["endpoint"], plain, target).text)["choices"][0]
        whole = choice["message"]["content"] if "message" in choice else choice["text"]
        if text != whole:
            yield f"joined text {text!r}, unstreamed {whole!r}"
    if expected.get("finish_reason_only_on_last_choice_chunk"):
        reasons = [chunk["choices"][0].get("finish_reason") for chunk in with_choice]
        if any(reasons[:-1]) or not reasons[-1:] or reasons[-1] is None:
            yield f"finish reasons {reasons}"


def main() -> int:
    """Judge every vector that applies; the exit code is 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--model", default="MODEL")
    parser.add_argument("--tokens", default="5,6,7,8,9")
    parser.add_argument("--have", action="append", default=[])
    parser.add_argument("--server", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--only", default="", metavar="PREFIX")
    parser.add_argument("--original", action="store_true", help="the original's faults are wanted")
    a = parser.parse_args()
    target = Target(
        a.url,
        a.max_model_len,
        a.model,
        [int(t) for t in a.tokens.split(",")],
        frozenset(a.have),
        {k: json.loads(v) for k, v in (s.split("=", 1) for s in a.server)},
        not a.original,
    )
    passed = failed = left_out = 0
    for vector in load(a.file):
        if not vector["id"].startswith(a.only):
            continue
        if not applies(vector, target):
            left_out += 1
        elif problems := judge(vector, target):
            failed += 1
            print("FAIL", vector["id"], "|", "; ".join(problems)[:800])
        else:
            passed += 1
    print(f"passed {passed} failed {failed} left out {left_out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
