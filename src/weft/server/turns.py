"""One turn of a streaming session: messages come, the answer goes out, and the conversation has both.

Invariants: every prompt is the chat template over the whole conversation, tokenized whole, so that what the cache holds
decides how much is computed and never what is said; the conversation changes once, by the commit of a turn that was
answered or stopped, and then holds the assistant's text exactly as it was sent. Whatever else ends a turn leaves the
conversation as it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from weft.core.errors import BodyTooLargeError, DeadlineError, InvalidRequestError, QueueFullError, WeftError
from weft.core.plan import Float32s
from weft.core.sampling import SamplingParams
from weft.ipc.messages import TextQuery
from weft.server import schemas
from weft.server.conversations import Commit, Messages
from weft.server.jobs import QUERY_LIMIT_S, Caller, Job, Options, Server
from weft.server.media import without_samples
from weft.server.params import sampling_params
from weft.server.session_answer import Answer, Send
from weft.server.sessions import ID_HEADER, Session
from weft.server.speech import Desk, Utterance
from weft.server.values import MAX_MESSAGES, Prompt
from weft.web.frames import Frame

PREFILLING, PREFILLED, GENERATING = "prefilling", "prefilled", "generating"

_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)
_NO_MORE = {"add_generation_prompt": False}


class Turn:
    """See the module's docstring. `send` takes frames for the client; `abandoned` is told why the turn is ended.

    Attributes:
        state: "prefilling", "prefilled" or "generating".
        complete: the last prefill has come.
        over: it holds nothing any more.
        committed: what it made of the conversation, once it has.
    """

    def __init__(
        self,
        server: Server,
        desk: Desk,
        session_id: str,
        frame: schemas.PrefillFrame,
        send: Send,
        abandoned: Callable[[Turn, WeftError], None],
    ) -> None:
        """Begins the turn that `frame`, still to be added, belongs to. Raises WeftError, and then there is none."""
        self.state = PREFILLING
        self.complete = self.over = False
        self.committed: Commit | None = None
        self._server = server
        self._desk = desk
        self._send = send
        self._abandoned = abandoned
        self._conversations = server.conversations
        self._conversation = self._conversations.begin(session_id, self, frame.epoch, server.client.retry_after_s)
        self._anew = self._to_clear = bool(frame.clear_kv_cache)
        self._messages: Messages = [] if self._anew else list(self._conversation.messages)
        self._prompt: Messages = []  # the messages of a complete prefill, their media decoded
        self._size = 0
        self._voice: Float32s | None = None
        self._cached: int | None = None  # of the turn's first prefill; the later ones find it in the cache
        self._prompt_tokens = 0
        self._answer: Answer | None = None
        self._job: Job | None = None
        self._timer: asyncio.TimerHandle | None = None  # while generate is waited for

    # ---- prefill ----------------------------------------------------------------------------------------------

    def add(self, frame: schemas.PrefillFrame, size: int) -> int:
        """Takes a prefill's messages, of so many bytes; how many the conversation has then. Raises WeftError."""
        if frame.clear_kv_cache and not self._anew:
            text = "clear_kv_cache: true is only allowed from the first prefill of a turn on"
            raise InvalidRequestError(text, param="clear_kv_cache")
        if frame.epoch is not None and frame.epoch != self._conversation.epoch:
            text = f"epoch: {frame.epoch[:80]!r} is not the conversation's present one"
            raise InvalidRequestError(text, param="epoch", code="epoch_mismatch")
        if self._size + size > self._server.settings.http.max_body_bytes:
            most = self._server.settings.http.max_body_bytes
            raise BodyTooLargeError(f"the prefills of this turn are over the limit of {most} bytes")
        self._server.media.check(frame.messages)
        count = len(self._messages) + len(frame.messages)
        if not frame.messages and (self._size == 0 or frame.is_last_chunk is False):
            raise InvalidRequestError("messages: at least one message is needed", param="messages")
        if count > MAX_MESSAGES:
            text = f"messages: the conversation would have {count} messages (allowed: at most {MAX_MESSAGES})"
            raise InvalidRequestError(text, param="messages")
        self._size += size
        self._messages += frame.messages
        if frame.tts_ref_audio_base64 is not None:
            self._voice = frame.tts_ref_audio_base64
        self.complete = frame.is_last_chunk is not False
        return count

    async def prefill(self, count: int, last: bool) -> Frame:
        """Computes the prompt of the first `count` messages; `last`: an answer follows. Raises WeftError."""
        await self._conversations.settled(self._conversation.id)
        if self._to_clear:
            await self._clear()
            self._to_clear = False
        messages = await self._server.media.taken(self._messages[:count])
        cached, prompt_tokens = await self._fill(messages, last)
        if prompt_tokens and self._cached is None:
            self._cached = cached
        if last:
            self._prompt, self._prompt_tokens = messages, prompt_tokens
            self.state = PREFILLED
            self._wait_for_generate()
        return {
            "type": "prefill_done",
            "cached_tokens": cached,
            "input_tokens": prompt_tokens - cached,
            "message_count": count,
            "epoch": self._conversation.epoch,
        }

    def _wait_for_generate(self) -> None:
        """A client that never asks for its answer does not keep its place for ever."""
        limit_s = self._server.settings.kv_cache.session_ttl_s
        error = DeadlineError(f"no generate came within {limit_s:g} s (kv_cache.session_ttl_s): the turn is over")
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.abandon, error)

    async def _clear(self) -> None:
        """Begins the conversation anew: its lease ends; where there is one conversation only, so does all KV."""
        self._conversations.end_lease(self._conversation.id)
        await self._conversations.settled(self._conversation.id)
        if self._conversations.single:
            await self._server.ask_engine("flush_cache", QUERY_LIMIT_S)

    async def _fill(self, messages: Messages, last: bool) -> tuple[int, int]:
        """Cached and all tokens of a prompt, whose KV is then in the cache if any is kept here."""
        try:
            if self._conversations.keeps_kv:
                try:
                    return await self._compute(messages, last)
                except InvalidRequestError as error:
                    if error.param != ID_HEADER:
                        raise
                    self._conversations.keeps_kv = False  # nor will it ever
            return 0, await self._count(messages, last)
        except InvalidRequestError as error:
            if last or error.code != "chat_template":
                raise
            return 0, 0  # the template wants the rest first

    async def _compute(self, messages: Messages, last: bool) -> tuple[int, int]:
        options = Options() if last else Options(template_kwargs=_NO_MORE)
        job = self._start("prefill", messages, schemas.Request(), _ONE_TOKEN, options)
        try:
            while deltas := await job.generation.take():
                for delta in deltas:
                    job.index(delta)
            job.succeeded()
        except WeftError as error:
            job.failed(error)
            raise
        finally:
            job.close()
        end = job.ends[job.public_id]
        return end.cached_tokens, end.prompt_tokens

    async def _count(self, messages: Messages, last: bool) -> int:
        limit_s = self._server.settings.http.request_timeout_s
        plain, media = without_samples(messages)
        query = TextQuery(0, "tokenize", messages=plain, template_kwargs={} if last else _NO_MORE, media=media)
        try:
            async with asyncio.timeout(limit_s):
                count: int = (await self._server.client.tokenize(query))["count"]
        except TimeoutError:
            raise DeadlineError(f"no answer from the tokenizer within {limit_s:g} s") from None
        most = self._server.facts.max_context_tokens - 1
        if count > most:
            text = f"prompt: it has {count} tokens, but at most {most} are allowed"
            raise InvalidRequestError(text, param="prompt", code="context_length_exceeded")
        return count

    # ---- generate ---------------------------------------------------------------------------------------------

    def generate(self, frame: schemas.GenerateFrame) -> None:
        """Submits the prompt for its answer. Raises WeftError; then the prefill stands."""
        params = sampling_params(
            frame,
            names={"max_tokens": "max_new_tokens"},
            max_new_tokens=frame.max_new_tokens,
            include_stop=frame.include_stop,
        )
        resume = frame.resume
        text = self._sent_before(resume)
        utterance = self._begin_speech(frame)
        body = schemas.Request(stream=True, timeout_s=frame.timeout_s, priority=frame.priority)
        options = Options(resume=resume)
        try:
            job = self._start("generate", self._prompt, body, params, options)
        except BaseException:
            if utterance is not None:
                utterance.close()
            raise
        resumed = 0 if resume is None else len(resume.token_ids)
        self._answer = Answer(job, utterance, self._send, bool(frame.return_token_ids), text, resumed)
        self.state = GENERATING
        self._stop_timer()

    async def answer(self) -> Frame:
        """Sends the answer; returns `done`, still to be sent, when the conversation has it. Raises WeftError.

        What was refused before anything was sent leaves the prefill, as a wrong `generate` does.
        """
        answer = self._answer
        assert answer is not None
        try:
            await answer.run()
        except (InvalidRequestError, QueueFullError):
            if not answer.begun:
                self._answer, self.state = None, PREFILLED
            raise
        messages = [*self._messages, {"role": "assistant", "content": answer.text}]
        self.committed = self._conversations.commit(self._conversation, messages)
        self.over = True
        cached = self._cached or 0
        return {
            "type": "done",
            "token_stats": {
                "cached": cached,
                "input": self._prompt_tokens - cached,
                "generated": answer.generated,
                "total": self._prompt_tokens + answer.generated,
            },
            "stopped": answer.stopped,
            "elapsed_ms": round(1000 * (time.monotonic() - answer.begun_s), 3),
            "finish_reason": answer.finish_reason,
            "epoch": self._conversation.epoch,
            "message_count": len(messages),
        }

    def _sent_before(self, resume: schemas.SessionResume | None) -> str:
        """What was sent of an answer that has begun elsewhere."""
        if resume is None:
            return ""
        self._server.check_token_ids(resume.token_ids, "resume.token_ids")
        if resume.text is None and resume.chars != 0:
            text = "resume.text: it is needed: the conversation is to hold what was sent of the answer"
            raise InvalidRequestError(text, param="resume.text", code="missing_parameter")
        sent = resume.text or ""
        if resume.chars is not None and resume.chars != len(sent):
            text = f"resume.chars: {resume.chars} contradicts resume.text, which has {len(sent)} characters"
            raise InvalidRequestError(text, param="resume.chars")
        return sent

    def _begin_speech(self, frame: schemas.GenerateFrame) -> Utterance | None:
        if frame.generate_audio:
            return self._desk.begin(frame.voice, frame.speed, self._voice)
        for name in ("voice", "speed"):
            if getattr(frame, name) is not None:
                raise InvalidRequestError(f"{name}: only allowed when generate_audio is true", param=name)
        return None

    def _start(
        self, what: str, messages: Messages, body: schemas.Request, params: SamplingParams, options: Options
    ) -> Job:
        session_id = self._conversation.id
        caller = Caller(
            self._server.client.new_ids(1)[0],
            f"WS /ws/streaming/{session_id} {what}",
            Session(session_id, None) if self._conversations.keeps_kv else None,
            admitted=True,
        )
        self._job = self._server.start(caller, body, [Prompt(messages=messages)], params, options=options)
        return self._job

    # ---- its end ----------------------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Ends the answer early; False when there was nothing to stop."""
        return self._answer is not None and not self.over and self._answer.stop()

    def abandon(self, error: WeftError) -> None:
        """Ends the turn without a commit; its client is told this error."""
        self._abandoned(self, error)

    def close(self) -> None:
        """Gives back what it holds, at once; idempotent. Without a commit the conversation is as before."""
        if self.over:
            return
        self.over = True
        self._stop_timer()
        if self._job is not None:
            self._job.close()
        if self._answer is not None:
            self._answer.close()
        self._conversations.end(self._conversation)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def undo(self) -> None:
        """Its client never heard that it was done: takes the commit back."""
        if self.committed is not None:
            self._conversations.undo(self.committed)
