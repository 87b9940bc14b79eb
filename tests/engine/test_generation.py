"""`Generation` with more requests than are sent at once."""

from __future__ import annotations

from weft.core.sampling import SamplingParams
from weft.engine.generation import Generation
from weft.ipc.messages import End, TextDelta, TextRequest


class Recorder:
    """Stands for the client."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.aborted: list[int] = []
        self.ends: dict[int, str | None] = {}

    def send(self, request: TextRequest) -> None:
        self.sent += request.request_ids

    def abort(self, request_ids: list[int] | None) -> None:
        self.aborted += request_ids or []

    def forget(self, request_id: int) -> None:
        pass

    def note(self, request_id: int, end: End | None) -> None:
        assert request_id not in self.ends, "two ends"
        self.ends[request_id] = None if end is None else end.state


def new(client: Recorder, count: int, at_once: int) -> Generation:
    requests = [TextRequest([i], SamplingParams(embed=True), text=str(i)) for i in range(1, count + 1)]
    return Generation(client, requests[:at_once], requests[at_once:], client.note)


def end(generation: Generation, request_id: int, state: str = "completed") -> None:
    generation.deliver(TextDelta(request_id, end=End(state)))


async def test_each_end_sends_the_next() -> None:
    client = Recorder()
    generation = new(client, 5, 2)
    for request_id, sent in ((2, [3]), (3, [3, 4]), (1, [3, 4, 5]), (5, [3, 4, 5]), (4, [3, 4, 5])):
        end(generation, request_id)
        assert client.sent == sent
    assert [delta.request_id for delta in await generation.take()] == [2, 3, 1, 5, 4]
    assert await generation.take() == [] and client.ends == dict.fromkeys((1, 2, 3, 4, 5), "completed")


async def test_what_was_not_sent_is_dropped_without_sending_more() -> None:
    client = Recorder()
    generation = new(client, 5, 2)
    generation.drop([1, 2, 3, 5])
    assert client.ends == {3: "cancelled", 5: "cancelled"} and not client.sent
    end(generation, 1, "cancelled")
    assert client.sent == [4]
    end(generation, 2, "cancelled")
    end(generation, 4)
    assert len(await generation.take()) == 5 and await generation.take() == []


async def test_when_everything_fails_each_ends_once() -> None:
    client = Recorder()
    generation = new(client, 5, 2)
    for request_id in generation.request_ids:
        end(generation, request_id, "failed")
    assert client.ends == dict.fromkeys((1, 2, 3, 4, 5), "failed")


async def test_closing_aborts_what_was_sent_and_forgets_the_rest() -> None:
    client = Recorder()
    generation = new(client, 5, 2)
    end(generation, 1)
    generation.close()
    generation.close()
    assert client.aborted == [2, 3] and client.sent == [3]
    assert client.ends == {1: "completed", 2: None, 3: None, 4: None, 5: None}
    assert [delta.request_id for delta in await generation.take()] == [1] and await generation.take() == []
