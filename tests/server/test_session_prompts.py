"""The prompt built turn by turn over a cache equals the one built cold from the whole history, token for token.

Hypothesis leads conversations through the session's own code, with a real `TextWorker` and a real engine over the fake
backend, whose next token is a hash of all KV that a row reads: an answer over a wrong cache would be another one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.fakes import FACTS, FakeEngineClient
from tests.server.ws_driver import Socket
from weft.backends.registry import BUNDLED_MODEL, create_backend
from weft.config.resolve import resolve
from weft.core.errors import WeftError
from weft.core.sampling import SamplingParams
from weft.engine.core import EngineCore
from weft.engine.text_worker import TextWorker
from weft.ipc.errors import error_info
from weft.ipc.messages import End, TextDelta, TextRequest
from weft.server import create_app
from weft.text.tokenizer import Tokenizer

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """\
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim %}
    {%- if loop.first %}
        {%- set content = '<|begin_of_text|>' + content %}
    {%- endif %}
    {{- content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{ raise_exception('No user message.') }}{% endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}
"""

STYLES = {"chatml": CHATML, "headers": HEADERS, "thinking": THINKING}

ANSWER_TOKENS = 6
_FAKE = resolve(sets=["backend.name=fake", "kv_cache.max_items=8192"]).settings


@dataclass
class Turn:
    """`pieces`: the messages, prefill by prefill; `clear`: the conversation begins anew; `stop`: it is stopped."""

    pieces: list[list[dict[str, str]]]
    clear: bool
    stop: bool
    gone: bool


_CONTENT = st.lists(
    st.sampled_from(
        ["My name is Mira.", " ", "\n", "<think>\nhm\n</think>\n\n", "</think>", "<|im_end|>", "<|im_start|>user\n"]
        + ["What is 2 plus 2?", "我叫小明", "naïve 🧵", "{{ messages }}", "a", "  b", ""]
    ),
    max_size=4,
).map("".join)
_MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), _CONTENT
)
_USER = st.builds(lambda content: {"role": "user", "content": content}, _CONTENT)
_PIECES = st.tuples(st.lists(st.lists(_MESSAGE, min_size=1, max_size=2), max_size=2), _USER).map(
    lambda drawn: [*drawn[0], [drawn[1]]]
)
_RARELY = st.sampled_from([False, False, False, True])
_TURNS = st.lists(st.builds(Turn, _PIECES, _RARELY, _RARELY, _RARELY), min_size=1, max_size=4)


class WholeEngine(FakeEngineClient):
    """A client with the text worker and the engine in place: each request runs to its end when it is submitted.

    `prompts`: the token ids of what the engine was submitted, with whether it was for an answer. `holds_after`: so many
    tokens of an answer come, and no more until it is aborted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(self._run)
        self.prompts: list[tuple[bool, list[int]]] = []
        self.holds_after: int | None = None
        self.worker = TextWorker(tokenizer)
        self.core = EngineCore(_FAKE, create_backend(_FAKE))
        self.core.load()

    def _run(self, client: FakeEngineClient, request: TextRequest) -> None:
        generation = self.generation_of(request)
        try:
            (submit,) = self.worker.prepare(request)
        except WeftError as error:
            generation.deliver(TextDelta(request.request_ids[0], end=End("rejected", error=error_info(error))))
            return
        self.prompts.append((request.stream, np.frombuffer(submit.token_ids, np.int32).tolist()))
        self.core.submit(submit)
        tokens = 0
        while self.core.has_work and not (request.stream and tokens == self.holds_after):
            for output in self.core.step():
                delta, complete = self.worker.push(output)
                tokens += len(output.tokens)
                if complete:
                    self.core.complete(output.request_id)
                if delta is not None:
                    generation.deliver(delta)

    def abort(self, request_ids: list[int] | None) -> None:
        self.core.abort(request_ids or [])
        while self.core.has_work:
            self.core.step()
        for request_id in request_ids or []:
            self.worker.forget(request_id)
        super().abort(request_ids)

    async def engine_query(self, op: str, **about: Any) -> dict[str, Any]:
        if op == "end_session":
            return self.core.end_session(about["session_id"])
        return {"flushed_tokens": self.core.flush_cache()}


def cold(tokenizer: Tokenizer, history: list[dict[str, str]], most: int) -> tuple[list[int], str, int]:
    """Prompt, answer and number of cached tokens, by an engine and a text worker that have seen nothing else."""
    worker, core = TextWorker(tokenizer), EngineCore(_FAKE, create_backend(_FAKE))
    core.load()
    (submit,) = worker.prepare(TextRequest([1], SamplingParams(most, temperature=0), messages=history))
    core.submit(submit)
    text, cached = "", -1
    while core.has_work:
        for output in core.step():
            delta, _ = worker.push(output)
            if delta is not None:
                text += delta.text
                cached = delta.end.cached_tokens if delta.end is not None else cached
    core.close()
    return np.frombuffer(submit.token_ids, np.int32).tolist(), text, cached


async def lead(tokenizer: Tokenizer, turns: list[Turn], max_sessions: int) -> tuple[int, int]:
    """One conversation; the tokens of its prompts that were cached, and all of them."""
    engine = WholeEngine(tokenizer)
    facts = replace(FACTS, vocab_size=tokenizer.vocab_size, max_context_tokens=131072)
    made = resolve(sets=["backend.name=fake", f"http.max_sessions={max_sessions}"]).settings
    app = create_app(engine, facts, made)  # type: ignore[arg-type]
    socket = await Socket(app).open()
    history: list[dict[str, str]] = []
    reused = total = 0
    for turn in turns:
        before, history = history, [] if turn.clear else history
        for number, piece in enumerate(turn.pieces):
            history = history + piece
            last = number == len(turn.pieces) - 1
            clear = turn.clear and number == 0
            socket.send("prefill", messages=piece, is_last_chunk=last, clear_kv_cache=clear)
            filled = await socket.next()
            assert filled["type"] == "prefill_done", filled
            assert filled["message_count"] == len(history)
        prompt, answer, _ = cold(tokenizer, history, ANSWER_TOKENS)
        assert filled["cached_tokens"] + filled["input_tokens"] == len(prompt)
        reused, total = reused + filled["cached_tokens"], total + len(prompt)
        engine.holds_after = ANSWER_TOKENS // 2 if turn.stop or turn.gone else None
        socket.send("generate", temperature=0, max_new_tokens=ANSWER_TOKENS)
        if turn.gone:
            while engine.prompts[-1][0] is False:
                await asyncio.sleep(0)
            socket.disconnect()
            await socket.done()
            socket = await Socket(app).open()
            history = before
            continue
        if turn.stop:
            await asyncio.sleep(0)
            socket.send("stop")
        *chunks, done = await socket.until("done")
        shown = "".join(chunk["text_delta"] or "" for chunk in chunks)
        assert shown == answer if not turn.stop else answer.startswith(shown)
        assert done["stopped"] is turn.stop
        assert [ids for answers, ids in engine.prompts if answers][-1] == prompt
        assert engine.prompts[-2] == (False, prompt)
        history = [*history, {"role": "assistant", "content": shown}]
    socket.disconnect()
    await socket.done()
    assert engine.open_requests == 0 and engine.worker.open_requests == 0
    engine.core.close()
    return reused, total


@pytest.fixture(scope="module", params=STYLES)
def styled(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL, chat_template=STYLES[request.param])


@settings(max_examples=40)
@given(turns=_TURNS, max_sessions=st.sampled_from([1, 4]))
def test_a_prompt_over_the_cache_is_the_cold_one(styled: Tokenizer, turns: list[Turn], max_sessions: int) -> None:
    asyncio.run(lead(styled, turns, max_sessions))


def test_the_cache_is_used(styled: Tokenizer) -> None:
    """Otherwise the test above would prove nothing: of the second prompt most was there."""
    turns = [
        Turn([[{"role": "user", "content": text}]], False, False, False)
        for text in ("My name is Mira, and I like long threads of wool.", "What is my name?")
    ]
    reused, total = asyncio.run(lead(styled, turns, 4))
    assert reused > total / 4


def test_a_thought_leaves_the_prompt_when_it_is_old() -> None:
    """What one turn computed is not the beginning of the next one's prompt: ids of turns cannot simply be joined."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL, chat_template=THINKING)
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    first = [{"role": "user", "content": "2 plus 2?"}, thought]
    whole = tokenizer.chat_text([*first, {"role": "user", "content": "Sure?"}], add_generation_prompt=True)
    assert "hm" in tokenizer.chat_text(first, add_generation_prompt=False) and "hm" not in whole
    turns = [
        Turn([first, [{"role": "user", "content": "Sure?"}]], False, False, False),
        Turn([[{"role": "user", "content": "Really?"}]], False, True, False),
        Turn([[{"role": "user", "content": "And 3 plus 3?"}]], False, False, False),
    ]
    asyncio.run(lead(tokenizer, turns, 4))
