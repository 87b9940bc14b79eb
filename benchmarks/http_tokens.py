"""Streamed tokens per second of the whole server, over HTTP, on the infinitely fast fake backend.

    python benchmarks/http_tokens.py --clients 64

What is measured is everything but the model: HTTP, tokenizing, scheduling, detokenizing, and the client, which shares
the machine. N clients stream one answer after another, each over its own connection; the clock runs from the first send
to the last answer, and tokens are counted from `usage`. Outputs are checked: before the clock starts, a streamed answer
is compared with the unstreamed one; in the run, every answer must have all its tokens and no error.

The client is light on purpose: it looks for the end of each answer and at its last chunk, and decodes nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.launch.worker import Worker, children_of

PATH = "/v1/completions"
DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"
KEPT_BYTES = 1024  # of what came before: the last chunk, with `usage`, may arrive in pieces
_USED = re.compile(rb'"completion_tokens":(\d+)')


def body(client: int, number: int, tokens: int) -> dict[str, object]:
    return {
        "prompt": f"Client {client} asks for the {number}. time: ",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Client(asyncio.Protocol):
    """One connection that streams `answers` answers, one after another. `finished` is set when all have come."""

    def __init__(self, number: int, answers: int, tokens: int) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received_bytes = self.events = 0
        self.first_token_s: list[float] = []
        self._number, self._left, self._tokens = number, answers, tokens
        self._tail = b""
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self) -> None:
        self._left -= 1
        data = json.dumps(body(self._number, self._left, self._tokens)).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: weft\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        self._tail = b""
        self._sent_s = time.perf_counter()
        self._transport.write(head.encode() + b"\r\n\r\n" + data)

    def data_received(self, data: bytes) -> None:
        if not self._tail:
            self.first_token_s.append(time.perf_counter() - self._sent_s)
            if not data.startswith(b"HTTP/1.1 200"):
                self.finished.set_exception(AssertionError(data[:500]))
                self._transport.close()
                return
        self.received_bytes += len(data)
        self.events += data.count(b"data: {")
        self._tail = (self._tail + data)[-KEPT_BYTES:]
        if self._tail.endswith(DONE):
            used = _USED.findall(self._tail)
            if not used or int(used[-1]) != self._tokens:
                self.finished.set_exception(AssertionError(f"not {self._tokens} tokens: {self._tail!r}"))
            elif self._left:
                self.send()
            else:
                self.finished.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_exception(AssertionError(f"the connection was closed early: {error}"))


async def run(url: httpx.URL, clients: int, answers: int, tokens: int) -> tuple[float, list[Client]]:
    """Seconds from the first send to the last answer, and the clients."""
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda i=i: Client(i, answers, tokens), url.host, url.port))[1]
        for i in range(clients)
    ]
    start = time.perf_counter()
    for client in made:
        client.send()
    await asyncio.gather(*(client.finished for client in made))
    seconds = time.perf_counter() - start
    for client in made:
        client._transport.close()
    return seconds, made


def check(http: httpx.Client, tokens: int) -> None:
    """A streamed answer is the unstreamed one."""
    asked = body(0, 0, tokens) | {"temperature": 0}
    whole = http.post(PATH, json=asked | {"stream": False, "stream_options": None}).raise_for_status().json()
    text = ""
    with http.stream("POST", PATH, json=asked) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert text == whole["choices"][0]["text"], "the streamed text is not the unstreamed one"
    assert whole["usage"]["completion_tokens"] == tokens


def role_of(pid: int) -> str:
    """What a child of the server does: `python -m weft.launch.child ROLE INDEX …`."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"".join(words[3:5]).decode() if b"weft.launch.child" in words else "other"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8, help="streamed by each client, one after another")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of the server")
    args = parser.parse_args()
    settings = [word for pair in args.set for word in ("--set", pair)]
    with Worker("--set", "log.level=warning", *settings) as worker:
        url = httpx.URL(worker.url)
        names = {worker.pid: "api"} | {pid: role_of(pid) for pid in children_of(worker.pid)}
        check(worker.http, args.tokens)
        asyncio.run(run(url, args.clients, 1, args.tokens))
        for _ in range(args.rounds):
            before = {pid: cpu_seconds(pid) for pid in names}
            own = time.process_time()
            seconds, clients = asyncio.run(run(url, args.clients, args.answers, args.tokens))
            busy = {name: (cpu_seconds(pid) - before[pid]) / seconds for pid, name in names.items()}
            busy["client"] = (time.process_time() - own) / seconds
            tokens = args.clients * args.answers * args.tokens
            first = sorted(s for client in clients for s in client.first_token_s)
            events = sum(client.events for client in clients)
            print(
                f"{tokens / seconds:8.0f} tokens/s   {events / seconds:7.0f} events/s"
                f"   {tokens / events:5.1f} tokens/event   first token {1000 * first[len(first) // 2]:.0f} ms (median)"
                f"   busy: {', '.join(f'{name} {share:.0%}' for name, share in busy.items())}",
                flush=True,
            )


if __name__ == "__main__":
    main()
