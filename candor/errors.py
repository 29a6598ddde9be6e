"""What can go wrong, as plain exceptions that any core may raise.

Knows the name of the gRPC code and the HTTP status of each kind (one table, so every hop agrees) but
neither gRPC nor HTTP itself. `candor.rpc` turns these into `google.rpc.Status` and back.
"""

from __future__ import annotations

from collections.abc import Mapping


class CandorError(Exception):
    """An outcome with a kind, a machine-readable reason and a sentence for people.

    `message` is shown to the client, so it carries the numbers: wanted, available, limit.
    `reason` is an UPPER_SNAKE word for programs (google.rpc.ErrorInfo.reason).
    `field` is the request field at fault, in the request's own spelling, where there is one.
    `retry_after_s` is how long to wait before the same request can succeed.
    """

    code = "INTERNAL"
    http_status = 500
    default_reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    @property
    def is_client_fault(self) -> bool:
        """Whether the same request would fail anywhere: never retried, never counted against a worker."""
        return 400 <= self.http_status < 500 and self.http_status not in (429, 499)


class InvalidArgument(CandorError):
    """The request is wrong in itself."""

    code, http_status, default_reason = "INVALID_ARGUMENT", 400, "INVALID_ARGUMENT"


class Unauthenticated(CandorError):
    """No key, or a wrong one."""

    code, http_status, default_reason = "UNAUTHENTICATED", 401, "UNAUTHENTICATED"


class PermissionDenied(CandorError):
    """A valid key that may not do this."""

    code, http_status, default_reason = "PERMISSION_DENIED", 403, "PERMISSION_DENIED"


class NotFound(CandorError):
    """The named model, worker or request does not exist."""

    code, http_status, default_reason = "NOT_FOUND", 404, "NOT_FOUND"


class AlreadyExists(CandorError):
    """A request with this id is in flight."""

    code, http_status, default_reason = "ALREADY_EXISTS", 409, "ALREADY_EXISTS"


class FailedPrecondition(CandorError):
    """The parties do not fit together (tokenizer fingerprint, contract level)."""

    code, http_status, default_reason = "FAILED_PRECONDITION", 400, "FAILED_PRECONDITION"


class ResourceExhausted(CandorError):
    """Full for now: the queue, a quota. Carries retry_after_s."""

    code, http_status, default_reason = "RESOURCE_EXHAUSTED", 429, "QUEUE_FULL"


class Cancelled(CandorError):
    """The client went away."""

    code, http_status, default_reason = "CANCELLED", 499, "CANCELLED"


class Internal(CandorError):
    """A fault of ours."""

    code, http_status, default_reason = "INTERNAL", 500, "INTERNAL"


class Unimplemented(CandorError):
    """A legal wish that this build or worker cannot fulfil."""

    code, http_status, default_reason = "UNIMPLEMENTED", 501, "UNSUPPORTED"


class Unavailable(CandorError):
    """Nobody there to do it now."""

    code, http_status, default_reason = "UNAVAILABLE", 503, "NO_CAPACITY"


class DeadlineExceeded(CandorError):
    """The caller's time ran out."""

    code, http_status, default_reason = "DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED"


KINDS: Mapping[str, type[CandorError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        ResourceExhausted,
        Cancelled,
        Internal,
        Unimplemented,
        Unavailable,
        DeadlineExceeded,
    )
}
"""gRPC code name → exception type. Codes that are not here (UNKNOWN, ABORTED ...) mean `Internal`."""
