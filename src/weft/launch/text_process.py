"""The text process: a `TextWorker` between an inbox and outboxes.

Two threads: the main one turns tokens into text, so that running streams never wait for somebody's long prompt; the
other tokenizes what has queued up. Aborts follow their request through the tokenizing thread, so that the engine gets
them after the Submit.
"""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any

import zmq

from weft.backends.registry import model_folder
from weft.config.settings import Settings
from weft.core.errors import WeftError
from weft.engine.text_worker import TextWorker
from weft.ipc.errors import error_info
from weft.ipc.messages import (
    Abort,
    End,
    Finish,
    QueryReply,
    Ready,
    TextBatch,
    TextDelta,
    TextQuery,
    TextRequest,
    TokenBatch,
    decode_to_text,
)
from weft.ipc.sockets import Endpoints, Inbox, Outbox
from weft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Job = TextRequest | TextQuery | Abort


class TextProcess:
    """Wires one `TextWorker` to the other processes; `run` returns only by an exception."""

    def __init__(self, settings: Settings, endpoints: Endpoints, index: int, context: zmq.Context[Any]) -> None:
        self._index = index
        self._endpoints = endpoints
        self._context = context
        self._inbox = Inbox(context, endpoints.text(index), decode_to_text)
        self._api = Outbox(context, endpoints.api)
        self._engine = Outbox(context, endpoints.engine)
        template = settings.model.chat_template
        tokenizer = Tokenizer.load(model_folder(settings), chat_template=template)
        self._worker = TextWorker(tokenizer, index)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def run(self) -> None:
        tokenizer = self._worker.tokenizer
        facts = {"vocab_size": tokenizer.vocab_size, "has_chat_template": tokenizer.chat is not None}
        self._api.send(Ready(f"text{self._index}", facts))
        threading.Thread(target=self._tokenize, name="tokenize", daemon=True).start()
        while True:
            for message in self._inbox.receive(None):
                if isinstance(message, TokenBatch):
                    self._push(message)
                else:
                    self._jobs.put(message)

    def _push(self, batch: TokenBatch) -> None:
        """Main thread: tokens to text."""
        deltas: list[TextDelta] = []
        for output in batch.outputs:
            try:
                delta, complete = self._worker.push(output)
            except Exception as error:  # a broken output ends one request, never the process
                logger.exception("request %d: detokenizing failed", output.request_id)
                delta, complete = TextDelta(output.request_id, end=End("failed", error=error_info(error))), False
                self._worker.forget(output.request_id)
                self._engine.send(Abort([output.request_id]))
            if delta is not None:
                deltas.append(delta)
            if complete:
                self._engine.send(Finish(output.request_id))
        if deltas:
            self._api.send(TextBatch(deltas))

    def _tokenize(self) -> None:
        """Second thread: text to tokens. ZeroMQ sockets belong to one thread, so it has its own."""
        api, engine = Outbox(self._context, self._endpoints.api), Outbox(self._context, self._endpoints.engine)
        while True:
            job = self._jobs.get()
            if isinstance(job, Abort):
                engine.send(job)
                continue
            try:
                if isinstance(job, TextQuery):
                    api.send(QueryReply(job.call_id, self._worker.answer(job)))
                    continue
                for submit in self._worker.prepare(job):
                    engine.send(submit)
            except Exception as error:  # a broken prompt ends one request, never the process
                if not isinstance(error, WeftError):
                    logger.exception("tokenizing failed")
                if isinstance(job, TextQuery):
                    api.send(QueryReply(job.call_id, error=error_info(error)))
                else:
                    end = End("rejected", error=error_info(error))
                    api.send(TextBatch([TextDelta(request_id, end=end) for request_id in job.request_ids]))


def main(settings: Settings, folder: Path, num_text: int, index: int, context: zmq.Context[Any]) -> None:
    TextProcess(settings, Endpoints(folder, num_text), index, context).run()
