"""Errors on their way between processes."""

from __future__ import annotations

from weft.core.errors import ERRORS_BY_STATUS, EngineError, QueueFullError, WeftError
from weft.ipc.messages import ErrorInfo


def error_from(info: ErrorInfo) -> WeftError:
    """The `WeftError` that an `ErrorInfo` stands for."""
    if info.http_status == QueueFullError.http_status:
        full = QueueFullError(info.message, retry_after_s=info.retry_after_s or 1.0)
        full.param = info.param
        full.code = info.code or full.code
        return full
    return ERRORS_BY_STATUS.get(info.http_status, EngineError)(info.message, param=info.param, code=info.code)


def error_info(error: BaseException) -> ErrorInfo:
    """The `ErrorInfo` of any exception; what is not a WeftError is a bug of ours and reads so."""
    if isinstance(error, WeftError):
        retry = error.retry_after_s if isinstance(error, QueueFullError) else None
        return ErrorInfo(error.http_status, error.message, error.param, error.code, retry)
    return ErrorInfo(500, f"internal error: {type(error).__name__}: {error}")
