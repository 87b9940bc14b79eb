"""Every error that Weft tells a user about, with its HTTP status.

An error names the field, the value and what is allowed. `WeftError` subclasses are the only errors whose text reaches
a client; anything else is a bug and is reported as a plain 500.
"""

from __future__ import annotations


class WeftError(Exception):
    """Base of all errors with a meaning for users.

    `http_status` is the status of a request that ends this way, `error_type` and `code` fill OpenAI's error body, and
    `param` names the field at fault.
    """

    http_status = 500
    error_type = "server_error"
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code


class InvalidRequestError(WeftError):
    """Malformed body, unknown or unsupported parameter, or a prompt over the limit."""

    http_status = 400
    error_type = "invalid_request_error"


class AuthenticationError(WeftError):
    """The API key is missing or wrong."""

    http_status = 401
    error_type = "authentication_error"
    default_code = "invalid_api_key"


class ForeignOriginError(WeftError):
    """A page of another server may not do this."""

    http_status = 403
    error_type = "permission_error"
    default_code = "foreign_origin"


class NotFoundError(WeftError):
    """No such model, request or session."""

    http_status = 404
    error_type = "invalid_request_error"
    default_code = "not_found"


class DeadlineError(WeftError):
    """The request ran, or waited, longer than it may."""

    http_status = 408
    error_type = "timeout_error"
    default_code = "timeout"


class BodyTooLargeError(WeftError):
    """The request's body is larger than `http.max_body_bytes`."""

    http_status = 413
    error_type = "invalid_request_error"
    default_code = "body_too_large"


class QueueFullError(WeftError):
    """The waiting queue has no place left; nothing of the request stays behind."""

    http_status = 429
    error_type = "rate_limit_error"
    default_code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CancelledError(WeftError):
    """The client went away or the request was aborted; seen in logs only when the connection is closed."""

    http_status = 499
    error_type = "cancelled"
    default_code = "cancelled"


class EngineError(WeftError):
    """The engine could not finish this request."""

    http_status = 500
    error_type = "server_error"
    default_code = "engine_error"


class UnavailableError(WeftError):
    """Loading, draining or dead: the server admits nothing now."""

    http_status = 503
    error_type = "service_unavailable"
    default_code = "unavailable"


class DisplacedError(UnavailableError):
    """Pushed out of a full queue by a request of higher priority."""

    default_code = "displaced"


class SettingsError(WeftError):
    """A setting is unknown, of the wrong kind, or contradicts another one. Exit code 2, before anything is loaded."""


class ModelLoadError(WeftError):
    """A checkpoint cannot be served: file missing or broken, architecture unsupported, shape wrong. Exit code 2."""


class InvariantError(RuntimeError):
    """An invariant of the scheduler or the KV cache does not hold: a bug of ours, never a user's fault."""


ERRORS_BY_STATUS: dict[int, type[WeftError]] = {
    cls.http_status: cls
    for cls in (
        InvalidRequestError,
        AuthenticationError,
        NotFoundError,
        DeadlineError,
        BodyTooLargeError,
        CancelledError,
        EngineError,
        UnavailableError,
    )
}
