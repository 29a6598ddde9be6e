"""Faults that other servers had on the wire, by the id under which they are collected.

Not here, with the reason: B153 (the finishing chunk carries the remaining text in this dialect), B185 (error
objects are flat and 404/405 bodies are the framework's in this dialect), B265 (the key is compared to the
character in this dialect), B271 (about clients).
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.gateway import Stack, gateway

HELLO = [{"role": "user", "content": "Say hello."}]
CHAT = {"model": "MODEL", "messages": HELLO, "max_tokens": 5}
PATH = "/v1/chat/completions"


def client(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=20)


async def chunks_of(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await http.post(PATH, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    *events, done = [e for e in reply.text.split("\n\n") if e]
    assert done == "data: [DONE]"
    return [json.loads(e.removeprefix("data: ")) for e in events]


async def test_b046_b296_long_bodies_are_read_and_judged_by_their_content() -> None:
    long = {"role": "user", "content": "lorem ipsum " * 300_000}
    async with gateway(rpc_timeout_s=60) as stack, client(stack) as http:
        reply = await http.post(PATH, json={**CHAT, "messages": [long]})
        assert reply.status_code == 400
        assert "maximum context length is 512 tokens" in reply.json()["message"]
        padded = {**CHAT, "user": "u" * 10_000_000}
        assert (await http.post(PATH, json=padded)).status_code == 200


async def test_b049_b068_b292_a_stream_has_one_identity() -> None:
    async with gateway() as stack, client(stack) as http:
        usage = {"stream_options": {"include_usage": True}}
        first = await chunks_of(http, {**CHAT, **usage, "n": 2, "max_tokens": 200})
        assert len({c["id"] for c in first}) == len({c["created"] for c in first}) == 1
        second = await chunks_of(http, {**CHAT, "max_tokens": 10})
        assert second[0]["id"] != first[0]["id"]
        assert {c["choices"][0]["index"] for c in second} == {0}


@pytest.mark.parametrize("name", ["no-such-model", "nope", "gpt-imaginary", "unlisted-model-1"])
async def test_b055_b093_b274_b283_an_unknown_model_is_404_and_told_from_an_unknown_path(
    name: str,
) -> None:
    async with gateway() as stack, client(stack) as http:
        reply = await http.post(PATH, json={**CHAT, "model": name})
        assert reply.status_code == 404
        assert reply.json()["type"] == "NotFoundError" and name in reply.json()["message"]
        other = await http.post("/v1/chat/completionz", json=CHAT)
        assert other.status_code == 404 and other.json() == {"detail": "Not Found"}
        aliased = await http.post(PATH, json={**CHAT, "model": "MODEL-ALIAS"})
        assert aliased.json()["model"] == "MODEL"


async def test_b058_a_limit_is_length_and_never_an_inner_word() -> None:
    async with gateway() as stack, client(stack) as http:
        body = {"model": "MODEL", "prompt": "Once", "max_tokens": 3, "ignore_eos": True}
        reply = await http.post("/v1/completions", json=body)
        assert reply.json()["choices"][0]["finish_reason"] == "length"


async def test_b064_b148_a_preflight_passes_the_key_check() -> None:
    async with gateway(api_key=("KEY",)) as stack, client(stack) as http:
        for method, path in (("GET", "/v1/models"), ("POST", PATH)):
            asked = {
                "origin": "http://example.test",
                "access-control-request-method": method,
                "access-control-request-headers": "authorization",
            }
            reply = await http.options(path, headers=asked)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == "*"
            assert method in reply.headers["access-control-allow-methods"]
        assert (await http.post(PATH, json=CHAT)).status_code == 401


async def test_b077_b089_b269_b275_chunks_are_whole_and_one_of_them_ends() -> None:
    async with gateway() as stack, client(stack) as http:
        chunks = await chunks_of(http, CHAT)
        for chunk in chunks:
            assert chunk["object"] == "chat.completion.chunk" and "usage" not in chunk
            assert chunk["id"] and chunk["created"] and chunk["model"]
            (choice,) = chunk["choices"]
            assert choice["index"] == 0 and isinstance(choice["delta"], dict)
            assert "finish_reason" in choice
        ends = [c["choices"][0]["finish_reason"] for c in chunks]
        assert ends[:-1] == [None] * (len(ends) - 1) and ends[-1] == "length"


@pytest.mark.parametrize(
    "kind",
    ["application/json; charset=utf-8", "application/json;charset=UTF-8", "Application/JSON"],
)
async def test_b104_a_content_type_may_have_parameters_and_capitals(kind: str) -> None:
    async with gateway() as stack, client(stack) as http:
        content = json.dumps(CHAT).encode()
        reply = await http.post(PATH, content=content, headers={"content-type": kind})
        assert reply.status_code == 200


async def test_b105_no_event_is_empty_or_named() -> None:
    async with gateway() as stack, client(stack) as http:
        reply = await http.post(PATH, json={**CHAT, "stream": True})
        lines = [line for line in reply.text.split("\n") if line]
        assert all(line.startswith("data: ") and line[6:].strip('" ') for line in lines)


async def test_b168_a_body_has_everything() -> None:
    async with gateway() as stack, client(stack) as http:
        body = (await http.post(PATH, json=CHAT)).json()
        choice = body["choices"][0]
        assert choice["index"] == 0 and choice["finish_reason"] == "length"
        assert choice["message"]["role"] == "assistant"
        assert isinstance(choice["message"]["content"], str)
        assert body["object"] == "chat.completion" and isinstance(body["created"], int)
        assert body["model"] == "MODEL" and body["usage"]["completion_tokens"] == 5


async def test_b177_stream_options_may_be_absent_or_null() -> None:
    async with gateway() as stack, client(stack) as http:
        for extra in ({}, {"stream_options": None}):
            assert len(await chunks_of(http, {**CHAT, **extra})) == 6
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_b263_a_wrong_n_of_a_stream_is_a_400_and_the_connection_goes_on(path: str) -> None:
    async with gateway() as stack, client(stack) as http:
        body: dict[str, Any] = dict(CHAT) if path == PATH else {"model": "MODEL", "prompt": "Once"}
        reply = await http.post(path, json={**body, "stream": True, "n": 0})
        assert reply.status_code == 400
        assert reply.json()["message"] == "n must be at least 1, got 0."
        assert (await http.post(path, json={**body, "max_tokens": 1})).status_code == 200


async def test_b284_embeddings_of_a_chat_server_are_a_400() -> None:
    async with gateway() as stack, client(stack) as http:
        reply = await http.post("/v1/embeddings", json={"model": "MODEL", "input": "x"})
        assert reply.status_code == 400
        assert reply.json()["message"] == "Embedding API disabled"
