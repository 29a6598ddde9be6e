"""gRPC manners: servers with health and reflection, channels with keepalive, errors both ways.

An exception of `candor.errors` that a handler raises reaches the caller as the same exception, through any
number of hops, as a `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo. Anything else a handler
raises is INTERNAL, is logged once, with the request id, and its text stays here.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from candor import errors, telemetry

log = logging.getLogger("candor.rpc")

ERROR_DOMAIN = "candor"
REQUEST_ID_KEY = "x-request-id"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either way: a frame of prompt logprobs for a long prompt fits, a runaway does not."""

_SHARED_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    # Pings without data are how a dead peer is told from a quiet one; two defaults would forbid them.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
_SERVER_OPTIONS = [*_SHARED_OPTIONS, ("grpc.so_reuseport", 0)]
_CHANNEL_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]


# --- errors ------------------------------------------------------------------------------------------


def to_status(error: BaseException) -> status_pb2.Status:
    """The wire form of an error. Only `CandorError` speaks for itself; the rest is a bare INTERNAL."""
    if isinstance(error, asyncio.CancelledError):
        error = errors.Cancelled("the request was cancelled")
    if not isinstance(error, errors.CandorError):
        error = errors.Internal("internal error")
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=error.message)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata
    )
    _pack(status, info)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> errors.CandorError:
    """The exception that a wire status stands for."""
    try:
        name = code_pb2.Code.Name(status.code)
    except ValueError:
        name = "INTERNAL"
    kind = errors.KINDS.get(name, errors.Internal)
    reason, field, retry, metadata = "", None, None, {}
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info_retry = error_details_pb2.RetryInfo()
            detail.Unpack(info_retry)
            retry = info_retry.retry_delay.ToMilliseconds() / 1000
    return kind(status.message, reason=reason, field=field, retry_after_s=retry, metadata=metadata)


def from_rpc_error(error: grpc.RpcError) -> errors.CandorError:
    """The exception behind a failed call, with or without a rich status."""
    status = rpc_status.from_call(error)
    if status is not None:
        return from_status(status)
    kind = errors.KINDS.get(error.code().name, errors.Internal)
    return kind(error.details() or error.code().name.lower())


def _pack(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call with the wire form of `error`."""
    rich = rpc_status.to_status(to_status(error))
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort returns never")


# --- servers -----------------------------------------------------------------------------------------


class _Manners(grpc.aio.ServerInterceptor):
    """Sets the request id of the call and turns what a handler raises into a status."""

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc."):
            return handler
        metadata = dict(details.invocation_metadata or ())
        rid = metadata.get(REQUEST_ID_KEY) or uuid.uuid4().hex

        def guard_unary(behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def call(request: Any, context: Any) -> Any:
                telemetry.request_id.set(str(rid))
                try:
                    return await behavior(request, context)
                except Exception as error:
                    await _fail(context, error, details.method)

            return call

        def guard_stream(
            behavior: Callable[..., AsyncIterator[Any]],
        ) -> Callable[..., AsyncIterator[Any]]:
            async def call(request: Any, context: Any) -> AsyncIterator[Any]:
                telemetry.request_id.set(str(rid))
                try:
                    async for response in behavior(request, context):
                        yield response
                except Exception as error:
                    await _fail(context, error, details.method)

            return call

        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                guard_unary(handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                guard_stream(handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                guard_unary(handler.stream_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.stream_stream_rpc_method_handler(
            guard_stream(handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )


async def _fail(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, errors.CandorError):
        log.exception("unhandled error", extra={"method": method}, exc_info=error)
    await abort(context, error)


class Server:
    """A gRPC server with health and reflection on.

    Health says NOT_SERVING until `set_serving(True)`, for the server as a whole and for each service.
    """

    def __init__(self, services: Iterable[str]) -> None:
        """`services`: full names (`candor.v1.SchedulerService`) that reflection and health list."""
        self.grpc = grpc.aio.server(interceptors=[_Manners()], options=_SERVER_OPTIONS)
        self._names = ["", *services]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        listed = [*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(listed, self.grpc)

    async def start(self, address: str) -> int:
        """Bind and start; returns the port (useful with port 0). Raises RuntimeError when taken."""
        port = self.grpc.add_insecure_port(address)
        await self.set_serving(False)
        await self.grpc.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        """Tell health checkers whether to send work here."""
        state = health_pb2.HealthCheckResponse
        value = state.SERVING if serving else state.NOT_SERVING
        for name in self._names:
            await self._health.set(name, value)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


async def wait_for_signal() -> str:
    """Sleep until SIGINT or SIGTERM; returns its name."""
    loop, got = asyncio.get_running_loop(), asyncio.Event()
    name = ""

    def arrived(number: signal.Signals) -> None:
        nonlocal name
        name = number.name
        got.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, arrived, number)
    await got.wait()
    return name


# --- channels ----------------------------------------------------------------------------------------


def connect(address: str) -> grpc.aio.Channel:
    """A channel that notices a dead peer within 15 s and reconnects on its own."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def call_metadata(rid: str | None = None) -> list[tuple[str, str]]:
    """Metadata for an outgoing call: the request id of this task, or the one given."""
    rid = rid or telemetry.request_id.get()
    return [(REQUEST_ID_KEY, rid)] if rid else []
