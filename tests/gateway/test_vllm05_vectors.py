"""Every vector of the dialect that is decided before the engine, against the request side alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.vllm05.errors import DialectError
from tests.fakes.vllm05 import ENDPOINTS, MAX_MODEL_LEN, Resolved, resolve_raw
from tests.vectors import runner

PATH = Path(__file__).parents[1] / "vectors" / "vllm-0.5.jsonl"
TARGET = runner.Target("", MAX_MODEL_LEN)

# Decided elsewhere: by the API key, by the list of models, by the template.
ELSEWHERE = {"auth-before-validation", "emb-disabled-before-model", "order-template-before-backend"}
VECTORS = [v for v in runner.load(PATH) if v["endpoint"] in ENDPOINTS and v["id"] not in ELSEWHERE]


def expected(vector: runner.Vector) -> Any:
    return runner._expand(vector.get("alt_expect", vector["expect"]), TARGET)


def outcome(vector: runner.Vector) -> Resolved | DialectError:
    raw = vector.get("raw_body") or json.dumps(runner._expand(vector["request"], TARGET))
    headers = {name.lower(): value for name, value in (vector.get("headers") or {}).items()}
    try:
        return resolve_raw(vector["endpoint"], raw.encode(), headers.get("content-type"))
    except DialectError as error:
        return error


REFUSED = [v for v in VECTORS if expected(v)["status"] >= 400]
IN_BAND = [v for v in VECTORS if v["id"] == "chat-stream-error-in-band"]
ACCEPTED = [v for v in VECTORS if v not in REFUSED and v not in IN_BAND]


def test_the_file_is_whole() -> None:
    assert (len(REFUSED), len(IN_BAND), len(ACCEPTED)) == (103, 1, 97)


@pytest.mark.parametrize("vector", REFUSED, ids=lambda v: v["id"])
def test_refused_vector(vector: runner.Vector) -> None:
    error = outcome(vector)
    assert isinstance(error, DialectError), error
    assert error.status == expected(vector)["status"]
    assert list(runner._body(expected(vector), json.loads(error.body()))) == []


@pytest.mark.parametrize("vector", ACCEPTED, ids=lambda v: v["id"])
def test_accepted_vector(vector: runner.Vector) -> None:
    assert isinstance(outcome(vector), Resolved)


def test_the_logprobs_limit_is_told_inside_a_stream() -> None:
    error = outcome(IN_BAND[0])
    assert isinstance(error, DialectError)
    assert error.in_band
    event = error.stream_event()
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
    wanted = expected(IN_BAND[0])["sse"]["chunks"]["0"]
    assert list(runner._body(wanted, json.loads(event[6:]))) == []
