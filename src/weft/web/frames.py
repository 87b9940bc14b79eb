"""What the session WebSockets of worker and gateway have in common: ids, close codes, and errors as frames."""

from __future__ import annotations

import re
from typing import Any

from weft.core.errors import InvalidRequestError, QueueFullError, WeftError

Frame = dict[str, Any]

SESSION_ID = re.compile(r"[!-~]{1,256}")
"""Of a session, in the path of its WebSocket as in `X-Session-ID`."""

GOING_AWAY, POLICY_VIOLATION = 1001, 1008


def error_frame(error: WeftError) -> Frame:
    """An error as a frame; where something is full, it says when to come back."""
    frame: Frame = {"type": "error", "code": error.code or "invalid_request", "message": error.message}
    if error.param is not None:
        frame["param"] = error.param
    if isinstance(error, QueueFullError):
        frame["retry_after_s"] = round(error.retry_after_s, 3)
    return frame


def wrong_id() -> Frame:
    """What is said of a session id that is none, before the connection is closed."""
    text = "session_id: 1 to 256 visible ASCII characters are needed"
    return error_frame(InvalidRequestError(text, param="session_id"))


def wrong(code: str, message: str) -> InvalidRequestError:
    """What is wrong with a frame."""
    return InvalidRequestError(message, code=code)
