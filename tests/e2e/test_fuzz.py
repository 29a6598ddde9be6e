"""Whatever a client sends: an answer in time, never a 5xx, never a word in the logs, and nobody dies.

FUZZ_REQUESTS is how many changed requests are sent (10,000 for a whole run, fewer in the suite);
FUZZ_SEED chooses others; FUZZ_EXAMPLES is how many bodies per operation and kind are made
from our own OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bench.stack import Running, candor_stack
from candor.cli import models
from tests.fakes import fuzz
from tests.fakes.e2e import complaints, processes

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "600"))
SEED = int(os.environ.get("FUZZ_SEED", "20240823"))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
AT_ONCE = 8
TIMEOUT_S = 60.0
MODELS = fuzz.Names("synthetic", "all-minilm-l6-v2")
REFUSALS = {400, 404, 413}


@pytest.fixture(scope="module")
def stack(model_path: Path) -> Iterator[Running]:
    """Two workers that compute no model, and the small one that embeds; a short context, so that answers
    without a limit are short too."""
    models.ensure(MODELS.embeds)
    arguments = ["--served-model-name", MODELS.generates, "--runner", "synthetic"]
    arguments += ["--max-model-len", "256", "--embedding-model", MODELS.embeds]
    with candor_stack(model_path, workers=2, arguments=arguments) as running:
        yield running


@pytest.fixture(autouse=True)
def unharmed(stack: Running) -> Iterator[None]:
    """The same processes before and after, and none of them had anything to complain of."""
    before, said = processes(stack), Counter(complaints(stack))
    yield
    assert processes(stack) == before
    assert list(Counter(complaints(stack)) - said) == []


def problem(status: int, kind: str, body: bytes) -> str:
    """What is wrong with an answer, in words; empty when nothing is."""
    if status in REFUSALS:
        error = json.loads(body)
        wanted = {"object": "error", "param": None, "code": status}
        is_whole = {k: error.get(k) for k in wanted} == wanted and error.get("message")
        return "" if is_whole else f"no error object: {body[:300]!r}"
    if status != 200:
        return f"status {status}: {body[:300]!r}"
    if not kind.startswith("text/event-stream"):
        json.loads(body, parse_constant=_no_json)
        return ""
    *events, done = [e for e in body.decode().split("\n\n") if e]
    if done != "data: [DONE]":
        return f"the stream has no end: {body[-300:]!r}"
    for event in events:
        chunk = json.loads(event.removeprefix("data: "), parse_constant=_no_json)
        if "error" in chunk and chunk["error"]["code"] not in REFUSALS:
            return f"an error in the stream: {chunk['error']}"
    return ""


def _no_json(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


async def send(client: httpx.AsyncClient, shot: fuzz.Shot) -> tuple[int, str]:
    """Status, and what is wrong."""
    headers = {} if shot.content_type is None else {"content-type": shot.content_type}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reply = await client.post(shot.path, content=shot.raw, headers=headers)
    except (TimeoutError, httpx.HTTPError) as error:
        return 0, f"no answer: {error!r}"
    try:
        kind = reply.headers.get("content-type", "")
        return reply.status_code, problem(reply.status_code, kind, reply.content)
    except (ValueError, AssertionError, KeyError) as error:
        return reply.status_code, f"{error!r}: {reply.content[:300]!r}"


async def send_all(stack: Running, shots: Iterator[fuzz.Shot]) -> Counter[int]:
    """Send them, so many at once; how often each status came. Fails with every problem there was."""
    statuses: Counter[int] = Counter()
    problems: list[str] = []

    async def sender(client: httpx.AsyncClient) -> None:
        for shot in shots:
            began_at = time.monotonic()
            status, wrong = await send(client, shot)
            statuses[status] += 1
            if wrong:
                took = time.monotonic() - began_at
                problems.append(
                    f"#{shot.number} {shot.path} {took:.1f} s {shot.raw[:600]!r}\n  {wrong}"
                )

    async with httpx.AsyncClient(base_url=stack.url, timeout=None, trust_env=False) as client:
        await asyncio.gather(*(sender(client) for _ in range(AT_ONCE)))
    assert not problems, f"{len(problems)} problems, {dict(statuses)}\n" + "\n".join(problems[:20])
    return statuses


async def test_the_bodies_that_are_changed_are_valid(stack: Running) -> None:
    statuses = await send_all(stack, fuzz.valid(150, SEED, MODELS))
    assert dict(statuses) == {200: 150}


async def test_changed_bodies_are_answered_or_refused(stack: Running) -> None:
    statuses = await send_all(stack, fuzz.shots(REQUESTS, SEED, MODELS))
    print(f"{REQUESTS} requests: {dict(statuses)}")
    assert statuses.total() == REQUESTS
    assert statuses[200] > REQUESTS // 10 and statuses[400] > REQUESTS // 10


CHECKS = (
    *(not_a_server_error, status_code_conformance),
    *(content_type_conformance, response_schema_conformance),
)
RUN = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def _rank(name: str) -> bool:
    return name not in ("messages", "prompt", "input", "tokens")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
def test_what_our_openapi_document_allows_and_forbids_is_answered_as_it_says(
    stack: Running, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(stack.url + "/openapi.json")
    sent: Counter[str] = Counter()
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()

        @RUN
        @given(case=operation.as_strategy(generation_mode=mode), most=st.integers(3, 40))
        def judge(case: schemathesis.Case[Any], most: int) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                # Nearly every body of many fields is refused, and any other model's name at once.
                case.body = {k: case.body[k] for k in sorted(case.body, key=_rank)[:most]}
                case.body["model"] = MODELS.at(case.operation.path)
            response = case.call(timeout=TIMEOUT_S)
            case.validate_response(response, checks=list(CHECKS))
            if case.method == "POST":
                kind = response.headers.get("content-type", [""])[0]
                assert problem(response.status_code, kind, response.content) == ""
            sent[f"{case.operation.label} {response.status_code}"] += 1

        if mode is GenerationMode.POSITIVE or operation.body:
            judge()
    print(dict(sent))
    assert {label.rpartition(" ")[0] for label in sent} >= {f"POST {path}" for path in fuzz.WEIGHTS}
