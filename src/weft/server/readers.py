"""Helper processes that parse large bodies, so that the event loop and its streams never hold still for one.

Decoding JSON holds Python's lock, so a thread would not help. A helper is started for the first large body and one is
kept for the next; several large bodies at a time get one each, up to `MAX_HELPERS`. A helper ends when its input
closes, so none outlives this process. `python -m weft.server.readers MAX_CONTEXT_TOKENS` is a helper.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import struct
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, Any, TypeVar

from weft.core.errors import EngineError, InvalidRequestError

if TYPE_CHECKING:
    from weft.server.schemas import Body

M = TypeVar("M", bound="Body")

MAX_HELPERS = 4
NICENESS = 10  # running streams come first
RETIRING_BYTES = 8 * 1024 * 1024
"""A helper that has read a larger body ends, and gives its memory back."""

_REQUEST = struct.Struct("!HQ")  # length of the schema's name, length of the body
_ANSWER = struct.Struct("!Q")  # length of the pickled answer


class _HelperDied(Exception):
    pass


class BodyReaders:
    """The helpers of one server. Used from one event loop."""

    def __init__(self, max_context_tokens: int) -> None:
        self._max_context_tokens = max_context_tokens
        self._idle: list[_Helper] = []
        self._slots = asyncio.Semaphore(MAX_HELPERS)

    async def parse(self, chunks: list[bytes], schema: type[M]) -> M:
        """A body in pieces as `schema`. Raises InvalidRequestError; EngineError when the helper died of it."""
        async with self._slots:
            helper = self._idle.pop() if self._idle else _Helper(self._max_context_tokens)
            try:
                answer = await asyncio.to_thread(helper.ask, schema.__name__, chunks)
            except _HelperDied:
                helper.close()
                raise EngineError("the process that read this body died of it", code="internal") from None
            except BaseException:  # above all: nobody waits for the answer any more
                helper.close()
                raise
            if self._idle or sum(map(len, chunks)) > RETIRING_BYTES:
                helper.close()
            else:
                self._idle.append(helper)
        if isinstance(answer, InvalidRequestError):
            raise answer
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the helper that is kept."""
        while self._idle:
            self._idle.pop().close()


class _Helper:
    """One process, asked by one thread at a time; it is started by the first question."""

    def __init__(self, max_context_tokens: int) -> None:
        self._max_context_tokens = max_context_tokens
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def ask(self, schema: str, chunks: list[bytes]) -> Any:
        """The model, or the InvalidRequestError that it is not. Raises _HelperDied."""
        if self._process is None:
            self._process = subprocess.Popen(
                (sys.executable, "-m", __name__, str(self._max_context_tokens)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at a terminal is the supervisor's to handle
            )
        if self._closed:
            self._end()
            raise _HelperDied
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(_REQUEST.pack(len(schema), sum(map(len, chunks))) + schema.encode())
            for chunk in chunks:
                self._process.stdin.write(chunk)
            self._process.stdin.flush()
            (length,) = _ANSWER.unpack(_read(self._process.stdout, _ANSWER.size))
            return pickle.loads(_read(self._process.stdout, length))  # from our own process
        except (EOFError, BrokenPipeError):
            raise _HelperDied from None

    def close(self) -> None:
        """Ends the process, in whatever it does; a thread that waits for it gets _HelperDied."""
        self._closed = True
        if self._process is not None:
            threading.Thread(target=self._end, name="reader-end", daemon=True).start()

    def _end(self) -> None:
        """Waits for the kernel to take back what may be a lot of memory."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def _read(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def main() -> None:
    """Answers until the input closes."""
    from weft.server import schemas
    from weft.server.bodies import parse_body

    os.nice(NICENESS)
    max_context_tokens = int(sys.argv[1])
    gc.disable()  # what JSON becomes has no cycles, and there is nothing else
    while True:
        try:
            name_length, length = _REQUEST.unpack(_read(sys.stdin.buffer, _REQUEST.size))
            name = _read(sys.stdin.buffer, name_length).decode()
            data = _read(sys.stdin.buffer, length)
        except EOFError:
            return
        answer: Any
        try:
            answer = parse_body(data, getattr(schemas, name), max_context_tokens)
        except InvalidRequestError as error:
            answer = error
        packed = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        del data, answer
        sys.stdout.buffer.write(_ANSWER.pack(len(packed)) + packed)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
