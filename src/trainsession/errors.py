"""Every error that trainsession raises, in one tree.

Each class has an HTTP ``status`` and a stable ``code``, so that an error keeps its meaning
when it crosses the wire: the server sends ``{"code", "message", "details", "request_id"}``
and the client raises the class that owns the code.

    TrainSessionError
        InvalidRequest (also ValueError)    the request itself is wrong; sending it again won't help
            InvalidDatum                    which datum, which loss input
            PromptTooLong
            UnknownModel                    names the models that would work
            LimitExceeded                   names the limit and its value
            CheckpointMismatch              another base model, kind, or no optimizer in it
        AuthenticationFailed
        BudgetExceeded
        PermissionDenied
        NotFound (also LookupError)         unknown, or somebody else's: the two look the same
        Conflict
            SequenceConflict                the same number or key with other parameters
            SessionClosed
            SessionFenced                   another client attached to this session
            CheckpointExists
            IncompleteGradients             a forward_backward of this window failed
            NoGradients                     optim_step without any forward_backward before it
        Cancelled
        SnapshotLost
        OperationSkipped                    an earlier operation failed and the session skips
        NonFinite                           a real NaN or inf, with the datum that caused it
        RateLimited
        PayloadTooLarge
        UnsupportedMediaType
        EngineError                         the engine failed; not the caller's fault
            EngineLost                      its process ended; seen only where it ends every time
        StorageError                        disk full, home not writable
        ServiceUnavailable
            ConnectionFailed                no service answered
            StorageUnavailable (also StorageError)
                DatabaseUnavailable
                BlobsUnavailable
        RequestTimeout                      the body of a request came too slowly
        IncompatibleVersion
        ResultTimeout (also TimeoutError)   result(timeout) ran out; the operation goes on
"""

from __future__ import annotations

from typing import Any, ClassVar


class TrainSessionError(Exception):
    """Base of every error raised by trainsession.

    Attributes:
        message: What was wrong, where, and what would be right.
        details: Machine-readable context (``datum``, ``key``, ``limit``, ...).
        request_id: The service's id of the request, where one was made.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "error"

    def __init__(
        self, message: str = "", *, details: dict[str, Any] | None = None, request_id: str | None = None
    ) -> None:
        self.message = message or (self.__doc__ or "").split("\n")[0]
        self.details = details or {}
        self.request_id = request_id
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self).code, self.message, self.details, self.request_id))

    def to_wire(self) -> dict[str, Any]:
        """The JSON body that a door sends."""
        body: dict[str, Any] = {"code": self.code, "message": self.message, "details": self.details}
        if self.request_id:
            body["request_id"] = self.request_id
        return body

    def is_retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return isinstance(self, (RateLimited, RequestTimeout, ServiceUnavailable, ResultTimeout))


class InvalidRequest(TrainSessionError, ValueError):
    """The request is not valid."""

    status, code = 422, "invalid_request"


class InvalidDatum(InvalidRequest):
    """A datum is not valid: ``details`` holds its ``datum`` index and the ``key``."""

    code = "invalid_datum"


class PromptTooLong(InvalidRequest):
    """The prompt and the tokens asked for do not fit the model's context."""

    code = "prompt_too_long"


class UnknownModel(InvalidRequest):
    """No base model of that name is available."""

    code = "unknown_model"


class LimitExceeded(InvalidRequest):
    """A limit of the service was exceeded (see ``/v1/limits``)."""

    code = "limit_exceeded"


class CheckpointMismatch(InvalidRequest):
    """The checkpoint does not fit what was asked of it."""

    code = "checkpoint_mismatch"


class AuthenticationFailed(TrainSessionError):
    """The API key is missing or not valid."""

    status, code = 401, "authentication_failed"


class BudgetExceeded(TrainSessionError):
    """The budget does not cover this request; nothing was done."""

    status, code = 402, "budget_exceeded"


class PermissionDenied(TrainSessionError):
    """This key may not do that."""

    status, code = 403, "permission_denied"


class NotFound(TrainSessionError, LookupError):
    """There is no such object in this project."""

    status, code = 404, "not_found"


class Conflict(TrainSessionError):
    """The request conflicts with the present state."""

    status, code = 409, "conflict"


class SequenceConflict(Conflict):
    """This sequence number or idempotency key was used with other parameters."""

    code = "sequence_conflict"


class SessionClosed(Conflict):
    """The session is closed."""

    code = "session_closed"


class SessionFenced(Conflict):
    """Another client attached to this session; this one can no longer submit."""

    code = "session_fenced"


class CheckpointExists(Conflict):
    """A checkpoint of this name exists; pass ``overwrite=True`` to repoint the name."""

    code = "checkpoint_exists"


class IncompleteGradients(Conflict):
    """A forward_backward of this accumulation window failed; call ``zero_grad()`` first."""

    code = "incomplete_gradients"


class NoGradients(Conflict):
    """optim_step without accumulated gradients."""

    code = "no_gradients"


class Cancelled(TrainSessionError):
    """The operation was cancelled."""

    status, code = 499, "cancelled"


class SnapshotLost(TrainSessionError):
    """The frozen weights of this sampler were never published and are gone."""

    status, code = 410, "snapshot_lost"


class OperationSkipped(TrainSessionError):
    """Skipped, because an earlier operation of this session failed."""

    status, code = 424, "operation_skipped"


class NonFinite(TrainSessionError):
    """A value became NaN or infinite."""

    status, code = 422, "non_finite"


class PayloadTooLarge(TrainSessionError):
    """The request body is larger than the service takes."""

    status, code = 413, "payload_too_large"


class UnsupportedMediaType(TrainSessionError):
    """The request body is of a media type that the service does not read."""

    status, code = 415, "unsupported_media_type"


class RequestTimeout(TrainSessionError):
    """The body of the request came too slowly; nothing was done."""

    status, code = 408, "request_timeout"


class RateLimited(TrainSessionError):
    """Too many requests; try again later."""

    status, code = 429, "rate_limited"


class EngineError(TrainSessionError):
    """The engine failed while it ran this operation."""

    status, code = 500, "engine_error"


class EngineLost(EngineError):
    """The engine's process ended. The service starts another and runs again what was under way."""

    code = "engine_lost"


class ServiceUnavailable(TrainSessionError):
    """The service cannot answer now."""

    status, code = 503, "unavailable"


class ConnectionFailed(ServiceUnavailable):
    """No service answered at this address."""

    code = "connection_failed"


class StorageError(TrainSessionError):
    """The service could not store data (disk full, or not writable)."""

    status, code = 507, "storage_error"


class StorageUnavailable(ServiceUnavailable, StorageError):
    """What the service stores in cannot be reached now."""

    code = "storage_unavailable"


class DatabaseUnavailable(StorageUnavailable):
    """The service's database cannot be reached now; nothing was stored."""

    code = "database_unavailable"


class BlobsUnavailable(StorageUnavailable):
    """The service's blob store cannot be reached now; nothing refers to what was sent there."""

    code = "blobs_unavailable"


class IncompatibleVersion(TrainSessionError):
    """Client and service, or service and database, are of versions that don't work together."""

    status, code = 426, "incompatible_version"


class ResultTimeout(TrainSessionError, TimeoutError):
    """The result was not ready in time; the operation goes on."""

    status, code = 408, "result_timeout"


def _subclasses(cls: type[TrainSessionError]) -> list[type[TrainSessionError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _subclasses(sub))]


def from_wire(body: dict[str, Any], status: int = 500) -> TrainSessionError:
    """The exception that an error body stands for; an unknown code keeps its status' class."""
    tree = _subclasses(TrainSessionError)
    code = body.get("code")
    cls = next((c for c in tree if c.code == code), None)
    if cls is None:
        cls = next((c for c in tree if c.status == status), TrainSessionError)
    details = body.get("details")
    return cls(
        str(body.get("message", "")),
        details=details if isinstance(details, dict) else {},
        request_id=body.get("request_id"),
    )


def _rebuild(code: str, message: str, details: dict[str, Any], request_id: str | None) -> TrainSessionError:
    return from_wire({"code": code, "message": message, "details": details, "request_id": request_id})
