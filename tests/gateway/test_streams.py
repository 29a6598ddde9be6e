"""Answers over real loopback HTTP: equality of stream and body, endings, cancelling, slow clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from candor import errors
from candor.v1 import inference_pb2 as pb
from tests.fakes.gateway import (
    FakeScheduler,
    Stack,
    Step,
    babble,
    decode,
    delta,
    encode,
    ended,
    failed,
    finished,
    gateway,
    socket_to,
)

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "MODEL", "messages": MESSAGES, "max_tokens": 4, "seed": 1}
TEXT = {"model": "MODEL", "prompt": "hi", "max_tokens": 4, "seed": 1}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "text": ("/v1/completions", TEXT)}


def client(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=10)


def parse(text: str) -> list[Any]:
    """The events' JSON; the last one must be [DONE] and nothing else may be in the stream."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(p.startswith("data: ") and "\n" not in p for p in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(p[6:]) for p in parts]


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    reply = await http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse(reply.text)


async def plain(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    return reply.json()


# --- shape -------------------------------------------------------------------------------------------


async def test_the_official_client_works_unchanged() -> None:
    async with (
        gateway(api_key=("KEY",)) as stack,
        openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1",
            api_key="KEY",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as api,
    ):
        assert [m.id async for m in api.models.list()] == ["MODEL", "MODEL-ALIAS"]
        chat = await api.chat.completions.create(
            model="MODEL",
            messages=MESSAGES,
            max_tokens=3,
            logprobs=True,
            top_logprobs=2,
            seed=3,
        )
        content = chat.choices[0].message.content
        assert content is not None and len(content) == 3
        assert chat.usage is not None and chat.usage.completion_tokens == 3
        assert chat.choices[0].logprobs is not None
        tokens = chat.choices[0].logprobs.content or []
        assert "".join(t.token for t in tokens) == content
        assert [len(t.top_logprobs) for t in tokens] == [2, 2, 2]
        stream = await api.chat.completions.create(
            model="MODEL-ALIAS",
            messages=MESSAGES,
            max_tokens=3,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, total = "", 0
        async for chunk in stream:
            assert chunk.model == "MODEL"
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            else:
                assert chunk.usage is not None
                total = chunk.usage.completion_tokens
        assert text == content and total == 3
        completion = await api.completions.create(
            model="MODEL", prompt=["a", "b"], max_tokens=2, n=2, logprobs=1, echo=True, seed=1
        )
        assert [c.index for c in completion.choices] == [0, 1, 2, 3]
        assert completion.choices[2].text.startswith("b")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await api.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await api.chat.completions.create(model="MODEL", messages=MESSAGES, n=0)
        with pytest.raises(openai.BadRequestError, match="Embedding API disabled"):
            await api.embeddings.create(model="MODEL", input="x")


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_one_identity_over_the_stream_and_another_for_the_next(kind: str) -> None:
    path, body = PATHS[kind]
    body = {**body, "n": 2, "stream_options": {"include_usage": True}}
    async with gateway() as stack, client(stack) as http:
        first, second = await streamed(http, path, body), await streamed(http, path, body)
        for key in ("id", "created", "model", "object"):
            assert len({c[key] for c in first}) == 1
        assert isinstance(first[0]["created"], int)
        assert first[0]["id"] != second[0]["id"]


async def test_every_chat_chunk_is_whole() -> None:
    async with gateway() as stack, client(stack) as http:
        chunks = await streamed(http, "/v1/chat/completions", {**CHAT, "n": 2})
        assert [c["choices"][0]["delta"] for c in chunks[:2]] == [{"role": "assistant"}] * 2
        for chunk in chunks:
            assert list(chunk) == ["id", "object", "created", "model", "choices"]
            (choice,) = chunk["choices"]
            assert isinstance(choice["delta"], dict)
            assert {"index", "delta", "logprobs", "finish_reason"} <= set(choice)
        ends = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
        assert [(e["index"], e["finish_reason"]) for e in ends] == [(0, "length"), (1, "length")]
        assert len(chunks) == 2 + 2 * 4


async def test_a_finish_without_text_is_still_told() -> None:
    steps = [[delta(0, "ok"), delta(0, "", ids=[257], end=ended("stop")), finished()]]
    async with gateway(FakeScheduler(lambda _: steps)) as stack, client(stack) as http:
        last = (await streamed(http, "/v1/chat/completions", CHAT))[-1]["choices"][0]
        assert last == {
            "index": 0,
            "delta": {"content": ""},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }


async def test_absent_and_null_stream_options_are_the_same() -> None:
    async with gateway() as stack, client(stack) as http:
        for extra in ({}, {"stream_options": None}):
            chunks = await streamed(http, "/v1/chat/completions", {**CHAT, **extra})
            assert all("usage" not in c for c in chunks)
        assert (await http.get("/health")).status_code == 200


async def test_settings_that_show_in_answers() -> None:
    options: dict[str, Any] = {"response_role": "bot", "return_tokens_as_token_ids": True}
    async with gateway(**options) as stack, client(stack) as http:
        body = {**CHAT, "logprobs": True, "top_logprobs": 1}
        whole = await plain(http, "/v1/chat/completions", body)
        assert whole["choices"][0]["message"]["role"] == "bot"
        entry = whole["choices"][0]["logprobs"]["content"][0]
        assert entry["token"] == f"token_id:{entry['bytes'][0]}"
        chunks = await streamed(http, "/v1/chat/completions", body)
        assert chunks[0]["choices"][0]["delta"] == {"role": "bot"}
        text = await plain(http, "/v1/completions", {**TEXT, "logprobs": 0})
        assert text["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


async def test_the_server_template_stands_in_for_the_models_own() -> None:
    async with gateway(chat_template="{server}") as stack, client(stack) as http:
        await plain(http, "/v1/chat/completions", CHAT)
        await plain(http, "/v1/chat/completions", {**CHAT, "chat_template": "{mine}"})
        rows = [decode(r.prompt.token_ids.ids) for r in stack.scheduler.submitted]
        assert rows == ["{server}user:hi|assistant:", "{mine}user:hi|assistant:"]
        tokenized = await plain(http, "/tokenize", {"model": "MODEL", "messages": MESSAGES})
        assert tokenized["tokens"] == encode(rows[0], bos=False)


async def test_echo_with_its_variants() -> None:
    async with gateway() as stack, client(stack) as http:
        base = {**TEXT, "echo": True, "max_tokens": 2}
        for prompt, shown in (("hé", "hé"), ([104, 256, 105], "h<s>i"), (["a", "b"], "a")):
            body = {**base, "prompt": prompt}
            whole = await plain(http, "/v1/completions", body)
            assert whole["choices"][0]["text"].startswith(shown)
            assert whole["choices"][0]["logprobs"] is None
            assert whole["choices"][0]["prompt_logprobs"] is None
            chunks = await streamed(http, "/v1/completions", body)
            mine = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == 0]
            assert "".join(mine) == whole["choices"][0]["text"]
        alone = await plain(http, "/v1/completions", {**base, "max_tokens": 0})
        assert alone["choices"][0]["text"] == "hi" and alone["usage"]["completion_tokens"] == 1
        (only,) = await streamed(http, "/v1/completions", {**base, "max_tokens": 0})
        assert only["choices"][0]["text"] == "hi"
        assert only["choices"][0]["finish_reason"] == "length"
        scored = await plain(http, "/v1/completions", {**base, "logprobs": 1})
        lists = scored["choices"][0]["logprobs"]
        assert lists["tokens"][:3] == ["<s>", "h", "i"] and lists["token_logprobs"][0] is None
        assert len(lists["tokens"]) == 3 + 2
        assert len(scored["choices"][0]["prompt_logprobs"]) == 3
        # The original text, though the prompt was cut.
        cut = await plain(http, "/v1/completions", {**base, "truncate_prompt_tokens": 2})
        assert cut["choices"][0]["text"].startswith("hi") and cut["usage"]["prompt_tokens"] == 2


async def test_ranked_answers() -> None:
    def script(request: pb.GenerateRequest) -> Iterator[Step]:
        for choice, (text, score) in enumerate([("aa", -9.0), ("bb", -1.0), ("cc", -4.0)]):
            yield [delta(choice, text[0]), delta(choice, text[1], end=ended(score=score))]
        yield [finished()]

    async with gateway(FakeScheduler(script)) as stack, client(stack) as http:
        ranked = {"n": 2, "best_of": 3, "temperature": 1.0}
        whole = await plain(http, "/v1/chat/completions", {**CHAT, **ranked})
        assert [(c["index"], c["message"]["content"]) for c in whole["choices"]] == [
            (0, "bb"),
            (1, "cc"),
        ]
        assert whole["usage"]["completion_tokens"] == 4
        chunks = await streamed(http, "/v1/chat/completions", {**CHAT, **ranked})
        said = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("content")) for c in chunks]
        assert said == [(0, None), (1, None), (0, "b"), (0, "b"), (1, "c"), (1, "c")]
        (only,) = await streamed(http, "/v1/completions", {**TEXT, **ranked})
        assert [c["text"] for c in only["choices"]] == ["bb", "cc"]
        assert only["usage"]["completion_tokens"] == 4


async def test_named_tools_in_both_forms() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {
        **CHAT,
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    async with gateway() as stack, client(stack) as http:
        whole = await plain(http, "/v1/chat/completions", body)
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        assert whole["choices"][0]["message"]["content"] == ""
        assert whole["choices"][0]["finish_reason"] == "length"
        chunks = await streamed(http, "/v1/chat/completions", body)
        deltas = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks[1:]]
        assert deltas[0]["function"]["name"] == "f" and deltas[0]["type"] == "function"
        joined = "".join(d["function"]["arguments"] for d in deltas)
        assert joined == call["function"]["arguments"]


# --- streamed equals unstreamed ----------------------------------------------------------------------

FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 6),
        "seed": st.integers(0, 99),
        "temperature": st.sampled_from([0.5, 1.0, 1.5]),
        "stop": st.sampled_from([["e"], ["a", "t"]]),
        "stop_token_ids": st.sampled_from([[97], [101, 116]]),
        "min_tokens": st.just(1),
        "logit_bias": st.just({"98": 100}),
        "echo": st.booleans(),
        "ignore_eos": st.booleans(),
    },
)


async def test_stream_and_body_are_equal_whatever_the_fields() -> None:
    async with gateway() as stack, client(stack) as http:
        loop = asyncio.get_running_loop()

        @settings(
            max_examples=60,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        @given(fields=FIELDS, logprobs=st.sampled_from([None, 0, 2]))
        def check(fields: dict[str, Any], logprobs: int | None) -> None:
            run = asyncio.run_coroutine_threadsafe(compare(fields, logprobs), loop)
            run.result(20)

        async def compare(fields: dict[str, Any], logprobs: int | None) -> None:
            for path, base in PATHS.values():
                body = {**base, **fields}
                if logprobs is not None:
                    is_chat = "messages" in body
                    body |= (
                        {"logprobs": True, "top_logprobs": logprobs}
                        if is_chat
                        else {"logprobs": logprobs}
                    )
                whole = await plain(http, path, body)
                options = {"include_usage": True, "continuous_usage_stats": False}
                chunks = await streamed(http, path, {**body, "stream_options": options})
                assert chunks.pop()["usage"] == whole["usage"]
                for choice in whole["choices"]:
                    same(choice, [c["choices"][0] for c in chunks])

        await asyncio.to_thread(check)


def same(choice: dict[str, Any], chunks: list[dict[str, Any]]) -> None:
    """The chunks of this choice add up to it."""
    mine = [c for c in chunks if c["index"] == choice["index"]]
    if "message" in choice:
        text = choice["message"]["content"]
        assert "".join(c["delta"].get("content", "") for c in mine) == text
        entries = [e for c in mine for e in (c["logprobs"] or {"content": []})["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]
    else:
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            joined = [e for c in mine for e in (c["logprobs"] or {key: []})[key]]
            assert joined == (choice["logprobs"] or {key: []})[key]
    assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
    assert mine[-1]["stop_reason"] == choice["stop_reason"]


# --- endings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.Unavailable("worker-0 is gone"), 503, "worker-0 is gone"),
        (errors.Internal("secret"), 500, "Internal server error"),
        (errors.InvalidArgument("impossible"), 400, "impossible"),
    ],
)
async def test_an_error_after_the_first_delta_is_an_event_and_the_end(
    kind: str, error: errors.CandorError, code: int, said: str
) -> None:
    path, body = PATHS[kind]
    go = asyncio.Event()

    def script(_: pb.GenerateRequest) -> Iterator[Step]:
        yield [delta(0, "a")]
        yield go
        yield [failed(error)]

    async with gateway(FakeScheduler(script)) as stack, client(stack) as http:
        async with http.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            seen = ""
            async for part in reply.aiter_text():
                seen += part
                go.set()
        *chunks, last = parse(seen)
        assert chunks and list(last) == ["error"]
        assert last["error"]["message"] == said and last["error"]["code"] == code
        assert list(last["error"]) == ["object", "message", "type", "param", "code"]
        # The answer that is not streamed has its status still.
        whole = await http.post(path, json=body)
        assert whole.status_code == code and whole.json()["message"] == said


async def test_engine_refusals_of_the_original_are_told_in_band_when_streaming() -> None:
    async with gateway() as stack, client(stack) as http:
        body = {**CHAT, "logprobs": True, "top_logprobs": 21}
        (only,) = await streamed(http, "/v1/chat/completions", body)
        assert only["error"]["message"] == "Cannot request more than 20 logprobs."
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400
        assert stack.scheduler.submitted == []


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_a_wrong_field_of_a_stream_is_a_plain_400(kind: str) -> None:
    path, body = PATHS[kind]
    async with gateway() as stack, client(stack) as http:
        reply = await http.post(path, json={**body, "stream": True, "n": 0})
        assert reply.status_code == 400
        assert reply.headers["content-type"] == "application/json"


async def test_a_scheduler_that_breaks_ends_every_stream() -> None:
    gate = asyncio.Event()
    fake = FakeScheduler(lambda _: [[delta(0, "a")], gate])
    async with gateway(fake) as stack, client(stack) as http:
        async with http.stream("POST", "/v1/completions", json={**TEXT, "stream": True}) as reply:
            parts = reply.aiter_text()
            seen = await anext(parts)
            await fake.drop_streams()
            seen += "".join([part async for part in parts])
        assert parse(seen)[-1]["error"]["code"] == 503
        fake.script = babble
        await stack.server.application.scheduler.wait_connected()
        assert (await plain(http, "/v1/completions", TEXT))["choices"][0]["finish_reason"]


async def test_64_streams_at_once_each_with_one_ending() -> None:
    async with gateway() as stack, client(stack) as http:
        jobs = [
            streamed(http, path, {**body, "seed": i, "max_tokens": i % 7 + 1})
            for i, (path, body) in enumerate(list(PATHS.values()) * 32)
        ]
        for i, chunks in enumerate(await asyncio.gather(*jobs)):
            ends = [c for c in chunks if c["choices"][0]["finish_reason"]]
            assert len(ends) == 1 and ends[0] is chunks[-1]
            assert len(chunks) == i % 7 + 1 + (i % 2 == 0)
        assert stack.scheduler.cancelled == []
        assert stack.server.application.scheduler.num_running == 0
        assert stack.server.application.metrics.open_streams == 0


# --- cancelling --------------------------------------------------------------------------------------


HEAD = b"POST /v1/%s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


def endless(_: pb.GenerateRequest) -> Iterator[Step]:
    yield [delta(0, "a")]
    yield asyncio.Event()


def silent(_: pb.GenerateRequest) -> Iterator[Step]:
    yield asyncio.Event()


@pytest.mark.parametrize(
    ("script", "stream"), [(endless, True), (endless, False), (silent, True), (silent, False)]
)
async def test_a_client_that_leaves_cancels_its_request_at_once(
    script: Callable[[pb.GenerateRequest], Iterator[Step]], stream: bool
) -> None:
    fake = FakeScheduler(script)
    async with gateway(fake) as stack:
        body = json.dumps({**CHAT, "stream": stream}).encode()
        async with socket_to(stack) as (reader, writer):
            writer.write(HEAD % (b"chat/completions", len(body)) + body)
            await fake.wait_for(lambda: len(fake.submitted) == 1)
            if stream and script is endless:
                await reader.readuntil(b'"content":"a"')
        await fake.wait_for(lambda: fake.cancelled == [1], timeout_s=1.0)
        application = stack.server.application
        assert application.scheduler.num_running == 0
        assert application.metrics.open_streams == 0
        assert application.metrics.client_disconnects == 1


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    steps = [[delta(0, "x" * 1000) for _ in range(50)] for _ in range(2000)]
    fake = FakeScheduler(lambda _: steps)
    async with (
        gateway(fake, stream_buffer=200) as stack,
        socket_to(stack, limit=1024) as (reader, writer),
    ):
        body = json.dumps({**TEXT, "stream": True}).encode()
        writer.write(HEAD % (b"completions", len(body)) + body)
        await fake.wait_for(lambda: fake.cancelled == [1])
        # The connection is dropped, so what was buffered for it is freed as well.
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            while True:
                await asyncio.wait_for(reader.readexactly(1024), 5)
        assert stack.server.application.metrics.slow_clients == 1


async def test_drain_lets_running_answers_end() -> None:
    go = asyncio.Event()

    def script(_: pb.GenerateRequest) -> Iterator[Step]:
        yield [delta(0, "a")]
        yield go
        yield [delta(0, "b", end=ended()), finished()]

    async with gateway(FakeScheduler(script), drain_s=5) as stack, client(stack) as http:
        async with http.stream("POST", "/v1/completions", json={**TEXT, "stream": True}) as reply:
            parts = reply.aiter_text()
            seen = await anext(parts)
            stack.server.drain()
            assert (await stack.server.application.operations.ready()).status_code == 503
            go.set()
            seen += "".join([part async for part in parts])
        assert "".join(c["choices"][0]["text"] for c in parse(seen)) == "ab"


# --- the other routes --------------------------------------------------------------------------------


async def test_tokenize_and_detokenize_agree_with_generation() -> None:
    async with gateway() as stack, client(stack) as http:
        body = await plain(http, "/tokenize", {"model": "MODEL", "prompt": "hé"})
        assert list(body.items()) == [
            ("count", 4),
            ("max_model_len", 512),
            ("tokens", [256, 104, 195, 169]),
        ]
        back = await plain(http, "/detokenize", {"model": "MODEL", "tokens": body["tokens"]})
        assert back == {"prompt": "<s>hé"}
        silent_ids = {"model": "MODEL", "tokens": [104, 10**9, 105]}
        assert (await plain(http, "/detokenize", silent_ids)) == {"prompt": "hi"}
        for path, form in (
            ("/v1/completions", {"prompt": "hé"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
        ):
            count = (await plain(http, "/tokenize", {"model": "MODEL", **form}))["count"]
            whole = await plain(http, path, {"model": "MODEL", **form, "max_tokens": 1})
            assert whole["usage"]["prompt_tokens"] == count
        failing = {**CHAT, "chat_template": "raise boom"}
        reply = await http.post("/v1/chat/completions", json=failing)
        assert reply.status_code == 400 and "boom" in reply.json()["message"]


async def test_embeddings() -> None:
    fake = FakeScheduler()
    fake.models[0].kind = pb.MODEL_KIND_EMBEDDING
    async with (
        gateway(fake) as stack,
        client(stack) as http,
        openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1",
            api_key="-",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as api,
    ):
        # The official client asks for base64 and unpacks float32.
        reply = await api.embeddings.create(model="MODEL-ALIAS", input=["ab", "abc"])
        assert [d.embedding for d in reply.data] == [[3.0, 0.5, -1.25], [4.0, 0.5, -1.25]]
        assert reply.model == "MODEL-ALIAS" and reply.usage.prompt_tokens == 7
        body = await plain(http, "/v1/embeddings", {"model": "MODEL", "input": [104, 105]})
        assert list(body) == ["id", "object", "created", "model", "data", "usage"]
        assert body["data"][0]["embedding"] == [2.0, 0.5, -1.25]
        assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
        for path, extra in PATHS.values():
            assert (await http.post(path, json=extra)).status_code == 400
