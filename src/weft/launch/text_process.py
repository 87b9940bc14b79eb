"""The text process: a `TextWorker` between an inbox and outboxes.

Three threads. The main one turns tokens into text and hears of aborts, so that neither waits for somebody's prompt. Two
others tokenize, one of them short prompts only, so that those do not wait behind long ones.

Exactly one end per request: an id is in `_waiting` from its arrival until its Submit leaves or its end is sent from
here, whichever comes first; who takes it out, under the lock, does the one or the other. From then on the engine ends
it. Submits, and Aborts for what was submitted, leave through one socket under the same lock, so the engine gets them in
this order.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from weft.backends.registry import context_tokens, is_embedder, load_tokenizer, media_placeholders
from weft.config.settings import Settings
from weft.core.errors import CancelledError, WeftError
from weft.engine.deltas import split
from weft.engine.text_worker import TextWorker
from weft.ipc.errors import error_info
from weft.ipc.messages import (
    Abort,
    End,
    Finish,
    Heartbeat,
    QueryReply,
    Ready,
    TextBatch,
    TextDelta,
    TextQuery,
    TextRequest,
    TokenBatch,
    TokenOutput,
    decode_to_text,
)
from weft.ipc.sockets import Endpoints, Inbox, Outbox
from weft.launch.garbage import settle
from weft.launch.heartbeat import heartbeat_interval_s

logger = logging.getLogger(__name__)

SHORT_CHARS = 16 * 1024
OUTPUTS_AT_ONCE = 1024  # merged before the deltas leave
SWITCH_INTERVAL_S = 0.0005  # how long a thread that tokenizes keeps Python's lock when the main one wants it

Job = TextRequest | TextQuery


class TextProcess:
    """Wires one `TextWorker` to the other processes; `run` returns only by an exception."""

    def __init__(self, settings: Settings, endpoints: Endpoints, index: int, context: zmq.Context[Any]) -> None:
        self._role = f"text{index}"
        self._endpoints = endpoints
        self._context = context
        self._inbox = Inbox(context, endpoints.text(index), decode_to_text)
        self._api = Outbox(context, endpoints.api)
        self._engine = Outbox(context, endpoints.engine)  # used under the lock
        self._worker = TextWorker(
            load_tokenizer(settings),
            index,
            max_prompt_tokens=_longest_prompt(settings),
            placeholders=media_placeholders(settings),
        )
        self._short: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._long: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self._beat_interval_s = heartbeat_interval_s(settings)
        self._beat_due_s = 0.0

    def run(self) -> None:
        tokenizer = self._worker.tokenizer
        facts = {"vocab_size": tokenizer.vocab_size, "has_chat_template": tokenizer.chat is not None}
        self._api.send(Ready(self._role, facts))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for name, jobs in (("short", self._short), ("long", self._long)):
            threading.Thread(target=self._tokenize, args=(jobs,), name=f"tokenize-{name}", daemon=True).start()
        while True:
            outputs: list[TokenOutput] = []
            for message in self._inbox.receive(max(0.0, self._beat_due_s - time.monotonic())):
                match message:
                    case TokenBatch():
                        outputs += message.outputs
                        if len(outputs) > OUTPUTS_AT_ONCE:
                            break
                    case Abort():
                        self._abort(message)
                    case _:
                        self._enqueue(message)
            self._push(outputs)
            self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_due_s:
            self._api.send(Heartbeat(self._role))
            self._beat_due_s = now + self._beat_interval_s

    # ---- tokens to text ---------------------------------------------------------------------------------------

    def _push(self, outputs: list[TokenOutput]) -> None:
        """What waited together leaves together, as one delta for each request."""
        deltas: list[TextDelta] = []
        touched: dict[int, None] = {}
        for output in outputs:
            request_id = output.request_id
            touched[request_id] = None
            try:
                if self._worker.absorb(output):
                    self._tell_engine(Finish(request_id))
            except Exception as error:  # a broken output ends one request, never the process
                logger.exception("request %d: detokenizing failed", request_id)
                deltas.append(TextDelta(request_id, end=End("failed", error=error_info(error))))
                self._worker.forget(request_id)
                self._tell_engine(Abort([request_id], sent_s=time.monotonic()))
        for request_id in touched:
            delta = self._worker.take(request_id)
            if delta is None:
                continue
            *parts, last = split(delta)
            for part in parts:
                self._api.send(TextBatch([part]))
            deltas.append(last)
        if deltas:
            self._api.send(TextBatch(deltas))

    def _tell_engine(self, message: Finish | Abort) -> None:
        with self._lock:
            self._engine.send(message)

    # ---- text to tokens ---------------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> None:
        if isinstance(job, TextRequest):
            with self._lock:
                self._waiting.update(job.request_ids)
        (self._short if _size(job) <= SHORT_CHARS else self._long).put(job)

    def _abort(self, message: Abort) -> None:
        """Ends what has not been submitted; the engine, which has heard of it already, ends the rest."""
        with self._lock:
            cancelled = [request_id for request_id in message.request_ids if request_id in self._waiting]
            self._waiting.difference_update(cancelled)
            others = set(message.request_ids).difference(cancelled)
            submitted = [request_id for request_id in others if self._worker.is_open(request_id)]
            if submitted:  # its Submit may have left after that Abort
                self._engine.send(Abort(submitted, sent_s=message.sent_s))
        if cancelled:
            error = error_info(CancelledError("the request was cancelled"))
            self._api.send(TextBatch([TextDelta(i, end=End("cancelled", error=error)) for i in cancelled]))

    def _tokenize(self, jobs: queue.SimpleQueue[Job]) -> None:
        """A thread of its own. ZeroMQ sockets belong to one thread, so it has its own way to the API process."""
        api = Outbox(self._context, self._endpoints.api)
        while True:
            job = jobs.get()
            if isinstance(job, TextRequest):
                self._submit(job, api)
                continue
            try:
                # Long lists go as JSON text, which they become in the end: the API process need not unpack them.
                answer = self._worker.answer(job)
                lists = {name: msgspec.json.encode(value) for name, value in answer.items() if isinstance(value, list)}
                api.send(QueryReply(job.call_id, answer | lists))
            except Exception as error:  # a broken text ends one question, never the process
                if not isinstance(error, WeftError):
                    logger.exception("tokenizing failed")
                api.send(QueryReply(job.call_id, error=error_info(error)))

    def _submit(self, request: TextRequest, api: Outbox) -> None:
        """Tokenizes a request and sends it to the engine, but for what has been aborted."""
        if self._waiting.isdisjoint(request.request_ids):
            return
        try:
            submits = self._worker.prepare(request)
        except Exception as error:  # a broken prompt ends one request, never the process
            if not isinstance(error, WeftError):
                logger.exception("request %d: tokenizing failed", request.request_ids[0])
            end = End("rejected" if isinstance(error, WeftError) else "failed", error=error_info(error))
            with self._lock:
                ids = [request_id for request_id in request.request_ids if request_id in self._waiting]
                self._waiting.difference_update(ids)
            api.send(TextBatch([TextDelta(request_id, end=end) for request_id in ids]))
            return
        for submit in submits:
            with self._lock:
                if submit.request_id in self._waiting:
                    self._waiting.remove(submit.request_id)
                    self._engine.send(submit)
                else:
                    self._worker.forget(submit.request_id)


def _size(job: Job) -> int:
    """Characters to tokenize, roughly; a message counts for what its template does with it."""
    size = len(job.text or "") + len(job.token_ids or ())
    size += len(job.resume_ids) if isinstance(job, TextRequest) else 0
    for message in job.messages or ():
        content = message.get("content") or ""
        parts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
        size += 256 + sum(map(len, parts))
    return size


def _longest_prompt(settings: Settings) -> int:
    """Tokens that fit into what the engine will take for its context; it may yet hold less in its KV cache."""
    context = settings.model.max_context_tokens
    return (context_tokens(settings) if context == "auto" else context) - (not is_embedder(settings))


def main(settings: Settings, folder: Path, num_text: int, index: int, context: zmq.Context[Any]) -> None:
    process = TextProcess(settings, Endpoints(folder, num_text), index, context)
    settle()
    process.run()
