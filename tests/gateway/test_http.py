"""The door: ids, keys, CORS, sizes, framework errors, probes. Over real loopback HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import httpx
import pytest

from candor import errors
from tests.fakes.gateway import FakeScheduler, Stack, failed, gateway, socket_to

CHAT = {"model": "MODEL", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def client(stack: Stack, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=10, **options)


# --- infrastructure ----------------------------------------------------------------------------------


async def test_health_version_and_framework_errors() -> None:
    async with gateway() as stack, client(stack) as http:
        health = await http.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        assert "content-type" not in health.headers
        assert list((await http.get("/version")).json()) == ["version"]
        assert (await http.get("/nope")).json() == {"detail": "Not Found"}
        wrong = await http.get("/v1/chat/completions")
        assert wrong.json() == {"detail": "Method Not Allowed"} and wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert (await http.head("/health")).status_code == 405
        assert (await http.get("/v1/models/MODEL")).status_code == 404
        assert (await http.post("/v1/tokenize", json={})).status_code == 404
        slash = await http.post("/v1/chat/completions/", json=CHAT)
        assert slash.status_code == 307
        assert slash.headers["location"].endswith("/v1/chat/completions")
        assert slash.headers["x-candor-request-id"]


async def test_models_lists_every_name() -> None:
    async with gateway() as stack, client(stack) as http:
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(c["id"], c["root"], c["max_model_len"]) for c in cards] == [
            ("MODEL", "MODEL", 512),
            ("MODEL-ALIAS", "MODEL", 512),
        ]
        assert list(cards[0]) == [
            "id",
            "object",
            "created",
            "owned_by",
            "root",
            "parent",
            "max_model_len",
            "permission",
        ]
        named = (await http.get("/vllm-0.5/v1/models")).json()
        assert [c["id"] for c in named["data"]] == ["MODEL", "MODEL-ALIAS"]


async def test_readiness_says_what_is_missing() -> None:
    async with gateway() as stack, client(stack) as http:
        reply = await http.get("/health/ready")
        assert reply.status_code == 200
        assert reply.json() == {
            "status": "ready",
            "tokenizer": "ok",
            "scheduler": "ok",
            "stream": "ok",
            "workers": [{"id": "w0", "model": "MODEL", "card": "cpu", "state": "ready"}],
        }
    async with (
        gateway(wait=False, scheduler_at="127.0.0.1:9", probe_timeout_s=0.5) as stack,
        client(stack) as http,
    ):
        reply = await http.get("/health/ready")
        assert reply.status_code == 503
        body = reply.json()
        assert body["status"] == "not ready" and body["tokenizer"] == "ok"
        assert "127.0.0.1:9" in body["scheduler"] and body["stream"] == "not connected"


async def test_without_scheduler_or_tokenizer_the_answer_is_503_in_the_dialects_shape() -> None:
    for missing in ("scheduler_at", "tokenizer_at"):
        settings: dict[str, Any] = {missing: "127.0.0.1:9", "rpc_timeout_s": 0.5}
        async with gateway(wait=False, **settings) as stack, client(stack) as http:
            reply = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert reply.status_code == 503, missing
            assert list(reply.json()) == ["object", "message", "type", "param", "code"]
            assert missing.removesuffix("_at") in reply.json()["message"]
            assert int(reply.headers["retry-after"]) >= 1


async def test_metrics_show_both_families_and_no_request_ids() -> None:
    async with gateway() as stack, client(stack) as http:
        await http.post(
            "/v1/chat/completions", json={**CHAT, "n": 2}, headers={"x-request-id": "zebra"}
        )
        for path in ("/metrics", "/metrics/", "/metrics/deeper"):
            reply = await http.get(path)
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = reply.text.splitlines()
        for line in (
            'vllm:num_requests_running{model_name="MODEL"} 3.0',
            'vllm:num_requests_waiting{model_name="MODEL"} 3.0',
            'vllm:gpu_cache_usage_perc{model_name="MODEL"} 0.25',
            'vllm:generation_tokens_total{model_name="MODEL"} 4.0',
            'vllm:request_success_total{finished_reason="length",model_name="MODEL"} 2.0',
            'vllm:time_to_first_token_seconds_count{model_name="MODEL"} 1.0',
            'vllm:request_params_n_bucket{le="2.0",model_name="MODEL"} 1.0',
            'candor_workers{state="ready"} 1.0',
            "candor_queue_requests 2.0",
            'candor_worker_slots{card="cpu",model="MODEL",worker="w0"} 8.0',
            'candor_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        ):
            assert line in lines, line
        assert "zebra" not in reply.text


async def test_the_openapi_document_describes_the_bodies() -> None:
    async with gateway() as stack, client(stack) as http:
        document = (await http.get("/openapi.json")).json()
        post = document["paths"]["/v1/chat/completions"]["post"]
        name = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        properties = document["components"]["schemas"][name]["properties"]
        assert {"messages", "model", "temperature", "guided_json"} <= set(properties)
        references = set(_references(document))
        assert references and references <= {
            f"#/components/schemas/{n}" for n in document["components"]["schemas"]
        }
        assert (await http.get("/docs")).status_code == 200


def _references(node: Any) -> Any:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


async def test_compat_lists_every_endpoint() -> None:
    async with gateway() as stack, client(stack) as http:
        body = (await http.get("/v1/compat")).json()
        assert body["dialect"] == "vllm-0.5"
        assert "POST /v1/chat/completions" in body["endpoints"]


# --- request id and log ------------------------------------------------------------------------------


async def test_the_request_id_is_taken_or_made_and_is_on_every_response_and_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    fake = FakeScheduler()
    async with gateway(fake, api_key=("KEY",)) as stack, client(stack) as http:
        given = {"x-request-id": "abc-1", "authorization": "Bearer KEY"}
        for reply in (
            await http.post("/v1/chat/completions", json=CHAT, headers=given),
            await http.get("/v1/models", headers={"x-request-id": "abc-1"}),  # 401
            await http.get("/nope", headers=given),
            await http.post("/v1/completions", content=b"{", headers=given),
        ):
            assert reply.headers["x-candor-request-id"] == "abc-1", reply.status_code
            assert "x-request-id" not in reply.headers
        made = (await http.get("/health")).headers["x-candor-request-id"]
        assert len(made) == 32
        for bad in ("x" * 129, "with space", 'quo"te'):
            reply = await http.get("/health", headers={"x-request-id": bad})
            assert reply.headers["x-candor-request-id"] not in (bad, made)
    assert fake.submitted[0].request_id.startswith("abc-1.")
    lines = [r for r in caplog.records if r.name == "gateway.access"]
    first = lines[0]
    assert (first.method, first.path, first.status) == ("POST", "/v1/chat/completions", 200)  # type: ignore[attr-defined]
    assert "hi" not in json.dumps(vars(first), default=str).replace("hit", "")


async def test_the_header_names_of_the_request_id_are_a_setting() -> None:
    names = ("x-request-id", "x-trace")
    async with gateway(request_id_headers=names) as stack, client(stack) as http:
        reply = await http.get("/version", headers={"x-request-id": "abc"})
        assert reply.headers["x-request-id"] == reply.headers["x-trace"] == "abc"


# --- keys and CORS -----------------------------------------------------------------------------------


async def test_api_keys() -> None:
    async with gateway(api_key=("KEY", "OTHER")) as stack, client(stack) as http:

        async def status(path: str, value: str | None = None, method: str = "GET") -> int:
            headers = {} if value is None else {"authorization": value}
            return (await http.request(method, path, headers=headers)).status_code

        assert await status("/v1/models", "Bearer KEY") == 200
        assert await status("/v1/models", "Bearer OTHER") == 200
        for wrong in (None, "bearer KEY", "Bearer  KEY", "Bearer KE", "KEY", "Basic KEY"):
            assert await status("/v1/models", wrong) == 401, wrong
        for guarded in ("/v1/nope", "/v1nope", "/vllm-0.5/v1/models", "/%761/models"):
            assert await status(guarded) == 401, guarded
        for open_path in ("/health", "/version", "/metrics", "/docs", "/openapi.json"):
            assert await status(open_path) == 200, open_path
        assert await status("/v1/models", method="OPTIONS") == 405
        refused = await http.post(
            "/v1/chat/completions", json={"foo": 1}, headers={"origin": "http://x"}
        )
        assert refused.json() == {"error": "Unauthorized"} and refused.status_code == 401
        assert not [h for h in refused.headers if h.startswith(("access-control", "www-auth"))]


async def test_the_root_path_is_no_way_around_the_key() -> None:
    async with gateway(api_key=("KEY",), root_path="/x") as stack, client(stack) as http:
        for path in ("/v1/models", "/x/v1/models", "/x/vllm-0.5/v1/models"):
            assert (await http.get(path)).status_code == 401, path
            allowed = await http.get(path, headers={"authorization": "Bearer KEY"})
            assert allowed.status_code == 200, path
        assert (await http.get("/openapi.json")).json()["servers"] == [{"url": "/x"}]


async def test_cors_preflight_needs_no_key() -> None:
    async with gateway(api_key=("KEY",)) as stack, client(stack) as http:
        asked = {
            "origin": "http://localhost:3000",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        reply = await http.options("/v1/chat/completions", headers=asked)
        assert (reply.status_code, reply.text) == (200, "OK")
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "access-control-allow-credentials" not in reply.headers
        ok = await http.get(
            "/v1/models", headers={"origin": "http://x", "authorization": "Bearer KEY"}
        )
        assert ok.headers["access-control-allow-origin"] == "*"


async def test_cors_settings() -> None:
    settings: dict[str, Any] = {"allowed_origins": ("http://a",), "allow_credentials": True}
    async with gateway(**settings) as stack, client(stack) as http:
        good = await http.get("/health", headers={"origin": "http://a"})
        assert good.headers["access-control-allow-origin"] == "http://a"
        assert good.headers["access-control-allow-credentials"] == "true"
        bad = await http.get("/health", headers={"origin": "http://b"})
        assert "access-control-allow-origin" not in bad.headers


# --- sizes -------------------------------------------------------------------------------------------


async def test_a_body_above_the_limit_is_413_and_names_the_limit() -> None:
    limit = 64 * 1024
    async with gateway(max_body_bytes=limit) as stack, client(stack) as http:

        def body(size: int) -> bytes:
            frame = json.dumps({**CHAT, "user": ""}).encode()
            return frame.replace(b'"user": ""', b'"user": "%s"' % (b"u" * (size - len(frame))))

        async def parts(data: bytes) -> Any:
            for i in range(0, len(data), 10_000):
                yield data[i : i + 10_000]

        for as_stream in (False, True):
            for size, status in ((limit, 200), (limit + 1, 413)):
                content = parts(body(size)) if as_stream else body(size)
                reply = await http.post("/v1/chat/completions", content=content)
                assert reply.status_code == status, (as_stream, size)
                if status == 413:
                    assert str(limit) in reply.json()["message"]
                    assert reply.json()["code"] == 413
        assert (await http.get("/health")).status_code == 200


async def test_a_body_that_stops_is_given_up() -> None:
    async with gateway(body_timeout_s=0.05) as stack, socket_to(stack) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        assert b" 408 " in head


async def test_a_head_that_does_not_end_is_given_up() -> None:
    for sent in (b"", b"GET /health HTTP/1.1\r\nhost:"):
        async with gateway(head_timeout_s=0.05) as stack, socket_to(stack) as (reader, writer):
            if sent:
                # A head that came does not hold up the next one's clock.
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                writer.write(sent)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""


@pytest.mark.parametrize("ends", [True, False])
async def test_headers_above_the_limit_are_431(ends: bool) -> None:
    line = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    async with gateway(max_header_bytes=4096) as stack:
        async with socket_to(stack) as (reader, writer):
            writer.write(line + b"x-a: " + b"a" * 5000 + (b"\r\n\r\n" if ends else b""))
            data = await asyncio.wait_for(reader.read(), 5)
            assert data.startswith(b"HTTP/1.1 431 ") and b"4096" in data
        # Many requests on one connection do not add up to one large head.
        async with socket_to(stack) as (reader, writer):
            for _ in range(8):
                writer.write(line + b"x-a: " + b"a" * 1000 + b"\r\n\r\n")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                assert b" 200 " in head


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (errors.ResourceExhausted("the queue is full", retry_after_s=2.1), 429, "3"),
        (errors.ResourceExhausted("the queue is full"), 429, "1"),
        (errors.InvalidArgument("no such grammar"), 400, None),
        (errors.Unavailable("no worker", retry_after_s=0.2), 503, "1"),
        (errors.DeadlineExceeded("too late"), 504, None),
        (errors.Unimplemented("no beam search here"), 501, None),
    ],
)
async def test_a_refusal_before_the_first_delta_is_an_http_status(
    stream: bool, error: errors.CandorError, status: int, retry_after: str | None
) -> None:
    async with (
        gateway(FakeScheduler(lambda _: [[failed(error)]])) as stack,
        client(stack) as http,
    ):
        for path, extra in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"model": "MODEL", "prompt": "x"}),
        ):
            reply = await http.post(path, json={**extra, "stream": stream})
            assert reply.status_code == status
            assert reply.headers["content-type"] == "application/json"
            assert list(reply.json()) == ["object", "message", "type", "param", "code"]
            assert reply.json()["message"] == error.message
            assert reply.headers.get("retry-after") == retry_after


async def test_a_fault_of_ours_keeps_its_details_and_the_server_goes_on() -> None:
    broken = errors.Internal("stack trace of the worker")
    async with (
        gateway(FakeScheduler(lambda _: [[failed(broken)]])) as stack,
        client(stack) as http,
    ):
        reply = await http.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 500 and "stack trace" not in reply.text
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_bug_is_a_500_in_the_dialects_shape_and_is_logged_once(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    async with gateway() as stack, client(stack) as http:
        monkeypatch.setattr(stack.server.application.tokenizer, "encode_chat", broken)
        body = {k: v for k, v in CHAT.items() if path != "/tokenize" or k != "max_tokens"}
        reply = await http.post(path, json=body)
        assert reply.status_code == 500
        assert list(reply.json()) == ["object", "message", "type", "param", "code"]
        assert "secret" not in reply.text
        assert reply.headers["x-candor-request-id"]
    logged = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(logged) == 1 and logged[0].exc_info is not None
