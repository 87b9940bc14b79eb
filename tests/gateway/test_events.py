"""Reading along in server-sent events: however they are cut, the client's bytes and the noted tokens agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.gateway.events import EventReader

FINISH = b': tokens 5,6\ndata: {"finish_reason":"stop"}'
STREAM = [
    b": keep-alive",
    b': tokens 1\ndata: {"text":"a","finish_reason":null}',
    b": tokens 2,3",
    b': tokens 4\ndata: {"text":"\\"finish_reason\\":\\"x"}',
    FINISH,
    b'data: {"usage":{}}',
    b"data: [DONE]",
]
WHOLE = b"".join(event + b"\n\n" for event in STREAM)


def shown(events: list[bytes]) -> bytes:
    """What a client sees of these."""
    lines = [event.partition(b"\n")[2] if event.startswith(b": tokens") else event for event in events]
    return b"".join(line + b"\n\n" for line in lines if line)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_every_way_of_cutting(cuts: list[int]) -> None:
    reader = EventReader()
    edges = [0, *sorted(cuts), len(WHOLE)]
    data = b"".join(reader.feed(WHOLE[a:b]) for a, b in zip(edges, edges[1:], strict=False) if a < b)
    assert data == shown(STREAM) and reader.done and reader.failure is None
    assert reader.token_ids() == [1, 2, 3, 4, 5, 6]


@given(st.integers(0, len(WHOLE) - 1))
def test_a_stream_that_breaks_off(end: int) -> None:
    """Only whole events pass, tokens only with them, and nothing of the finish before the end of all."""
    reader = EventReader()
    data = reader.feed(WHOLE[:end])
    whole = WHOLE[:end].split(b"\n\n")[:-1]
    before = whole[: whole.index(FINISH)] if FINISH in whole else whole
    assert data == shown(before) and not reader.done
    assert reader.token_ids() == [1, 2, 3, 4][: [0, 0, 1, 3, 4][min(4, len(before))]]
    assert reader.begun == (len(before) > 1)


def test_whose_fault_an_error_is() -> None:
    for kind, failure in (("service_unavailable", "gone"), ("timeout_error", None)):
        reader = EventReader()
        event = b'event: error\ndata: {"error":{"message":"gone","type":"%b"}}\n\n' % kind.encode()
        assert (reader.feed(event) == b"") == (failure is not None)
        assert reader.failure == failure and reader.done == (failure is None)
    assert EventReader().feed(b"event: error\ndata: nonsense\n\n")
