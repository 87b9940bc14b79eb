"""Inboxes and outboxes over real sockets in a private folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from weft.ipc.messages import Abort, Finish, decode_to_engine
from weft.ipc.sockets import Endpoints, Inbox, Outbox


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_every_inbox_has_an_address_of_its_own(tmp_path: Path) -> None:
    ends = Endpoints(tmp_path, num_text=3)
    addresses = [ends.api, ends.engine, *(ends.text(i) for i in range(3))]
    assert len(set(addresses)) == 5
    assert all(str(tmp_path) in address for address in addresses)


def test_order_is_kept_and_one_call_takes_all(tmp_path: Path, context: zmq.Context[Any]) -> None:
    address = f"ipc://{tmp_path / 'inbox'}"
    inbox = Inbox(context, address, decode_to_engine)
    outbox = Outbox(context, address)
    assert list(inbox.receive(0.0)) == []
    for number in range(3000):  # more than a socket's usual high-water mark
        outbox.send(Finish(number))
    outbox.send(Abort([1]))
    received: list[object] = []
    while not received or received[-1] != Abort([1]):
        received += inbox.receive(5.0)
    assert received == [*(Finish(number) for number in range(3000)), Abort([1])]
    outbox.close()
    inbox.close()


def test_a_message_sent_before_the_inbox_exists_arrives(tmp_path: Path, context: zmq.Context[Any]) -> None:
    address = f"ipc://{tmp_path / 'inbox'}"
    outbox = Outbox(context, address)
    outbox.send(Finish(1))
    inbox = Inbox(context, address, decode_to_engine)
    assert list(inbox.receive(5.0)) == [Finish(1)]
    outbox.close()
    inbox.close()
