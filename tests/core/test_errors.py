"""Statuses and names of the errors that clients see."""

from __future__ import annotations

import pytest

from weft.core import errors

STATUSES = {
    errors.InvalidRequestError: 400,
    errors.AuthenticationError: 401,
    errors.NotFoundError: 404,
    errors.DeadlineError: 408,
    errors.BodyTooLargeError: 413,
    errors.QueueFullError: 429,
    errors.CancelledError: 499,
    errors.EngineError: 500,
    errors.UnavailableError: 503,
}


@pytest.mark.parametrize(("kind", "status"), STATUSES.items())
def test_status(kind: type[errors.WeftError], status: int) -> None:
    error = kind("what happened")
    assert error.http_status == status
    assert (error.message, str(error)) == ("what happened", "what happened")


def test_code_has_a_default_of_its_class() -> None:
    assert errors.DeadlineError("late").code == "timeout"
    assert errors.InvalidRequestError("long", code="context_length_exceeded").code == "context_length_exceeded"


def test_a_breach_of_ours_is_no_error_of_a_user() -> None:
    assert not issubclass(errors.InvariantError, errors.WeftError)
