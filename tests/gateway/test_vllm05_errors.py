"""How the vllm-0.5 dialect tells what went wrong."""

from __future__ import annotations

import json

import pytest

from candor import errors
from gateway.dialects.vllm05.errors import (
    DialectError,
    embedding_disabled,
    from_candor,
    model_not_found,
)


def test_the_body_is_one_flat_object_with_its_keys_in_order() -> None:
    assert DialectError("é: no").body().decode() == (
        '{"object":"error","message":"é: no","type":"BadRequestError","param":null,"code":400}'
    )


def test_inside_a_stream_the_same_object_is_nested_and_spelled_as_python_does() -> None:
    assert DialectError("é").stream_event() == (
        b'data: {"error": {"object": "error", "message": "\\u00e9", "type": "BadRequestError",'
        b' "param": null, "code": 400}}\n\n'
    )


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (errors.InvalidArgument("m"), 400, "BadRequestError"),
        (errors.FailedPrecondition("m"), 400, "BadRequestError"),
        (errors.PermissionDenied("m"), 403, "PermissionDeniedError"),
        (errors.NotFound("m"), 404, "NotFoundError"),
        (errors.AlreadyExists("m"), 409, "ConflictError"),
        (errors.ResourceExhausted("m"), 429, "RateLimitError"),
        (errors.Cancelled("m"), 499, "ClientClosedRequestError"),
        (errors.Unimplemented("m"), 501, "NotImplementedError"),
        (errors.Unavailable("m"), 503, "ServiceUnavailableError"),
        (errors.DeadlineExceeded("m"), 504, "TimeoutError"),
    ],
)
def test_every_kind_keeps_its_class_and_words(
    error: errors.CandorError, status: int, name: str
) -> None:
    told = from_candor(error)
    assert (told.status, told.type, told.message) == (status, name, "m")
    assert json.loads(told.body())["code"] == status


def test_every_kind_has_a_type() -> None:
    for kind in errors.KINDS.values():
        told = from_candor(kind("m"))
        assert told.type.endswith("Error")
        assert told.status == kind.http_status


def test_a_fault_of_ours_says_nothing_of_the_inside() -> None:
    told = from_candor(errors.Internal("KeyError: 'slot 7'"))
    assert (told.status, told.type) == (500, "InternalServerError")
    assert "slot" not in told.body().decode() + told.stream_event().decode()


@pytest.mark.parametrize(
    "text",
    [
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50051: refused",
        "connect to scheduler:50051 failed",
        "recvmsg: Connection reset by peer, errno 104",
    ],
)
def test_addresses_of_the_inside_stay_inside(text: str) -> None:
    assert from_candor(errors.Unavailable(text)).message == "Service temporarily unavailable"
    assert from_candor(errors.Unavailable("no worker serves m")).message == "no worker serves m"


def test_what_the_client_may_act_on_is_kept() -> None:
    told = from_candor(errors.ResourceExhausted("full", retry_after_s=2.5, field="n"))
    assert (told.retry_after_s, told.field) == (2.5, "n")


def test_a_missing_key_is_no_error_object() -> None:
    assert from_candor(errors.Unauthenticated("m")).body() == b'{"error":"Unauthorized"}'


def test_models() -> None:
    told = model_not_found("a`b")
    assert (told.status, told.type) == (404, "NotFoundError")
    assert told.message == "The model `a`b` does not exist."
    assert embedding_disabled().message == "Embedding API disabled"
