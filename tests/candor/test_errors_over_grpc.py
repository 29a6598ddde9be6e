"""An error keeps its kind, reason, field and retry delay over any number of hops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from candor import errors, rpc, telemetry
from candor.v1 import tokenizer_pb2, tokenizer_pb2_grpc

ALL_KINDS = list(errors.KINDS.values())


class Refuser(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Fails every call with the error it was given, or with that of the next hop."""

    def __init__(self, error: BaseException, next_hop: str = "") -> None:
        self._error = error
        self._next_hop = next_hop
        self.seen_request_id = ""

    async def Count(self, request: Any, context: object) -> Any:
        self.seen_request_id = telemetry.request_id.get()
        if not self._next_hop:
            raise self._error
        async with rpc.connect(self._next_hop) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            try:
                return await stub.Count(request, metadata=rpc.call_metadata())
            except grpc.RpcError as error:
                raise rpc.from_rpc_error(error) from error

    Encode = EncodeChat = Decode = Describe = Count


async def _served(servicer: Refuser) -> AsyncIterator[str]:
    server = rpc.Server(["candor.v1.TokenizerService"])
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def _call(address: str, request_id: str = "") -> errors.CandorError:
    async with rpc.connect(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Count(tokenizer_pb2.CountRequest(), metadata=rpc.call_metadata(request_id))
    return rpc.from_rpc_error(caught.value)


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.code)
def test_every_kind_survives_the_wire_form(kind: type[errors.CandorError]) -> None:
    error = kind("3 of 2", reason="WHY", field="n", retry_after_s=1.25, metadata={"limit": "2"})
    back = rpc.from_status(rpc.to_status(error))
    assert type(back) is kind
    assert (back.message, back.reason, back.field) == ("3 of 2", "WHY", "n")
    assert (back.retry_after_s, back.metadata) == (1.25, {"limit": "2"})


async def test_a_callers_mistake_stays_the_callers_over_two_hops() -> None:
    error = errors.InvalidArgument("top_p must be in (0, 1], got 3", field="top_p")
    far = Refuser(error)
    async for far_address in _served(far):
        near = Refuser(error, next_hop=far_address)
        async for address in _served(near):
            got = await _call(address, request_id="req-7")
    assert isinstance(got, errors.InvalidArgument)
    assert (got.field, got.is_client_fault) == ("top_p", True)
    assert near.seen_request_id == far.seen_request_id == "req-7"


async def test_an_unexpected_exception_is_internal_logged_once_and_its_text_stays_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async for address in _served(Refuser(ZeroDivisionError("secret detail"))):
        got = await _call(address)
    assert isinstance(got, errors.Internal)
    assert "secret" not in got.message
    assert sum("unhandled" in record.message for record in caplog.records) == 1


async def test_health_follows_serving_and_reflection_lists_the_service() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    server = rpc.Server(["candor.v1.TokenizerService"])
    port = await server.start("127.0.0.1:0")
    async with rpc.connect(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        states = []
        for serving in (False, True):
            await server.set_serving(serving)
            for name in ("", "candor.v1.TokenizerService"):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
                states.append(reply.status == health_pb2.HealthCheckResponse.SERVING)
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await asyncio.wait_for(call.read(), 5)
        await call.done_writing()
        call.cancel()
    await server.stop(0)
    assert states == [False, False, True, True]
    assert "candor.v1.TokenizerService" in [s.name for s in listed.list_services_response.service]
