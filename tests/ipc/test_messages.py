"""What is sent is what arrives, and errors keep their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from weft.core import errors
from weft.core.sampling import SamplingParams
from weft.ipc.errors import error_from, error_info
from weft.ipc.messages import (
    Abort,
    End,
    EngineQuery,
    EngineReply,
    ErrorInfo,
    Finish,
    Heartbeat,
    LogprobItem,
    QueryReply,
    Ready,
    StartFailed,
    Submit,
    TextBatch,
    TextDelta,
    TextLogprob,
    TextQuery,
    TextRequest,
    TokenBatch,
    TokenOutput,
    decode_to_api,
    decode_to_engine,
    decode_to_text,
    encode,
)

PARAMS = SamplingParams(
    max_new_tokens=5,
    seed=2**64 - 1,
    stop=("a", "é"),
    stop_token_ids=(1, 2),
    logit_bias={5: -1.5, 70000: 2.0},
    logprobs=3,
    temperature=0.25,
)
END = End("failed", error=ErrorInfo(500, "why", retry_after_s=2.0), prompt_tokens=3, queue_s=0.5)
ITEM = LogprobItem(7, -0.5, [7, 8], [-0.5, -1.5])
TEXT_ITEM = TextLogprob("a", b"\xff", -0.5, [("a", b"\xff", -0.5)])

MESSAGES: list[tuple[Callable[[bytes], object], object]] = [
    (decode_to_text, TextRequest([1, 2], PARAMS, text="hi", stream=True, echo=True, priority=-3, deadline_s=9.5)),
    (decode_to_text, TextRequest([1], SamplingParams(seed=-(2**63)), token_ids=[1, 2])),
    (decode_to_text, TextRequest([1], PARAMS, messages=[{"role": "user"}], template_kwargs={"thinking": False})),
    (decode_to_text, TextQuery(4, "detokenize", token_ids=[5])),
    (
        decode_to_text,
        TokenBatch([TokenOutput(1, [7], [ITEM], [ITEM], end_token=7, end=END), TokenOutput(2, embedding=b"\0\0\x80?")]),
    ),
    (decode_to_text, Abort([])),
    (decode_to_engine, Submit(1, b"\1\0\0\0", PARAMS, reply_to=1, priority=2, arrival_s=1.5)),
    (decode_to_engine, Finish(3)),
    (decode_to_engine, Abort([1, 2])),
    (decode_to_engine, EngineQuery(8, "stats")),
    (decode_to_engine, EngineQuery(9, "cache")),
    (decode_to_api, TextBatch([TextDelta(1, "é", [3], [TEXT_ITEM], "prompt", [None, TEXT_ITEM], END)])),
    (decode_to_api, QueryReply(4, {"text": "x"}, ErrorInfo(400, "no"))),
    (decode_to_api, EngineReply(4, {"kv": {"free": 1}})),
    (decode_to_api, Heartbeat("engine", 12)),
    (decode_to_api, Ready("engine", {"vocab_size": 5})),
    (decode_to_api, StartFailed("engine", "no such file", exit_code=2)),
]


@pytest.mark.parametrize(("decode", "message"), MESSAGES, ids=lambda thing: type(thing).__name__)
def test_round_trip(decode: Callable[[bytes], object], message: object) -> None:
    assert decode(encode(message)) == message


def test_a_message_for_somebody_else_is_refused() -> None:
    for decode, message in (
        (decode_to_text, Finish(1)),
        (decode_to_engine, Heartbeat("text0", 1)),
        (decode_to_api, Finish(1)),
    ):
        with pytest.raises(msgspec.ValidationError):
            decode(encode(message))


def test_two_deltas_do_not_share_their_lists() -> None:
    TextDelta(1).token_ids.append(5)
    assert TextDelta(2).token_ids == []


ERRORS: list[errors.WeftError] = [
    errors.InvalidRequestError("bad", param="top_p", code="context_length_exceeded"),
    errors.AuthenticationError("who"),
    errors.NotFoundError("where"),
    errors.DeadlineError("late"),
    errors.BodyTooLargeError("large"),
    errors.QueueFullError("full", retry_after_s=17.5),
    errors.CancelledError("gone"),
    errors.EngineError("broken"),
    errors.UnavailableError("down"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_their_meaning(error: errors.WeftError) -> None:
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(error_info(error)), type=ErrorInfo)
    back = error_from(info)
    assert type(back) is type(error)

    def facts(e: Any) -> list[object]:
        return [e.http_status, e.error_type, e.message, e.param, e.code, getattr(e, "retry_after_s", None)]

    assert facts(back) == facts(error)


def test_a_bug_reads_as_an_internal_error() -> None:
    info = error_info(ZeroDivisionError("division by zero"))
    assert info.http_status == 500
    assert "ZeroDivisionError" in info.message
    assert isinstance(error_from(info), errors.EngineError)


def test_an_unknown_status_is_an_engine_error() -> None:
    assert isinstance(error_from(ErrorInfo(418, "teapot")), errors.EngineError)
