"""The application: clients opened and closed, middleware in order, errors turned into answers.

From outside in: request id and access log, API key, CORS, routes. The key check sits outside of routing and
of CORS, as the default dialect has it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from candor import __version__, errors, telemetry
from candor.settings import host_port
from gateway.clients import SchedulerClient, TokenizerClient
from gateway.config import Config, template_text
from gateway.dialects import PREFIX, Dialect, Options, open_dialect
from gateway.directory import Directory
from gateway.flow import Flow
from gateway.limits import ApiKeys, bounded_protocol
from gateway.metrics import Metrics
from gateway.replies import CLIENT_GONE
from gateway.routes import Api, Operations, refusal

access = logging.getLogger("gateway.access")
log = logging.getLogger("gateway.app")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_UNAUTHORIZED = b'{"error":"Unauthorized"}'


class Application:
    """Everything of one gateway process, wired."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.tokenizer = TokenizerClient(config.tokenizer, timeout_s=config.rpc_timeout_s)
        self.scheduler = SchedulerClient(
            config.scheduler,
            timeout_s=config.rpc_timeout_s,
            stream_buffer=config.stream_buffer,
            submit_buffer=config.submit_buffer,
        )
        self.directory = Directory(self.scheduler, self.tokenizer, ttl_s=config.models_ttl_s)
        self.dialect = open_dialect(
            config.dialect,
            Options(
                response_role=config.response_role,
                chat_template=template_text(config.chat_template),
                max_logprobs=config.max_logprobs,
                return_tokens_as_token_ids=config.return_tokens_as_token_ids,
            ),
        )
        self.operations = Operations(
            config, self.tokenizer, self.scheduler, self.directory, self.metrics
        )
        self.asgi = Door(self._build(), self)

    def _build(self) -> FastAPI:
        config = self.config
        app = FastAPI(title="Candor", version=__version__, lifespan=self._life)
        flow = Flow(
            config, self.dialect, self.tokenizer, self.scheduler, self.directory, self.metrics
        )
        api = Api(config, flow)
        app.include_router(api.router(outside_v1=True))
        named = api.router(outside_v1=False)
        app.include_router(named, prefix=f"/{self.dialect.name}", include_in_schema=False)
        app.include_router(self.operations.router())
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
        app.add_exception_handler(self.dialect.error_type, self._refuse)
        app.add_exception_handler(errors.CandorError, self._refuse)
        app.add_exception_handler(Exception, self._refuse)
        app.openapi = lambda: _openapi(app, self.dialect, config.root_path)  # type: ignore[method-assign]
        return app

    @asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncIterator[None]:
        await self.scheduler.start()
        try:
            yield
        finally:
            await self.directory.close()
            await self.scheduler.close()
            await self.tokenizer.close()

    async def _refuse(self, request: Request, error: Exception) -> Response:
        status, headers, body = refusal(self.dialect, error)
        response = Response(body, status)
        response.raw_headers[:] = [*headers, (b"content-length", b"%d" % len(body))]
        return response


class Door:
    """The outermost layer: request id, access log, API key, and the last catch of what went wrong."""

    def __init__(self, app: ASGIApp, owner: Application) -> None:
        config = owner.config
        self._app, self._owner = app, owner
        self._keys = ApiKeys(config.api_key)
        self._id_headers = [name.lower().encode() for name in config.request_id_headers]
        self._root_path = config.root_path
        self._guarded = (PREFIX, f"/{owner.dialect.name}{PREFIX}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or turn it away."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["root_path"] = self._root_path
        scope["candor.send"] = send
        rid = _request_id(scope)
        telemetry.request_id.set(rid)
        began_at = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                mine = [(name, rid.encode()) for name in self._id_headers]
                message["headers"] = [*message.get("headers", ()), *mine]
            await send(message)

        try:
            if scope["method"] != "OPTIONS" and not self._may_pass(scope):
                await _answer(send_with_id, 401, _UNAUTHORIZED)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("unhandled error", extra={"path": scope["path"]})
            if not status:
                _, _, body = refusal(self._owner.dialect, error)
                await _answer(send_with_id, 500, body)
        finally:
            self._log(scope, status or CLIENT_GONE, time.perf_counter() - began_at)

    def _may_pass(self, scope: Scope) -> bool:
        # A bare prefix test on the path as the router sees it: with and without the root path.
        path: str = scope["path"]
        bare = path.removeprefix(self._root_path) if self._root_path else path
        is_guarded = path.startswith(self._guarded) or bare.startswith(self._guarded)
        return not is_guarded or self._keys.admits(scope["headers"])

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        # The route, not the path: a label must not be open to the client's invention.
        name = getattr(route, "path", "") or "unknown"
        self._owner.metrics.http_requests[(name, str(status))] += 1
        access.info(
            "request",
            extra={
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(seconds * 1000, 3),
            },
        )


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id where it is a plain, short word; otherwise a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return uuid.uuid4().hex


def _openapi(app: FastAPI, dialect: Dialect, root_path: str) -> dict[str, Any]:
    """The framework's document, with the dialect's request bodies in it."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        if root_path:
            document["servers"] = [{"url": root_path}]
        schemas: Mapping[str, Mapping[str, Any]] = dialect.request_schemas()
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        app.openapi_schema = document
    return app.openapi_schema


class Server(uvicorn.Server):
    """uvicorn whose signals belong to the caller, so that a drained process exits with 0."""

    def __init__(self, config: uvicorn.Config, application: Application) -> None:
        super().__init__(config)
        self.application = application
        self.has_started = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are captured here: see `gateway.__main__`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.has_started.set()

    @property
    def port(self) -> int:
        """The port that is listened on (useful with port 0)."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def drain(self) -> None:
        """Take nothing new and let running answers end within the grace; the second time, end now."""
        if self.should_exit:
            self.force_exit = True
        self.application.operations.is_draining = True
        self.should_exit = True


def make_server(config: Config) -> Server:
    """A server that is ready to `serve()`."""
    application = Application(config)
    host, port = host_port(config.http)
    too_large = errors.InvalidArgument(
        f"the request line and headers are larger than the limit of {config.max_header_bytes} bytes"
    )
    _, _, body = refusal(application.dialect, too_large)
    uvicorn_config = uvicorn.Config(
        application.asgi,
        host=host,
        port=port,
        loop="uvloop",
        http=bounded_protocol(config.max_header_bytes, config.head_timeout_s, body),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        limit_concurrency=config.max_connections,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=config.drain_s,
    )
    return Server(uvicorn_config, application)
