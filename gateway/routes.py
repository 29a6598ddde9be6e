"""The paths. Each handler reads the body, lets the dialect parse it and hands over to the flow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from candor import __version__, errors
from gateway import metrics as exposition
from gateway.catalog import Catalog, Stats
from gateway.clients import SchedulerClient, TokenizerClient
from gateway.config import Config
from gateway.dialects import DetokenizeCall, Dialect, EmbeddingCall, GenerationCall, TokenizeCall
from gateway.directory import Directory
from gateway.flow import JSON_HEADERS, Flow
from gateway.limits import read_body
from gateway.metrics import Metrics
from gateway.replies import Exchange, Outlet

log = logging.getLogger("gateway.routes")

_NAMES = {
    "/v1/chat/completions": ("Create a chat completion", "ChatRequest"),
    "/v1/completions": ("Create a completion", "CompletionRequest"),
    "/v1/embeddings": ("Create embeddings", "EmbeddingRequest"),
    "/tokenize": ("Text or conversation to token ids", "TokenizeRequest"),
    "/detokenize": ("Token ids to text", "DetokenizeRequest"),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions")


class Api:
    """The handlers of one dialect."""

    def __init__(self, config: Config, flow: Flow) -> None:
        self._config, self._flow = config, flow
        self._dialect: Dialect = flow.dialect

    def router(self, *, outside_v1: bool) -> APIRouter:
        """The routes under /v1, and those that this server has beside it."""
        router = APIRouter()
        self._post(router, "/v1/chat/completions", self.chat)
        self._post(router, "/v1/completions", self.completions)
        self._post(router, "/v1/embeddings", self.embeddings)
        _get(router, "/v1/models", self.models)
        _get(router, "/v1/compat", self.compat)
        if outside_v1:
            self._post(router, "/tokenize", self.tokenize)
            self._post(router, "/detokenize", self.detokenize)
        return router

    def _post(self, router: APIRouter, path: str, handler: Callable[..., Any]) -> None:
        summary, schema = _NAMES[path]
        content = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
        body = {"required": True, "content": {"application/json": content}}
        error = {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}
        answers = {"application/json": {"schema": {"type": "object"}}}
        if path in _STREAMED:
            answers["text/event-stream"] = {"schema": {"type": "string"}}
        replies = {
            "200": {"content": answers},
            "401": {"description": "No key, or a wrong one"},
            "default": {"description": "Refusal", "content": {"application/json": error}},
        }
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            summary=summary,
            response_class=Response,
            openapi_extra={"requestBody": body, "responses": replies},
        )

    async def chat(self, request: Request) -> Response:
        """Messages in, a message out: JSON, or SSE when `stream` is true."""
        return self._generate(await self._parsed(request, self._dialect.chat))

    async def completions(self, request: Request) -> Response:
        """Prompts in, text out: JSON, or SSE when `stream` is true."""
        return self._generate(await self._parsed(request, self._dialect.completion))

    async def embeddings(self, request: Request) -> Response:
        """Texts in, vectors out."""
        call: EmbeddingCall = await self._parsed(request, self._dialect.embedding)

        async def work(outlet: Outlet) -> None:
            await outlet.whole(200, JSON_HEADERS, await self._flow.embed(call))

        return self._exchange(work)

    async def tokenize(self, request: Request) -> Response:
        """The token ids that generation would start from."""
        call: TokenizeCall = await self._parsed(request, self._dialect.tokenize)
        return _json(await self._flow.tokenize(call))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens shown."""
        call: DetokenizeCall = await self._parsed(request, self._dialect.detokenize)
        return _json(await self._flow.detokenize(call))

    async def models(self) -> Response:
        """Every name that requests may use."""
        return _json(await self._flow.models())

    async def compat(self) -> Response:
        """Every field of every endpoint: status, rule, proof."""
        return _json(self._dialect.compat())

    async def _parsed(self, request: Request, parse: Callable[[bytes, str | None], Any]) -> Any:
        raw = await read_body(
            request.receive,
            request.scope["headers"],
            limit=self._config.max_body_bytes,
            timeout_s=self._config.body_timeout_s,
        )
        return parse(raw, request.headers.get("content-type"))

    def _generate(self, call: GenerationCall) -> Response:
        return self._exchange(lambda outlet: self._flow.generate(call, outlet))

    def _exchange(self, work: Callable[[Outlet], Any]) -> Response:
        async def guarded(outlet: Outlet) -> None:
            try:
                await work(outlet)
            except Exception as error:
                if outlet.has_started:
                    raise
                if not isinstance(error, errors.CandorError | self._dialect.error_type):
                    log.exception("unhandled error")
                await outlet.whole(*refusal(self._dialect, error))

        return Exchange(guarded)


class Operations:
    """What operators and probes ask: health, readiness, version, metrics."""

    def __init__(
        self,
        config: Config,
        tokenizer: TokenizerClient,
        scheduler: SchedulerClient,
        directory: Directory,
        metrics: Metrics,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._tokenizer, self._scheduler, self._directory = tokenizer, scheduler, directory
        self.is_draining = False

    def router(self) -> APIRouter:
        """The routes that no dialect has a say in."""
        router = APIRouter()
        _get(router, "/health", self.health)
        _get(router, "/health/ready", self.ready)
        _get(router, "/version", self.version)
        _get(router, "/metrics", self.metrics)
        _get(router, "/metrics/{rest:path}", self.metrics, is_listed=False)
        return router

    async def health(self) -> Response:
        """200 with nothing in it while the process lives."""
        return Response()

    async def version(self) -> Response:
        """The version of this software."""
        return _render({"version": __version__}, 200)

    async def ready(self) -> Response:
        """200 when requests can be served, else 503; either way the state of every part."""
        timeout_s = self._config.probe_timeout_s
        tokenizer, stats = await asyncio.gather(
            _state(self._tokenizer.describe(timeout_s)), _state(self._scheduler.stats(timeout_s))
        )
        workers = stats.workers if isinstance(stats, Stats) else ()
        parts: dict[str, Any] = {
            "tokenizer": tokenizer if isinstance(tokenizer, str) else "ok",
            "scheduler": stats if isinstance(stats, str) else "ok",
            "stream": "ok" if self._scheduler.is_connected else "not connected",
            "workers": [
                {"id": w.worker_id, "model": w.model, "card": w.card, "state": w.state}
                for w in workers
            ],
        }
        names = ("tokenizer", "scheduler", "stream")
        is_ready = all(parts[name] == "ok" for name in names) and not self.is_draining
        is_ready = is_ready and any(w.state == "ready" for w in workers)
        status = "draining" if self.is_draining else "ready" if is_ready else "not ready"
        return _render({"status": status, **parts}, 200 if is_ready else 503)

    async def metrics(self) -> Response:
        """Prometheus text."""
        stats = await _state(self._scheduler.stats(self._config.probe_timeout_s))
        try:
            catalog = await self._directory.get()
        except errors.CandorError:
            catalog = Catalog(())
        text = self._metrics.render(catalog, stats if isinstance(stats, Stats) else None)
        return Response(text, headers={"content-type": exposition.CONTENT_TYPE})


def _get(
    router: APIRouter, path: str, handler: Callable[..., Any], *, is_listed: bool = True
) -> None:
    router.add_api_route(
        path, handler, methods=["GET"], response_class=Response, include_in_schema=is_listed
    )


def refusal(dialect: Dialect, error: Exception) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an error response in the dialect's shape."""
    reply = dialect.refusal(error)
    if reply.status >= 500 and isinstance(error, errors.CandorError):
        # The client is told little of our own faults, so the whole of it goes to the log.
        level = logging.ERROR if reply.status == 500 else logging.WARNING
        log.log(level, "failed: %s", error.message, extra={"reason": error.reason})
    headers = list(JSON_HEADERS)
    if reply.retry_after_s is not None:
        # Whole seconds, rounded up: coming back too early only costs another refusal.
        headers.append((b"retry-after", b"%d" % max(1, -int(-reply.retry_after_s // 1))))
    return reply.status, headers, reply.body


async def _state(question: Any) -> Any:
    """The answer, or in words why there is none."""
    try:
        return await question
    except errors.CandorError as error:
        return error.message


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _render(value: Mapping[str, Any], status: int) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
