"""Known faults of other servers with requests that are too large, too deep or too many, against whole stacks.

Each test is named after the cases it holds off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.stack import Running, candor_stack, cpu_seconds
from tests.e2e.test_streams import body, client_of, stream
from tests.fakes.door import Door
from tests.fakes.e2e import complaints, processes
from tests.fakes.fuzz import CHAT, COMPLETION, EMBEDDING, TOKENIZE

NAME = "synthetic"
KV_TOKENS = 300


@pytest.fixture
def cramped(model_path: Path) -> Iterator[Door]:
    """A worker with room for 300 tokens in all, and eight slots that compete for it."""
    arguments = ["--served-model-name", NAME, "--runner", "synthetic"]
    environ = {"CANDOR_KV_TOKENS": str(KV_TOKENS), "CANDOR_MAX_BODY_BYTES": str(256 * 1024)}
    with candor_stack(model_path, arguments=arguments, environ=environ) as running:
        door = Door(running, NAME)
        yield door
        door.close()


@pytest.fixture
def scripted_door(scripted: Running) -> Iterator[Door]:
    """A client of `scripted`."""
    door = Door(scripted, NAME)
    yield door
    door.close()


def test_b286_what_the_store_cannot_hold_is_refused_and_blocks_nobody(cramped: Door) -> None:
    """The context is never longer than the store, so no prompt can fit the one and not the other."""
    said = complaints(cramped.stack)
    limit = cramped.body(TOKENIZE, prompt="x")["max_model_len"]
    assert limit <= KV_TOKENS
    for tokens in (KV_TOKENS + 50, KV_TOKENS):
        message = cramped.refused(COMPLETION, prompt=[504] * tokens, max_tokens=4)
        assert f"maximum context length is {limit} tokens" in message
    assert cramped.complete("hi", max_tokens=4, ignore_eos=True).finish_reason == "length"

    async def crowd() -> list[httpx.Response]:
        async with client_of(cramped.stack) as client:
            big = {"model": NAME, "max_tokens": 40, "ignore_eos": True, "seed": 1}
            return await asyncio.gather(
                *(
                    client.post(COMPLETION, json={**big, "prompt": [504 + i] * (limit - 60)})
                    for i in range(6)
                )
            )

    for reply in asyncio.run(crowd()):
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 40
    assert complaints(cramped.stack) == said


@pytest.mark.parametrize("is_chunked", [False, True], ids=["content-length", "chunked"])
def test_b084_the_limit_of_bodies_is_the_documented_one(cramped: Door, is_chunked: bool) -> None:
    limit = 256 * 1024

    def reply_to(size: int) -> httpx.Response:
        head = b'{"model":"synthetic","prompt":"hi","max_tokens":1,"user":"'
        raw = head + b"u" * (size - len(head) - 2) + b'"}'
        parts = (raw[i : i + 10_000] for i in range(0, len(raw), 10_000))
        content: Any = parts if is_chunked else raw
        headers = {"content-type": "application/json"}
        return httpx.post(
            cramped.stack.url + COMPLETION, content=content, headers=headers, trust_env=False
        )

    assert reply_to(limit - 1024).status_code == 200
    over = reply_to(limit + 1024)
    assert over.status_code == 413 and str(limit) in over.json()["message"]
    assert reply_to(limit).status_code == 200


async def test_b011_b094_b264_deep_nesting_is_refused_and_disturbs_no_stream(
    scripted: Running,
) -> None:
    before = processes(scripted)
    head = b'{"model":"synthetic","messages":[{"role":"user","content":"hi"}],'
    deep = [
        head + b'"tools":' + b"[" * 3000 + b"]" * 3000 + b"}",
        head + b'"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        head + b'"logit_bias":' + b'{"1":' * 10_000 + b"1" + b"}" * 10_001,
        b'{"model":"synthetic","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        head + b'"chat_template_kwargs":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    ]
    async with client_of(scripted) as client:
        request = body(NAME, 1, max_tokens=400, ignore_eos=True)
        running = asyncio.create_task(stream(client, request))
        for raw in deep * 3:
            reply = await client.post(
                CHAT, content=raw, headers={"content-type": "application/json"}
            )
            assert reply.status_code == 400 and "Nested too deeply" in reply.json()["message"]
        got = await running
        assert (got.done, got.completion_tokens, got.reasons) == (1, 400, ["length"])
    assert processes(scripted) == before


def test_b019_a_bias_for_every_token_costs_less_than_a_second(
    scripted: Running, scripted_door: Door
) -> None:
    """Counted in time of the processors, which what else the host does cannot lengthen."""
    pids = [pid for found in processes(scripted).values() for pid in found]

    def spent() -> float:
        return sum(map(cpu_seconds, pids))

    before = spent()
    bias = {str(i): -1 for i in range(49_000)}
    fields = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert scripted_door.complete("hi", logit_bias=bias, **fields).finish_reason == "length"
    assert spent() - before < 1.0
    before = spent()
    many = {str(i): -1 for i in range(400_000)}
    assert scripted_door.send(COMPLETION, {"prompt": "hi", "logit_bias": many}).status_code == 400
    assert spent() - before < 1.0


def test_b235_the_largest_seeds_reach_the_worker(scripted: Running, scripted_door: Door) -> None:
    before = processes(scripted)
    fields = {"max_tokens": 5, "temperature": 1}
    found = {
        scripted_door.complete("hi", seed=seed, **fields).text
        for seed in (2**63 - 1, -(2**63), 0, 1, -2, 2**53 + 1)
    }
    assert len(found) > 3
    for raw in (b"9223372036854775808", b"18446744073709551616", b"1.5", b"1e400"):
        sent = b'{"model":"synthetic","prompt":"hi","max_tokens":2,"seed":' + raw + b"}"
        assert scripted_door.send(COMPLETION, sent).status_code == 400, raw
    assert processes(scripted) == before


def test_b047_b284_a_server_that_generates_refuses_embeddings(scripted_door: Door) -> None:
    for form in ("base64", "float", "hex"):
        message = scripted_door.refused(EMBEDDING, input="hello", encoding_format=form)
        assert message == "Embedding API disabled" or "'float' or 'base64'" in message


def test_a_refusal_is_an_error_object_whatever_the_body(scripted_door: Door) -> None:
    for raw in (b"", b"null", b"[]", b"1", b'"x"', b"{", b"{not json", b"\xff\xfe", b"{}"):
        for path in (CHAT, COMPLETION, EMBEDDING, TOKENIZE):
            reply = scripted_door.send(path, raw)
            assert reply.status_code == 400, (path, raw)
            assert json.loads(reply.text)["object"] == "error"
