"""Many streams at once: each ends exactly once and says what its tokens say, streamed or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from bench.stack import Running

STREAMS = 64


@dataclass
class Stream:
    """What one SSE answer held."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    completion_tokens: int = 0
    done: int = 0
    after_done: int = 0


def body(model: str, index: int, **more: Any) -> dict[str, Any]:
    """A greedy chat request that differs from all others."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Write a line about the number {index}."}],
        "max_tokens": 8 + index % 9,
        "temperature": 0,
        **more,
    }


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> Stream:
    """Send a request with stream on and read it to its end."""
    got = Stream()
    request = {**request, "stream": True, "stream_options": {"continuous_usage_stats": False}}
    async with client.stream("POST", "/v1/chat/completions", json=request) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for data in _events(reply):
            got.after_done += got.done
            if data == "[DONE]":
                got.done += 1
                continue
            chunk = json.loads(data)
            if chunk.get("usage"):
                got.completion_tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                got.text += choice["delta"].get("content") or ""
                entries = (choice.get("logprobs") or {}).get("content") or []
                got.logprobs += entries
                got.tokens += [entry["token"] for entry in entries]
                if choice["finish_reason"]:
                    got.reasons.append(choice["finish_reason"])
    return got


async def _events(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line[6:]


def client_of(stack: Running) -> httpx.AsyncClient:
    """A client that may hold every stream open at once."""
    limits = httpx.Limits(max_connections=STREAMS + 8)
    return httpx.AsyncClient(base_url=stack.url, timeout=300, limits=limits, trust_env=False)


async def test_64_streams_over_two_workers_end_once_and_equal_the_whole_answer(
    scripted: Running,
) -> None:
    requests = [body("synthetic", i, logprobs=True) for i in range(STREAMS)]
    async with client_of(scripted) as client:
        streams = await asyncio.gather(*(stream(client, r) for r in requests))
        wholes = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=r) for r in requests)
        )
    for got, whole, request in zip(streams, wholes, requests, strict=True):
        choice = whole.json()["choices"][0]
        assert (len(got.reasons), got.done, got.after_done) == (1, 1, 0)
        assert got.reasons == [choice["finish_reason"]]
        assert got.text == choice["message"]["content"]
        assert got.logprobs == choice["logprobs"]["content"]
        assert got.completion_tokens == whole.json()["usage"]["completion_tokens"]
        assert len(got.tokens) == got.completion_tokens <= request["max_tokens"]


async def test_the_text_of_a_stream_is_the_decoding_of_its_tokens(real: Running) -> None:
    """Tokens are told by id on the wire of /detokenize, from the tokens' own texts."""
    async with client_of(real) as client:
        got = await stream(client, body("smollm2-135m", 3, logprobs=True))
        encoded = await client.post(
            "/tokenize",
            json={"model": "smollm2-135m", "prompt": got.text, "add_special_tokens": False},
        )
        ids = encoded.json()["tokens"]
        decoded = await client.post("/detokenize", json={"model": "smollm2-135m", "tokens": ids})
    assert decoded.json()["prompt"] == got.text == "".join(got.tokens)


async def test_the_real_model_answers_64_streams_as_it_answers_each_alone(real: Running) -> None:
    """Where a batch moves a greedy choice, the two candidates were a near-tie of two logits."""
    requests = [body("smollm2-135m", i, logprobs=True, top_logprobs=2) for i in range(STREAMS)]
    async with client_of(real) as client:
        streams = await asyncio.gather(*(stream(client, r) for r in requests))
        moved = 0
        for request, got in zip(requests, streams, strict=True):
            assert (len(got.reasons), got.done, got.after_done) == (1, 1, 0)
            assert got.text == "".join(got.tokens)
            whole = (await client.post("/v1/chat/completions", json=request)).json()
            entries = whole["choices"][0]["logprobs"]["content"]
            alone = [entry["token"] for entry in entries]
            if alone != got.tokens:
                moved += 1
                pairs = zip(alone, got.tokens, strict=False)
                first = next(i for i, (a, b) in enumerate(pairs) if a != b)
                first_two = entries[first]["top_logprobs"]
                gap = abs(first_two[0]["logprob"] - first_two[1]["logprob"])
                assert gap < 0.35, f"token {first}: the gap of {gap} is no near-tie"
    print(f"{moved} of {STREAMS} greedy answers differ between batch and solo, all near-ties")


@pytest.mark.parametrize("field", ["n", "seeded"])
async def test_several_choices_stream_as_they_come_whole(scripted: Running, field: str) -> None:
    extra: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11}
    if field == "seeded":
        extra["n"] = 1
    request = body("synthetic", 5, **extra)
    async with client_of(scripted) as client:
        async with client.stream(
            "POST", "/v1/chat/completions", json={**request, "stream": True}
        ) as reply:
            texts: dict[int, str] = {}
            ended: list[int] = []
            async for data in _events(reply):
                if data == "[DONE]":
                    continue
                for choice in json.loads(data)["choices"]:
                    index = choice["index"]
                    texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
                    if choice["finish_reason"]:
                        ended.append(index)
        whole = (await client.post("/v1/chat/completions", json=request)).json()
    assert sorted(ended) == sorted(texts) == list(range(extra["n"]))
    assert [texts[c["index"]] for c in whole["choices"]] == [
        c["message"]["content"] for c in whole["choices"]
    ]
