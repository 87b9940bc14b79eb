"""`TextWorker` with the demo model's tokenizer; the test plays the engine, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from weft.core.errors import InvalidRequestError
from weft.core.sampling import SamplingParams
from weft.engine.text_worker import TextWorker
from weft.ipc.messages import (
    End,
    ErrorInfo,
    LogprobItem,
    TextDelta,
    TextLogprob,
    TextQuery,
    TextRequest,
    TokenOutput,
)
from weft.text.tokenizer import Tokenizer

EOS = 2
TEXTS = ("The cat sat. END of it", "héllo 你好 😀!")


def item(token: int) -> LogprobItem:
    return LogprobItem(token, -float(token), [token, token + 1], [-float(token), -9.0])


def completed(**facts: Any) -> End:
    return End("completed", "length", **facts)


@dataclass
class Answer:
    """All deltas of one request, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    deltas: list[TextDelta] = field(default_factory=list)
    told_complete_after: int | None = None  # tokens

    @property
    def end(self) -> End:
        assert [delta.end is not None for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        end = self.deltas[-1].end
        assert end is not None
        return end


class Rig:
    """A worker and one request; `play` gives it tokens in pushes of `size`."""

    def __init__(self, tokenizer: Tokenizer, *, stream: bool = False, **params: Any) -> None:
        outer = {name: params.pop(name) for name in ("echo", "text", "token_ids", "messages") if name in params}
        self.worker = TextWorker(tokenizer)
        self.request = TextRequest([1], SamplingParams(**params), stream=stream, **({"text": "Once"} | outer))
        (self.submit,) = self.worker.prepare(self.request)
        self.logprobs = params.get("logprobs") is not None

    def play(self, ids: list[int], *, size: int = 1, end_token: int | None = None, end: End | None = None) -> Answer:
        answer = Answer()
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            given = [item(token) for token in part] if self.logprobs else None
            if self.push(answer, TokenOutput(1, part, given)):
                assert answer.told_complete_after is None, "the engine was told twice"
                answer.told_complete_after = start + len(part)
        last = [] if end_token is None else [end_token]
        given = [item(token) for token in last] if self.logprobs and last else None
        finish = end or completed(completion_tokens=len(ids) + len(last))
        assert not self.push(answer, TokenOutput(1, last, given, end_token=end_token, end=finish))
        assert self.worker.open_requests == 0
        return answer

    def push(self, answer: Answer, output: TokenOutput) -> bool:
        delta, complete = self.worker.push(output)
        if delta is not None:
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs or []
            answer.deltas.append(delta)
        return complete


# ---- in ---------------------------------------------------------------------------------------------------------


def test_prompts_of_all_kinds_become_tokens(tokenizer: Tokenizer) -> None:
    def sent(**source: Any) -> list[int]:
        return np.frombuffer(Rig(tokenizer, **({"text": None} | source)).submit.token_ids, dtype=np.int32).tolist()

    assert sent(text="Once upon") == tokenizer.encode("Once upon")
    assert sent(token_ids=[5, 6, 7]) == [5, 6, 7]
    messages = [{"role": "user", "content": "Hi"}]
    assert sent(messages=messages) == tokenizer.encode_chat(messages)


def test_n_answers_share_the_prompt_and_count_the_seed_up(tokenizer: Tokenizer) -> None:
    worker = TextWorker(tokenizer, index=3)
    request = TextRequest([5, 6, 7], SamplingParams(seed=10), text="Once", priority=2, arrival_s=1.5, deadline_s=9.0)
    submits = worker.prepare(request)
    assert [(s.request_id, s.params.seed) for s in submits] == [(5, 10), (6, 11), (7, 12)]
    assert len({s.token_ids for s in submits}) == 1
    for s in submits:
        assert (s.reply_to, s.priority, s.arrival_s, s.deadline_s) == (3, 2, 1.5, 9.0)
    unseeded = worker.prepare(TextRequest([8, 9], SamplingParams(), text="Once"))
    assert [s.params.seed for s in unseeded] == [None, None]


@pytest.mark.parametrize(("seed", "seeds"), [(2**64 - 1, [2**64 - 1, 0, 1]), (-1, [-1, 0, 1])])
def test_seeds_wrap_around(seed: int, seeds: list[int], tokenizer: Tokenizer) -> None:
    worker = TextWorker(tokenizer)
    submits = worker.prepare(TextRequest([1, 2, 3], SamplingParams(seed=seed), text="Once"))
    assert [s.params.seed for s in submits] == seeds


def bad_requests() -> list[TextRequest]:
    return [
        TextRequest([1, 2], SamplingParams(), token_ids=[5, -1]),
        TextRequest([1, 2], SamplingParams(), token_ids=[2**31]),
        TextRequest([1, 2], SamplingParams(), text="lone \ud800 surrogate"),
        TextRequest([1, 2], SamplingParams(), messages=[{"role": "user"}]),
    ]


@pytest.mark.parametrize("request_", bad_requests(), ids=range(4))
def test_bad_prompts_leave_nothing_behind(request_: TextRequest, tokenizer: Tokenizer) -> None:
    worker = TextWorker(tokenizer)
    with pytest.raises(InvalidRequestError):
        worker.prepare(request_)
    assert worker.open_requests == 0


def test_queries(tokenizer: Tokenizer) -> None:
    worker = TextWorker(tokenizer)
    ids = tokenizer.encode(TEXTS[1])
    answer = worker.answer(TextQuery(1, "tokenize", text=TEXTS[1]))
    assert answer["tokens"] == ids
    assert len(answer["pieces"]) == len(ids)
    assert worker.answer(TextQuery(1, "detokenize", token_ids=ids)) == {"text": TEXTS[1]}
    messages = [{"role": "user", "content": "Hi"}]
    for prompt in (True, False):
        query = TextQuery(1, "tokenize", messages=messages, template_kwargs={"add_generation_prompt": prompt})
        expected = tokenizer.encode_chat(messages, add_generation_prompt=prompt)
        assert worker.answer(query)["tokens"] == expected
    with pytest.raises(InvalidRequestError) as caught:
        worker.answer(TextQuery(1, "detokenize", token_ids=[tokenizer.vocab_size]))
    assert caught.value.param == "tokens"


# ---- out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_out_as_it_was(text: str, size: int, stream: bool, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    answer = Rig(tokenizer, stream=stream).play(ids, size=size)
    assert (answer.text, answer.token_ids) == (text, ids)
    assert answer.end.finish_reason == "length"
    if not stream:
        assert len(answer.deltas) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_over_several_tokens(size: int, stream: bool, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXTS[0])
    upto = tokenizer.encode("The cat sat. END")
    assert ids[: len(upto)] == upto and len(upto) > len(tokenizer.encode("The cat sat. "))
    rig = Rig(tokenizer, stream=stream, stop="END", logprobs=1)
    answer = rig.play(ids, size=size)
    assert answer.text == "The cat sat. "
    assert answer.token_ids == upto
    assert [entry.logprob for entry in answer.logprobs] == [-float(token) for token in upto]
    assert (answer.end.finish_reason, answer.end.stop) == ("stop", "END")
    assert answer.end.completion_tokens == len(upto)
    assert answer.told_complete_after is not None
    assert len(upto) <= answer.told_complete_after < len(upto) + size


def test_the_stop_string_can_stay(tokenizer: Tokenizer) -> None:
    answer = Rig(tokenizer, stop="END", include_stop=True).play(tokenizer.encode(TEXTS[0]))
    assert answer.text == "The cat sat. END"


def test_held_back_text_comes_in_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The cat sat. EN")
    answer = Rig(tokenizer, stream=True, stop="END").play(ids)
    assert answer.text == "The cat sat. EN"
    assert answer.end.finish_reason == "length"


def test_min_tokens_holds_for_stop_strings_too(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("cat cat cat")
    assert Rig(tokenizer, stop="cat").play(ids).text == ""
    assert Rig(tokenizer, stop="cat", min_tokens=len(ids) - 1).play(ids).text == "cat cat "


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_token_is_counted_but_not_shown(stream: bool, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The cat")
    end = End("completed", "stop", completion_tokens=len(ids) + 1)
    answer = Rig(tokenizer, stream=stream, logprobs=0).play(ids, end_token=EOS, end=end)
    assert (answer.text, answer.token_ids) == ("The cat", ids)
    assert len(answer.logprobs) == len(ids)
    assert (answer.end.finish_reason, answer.end.stop, answer.end.completion_tokens) == ("stop", None, len(ids) + 1)


def test_logprobs_carry_texts_and_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    answer = Rig(tokenizer, logprobs=2).play(ids)
    assert b"".join(entry.token_bytes for entry in answer.logprobs) == "😀".encode()
    assert [len(entry.top) for entry in answer.logprobs] == [2] * len(ids)
    first = answer.logprobs[0]
    assert first.top[0] == (first.token, first.token_bytes, first.logprob)


@pytest.mark.parametrize("stream", [True, False])
def test_echo_and_prompt_logprobs_come_first_and_once(stream: bool, tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("Once upon a time"), tokenizer.encode(" there was")
    rig = Rig(tokenizer, stream=stream, text="Once upon a time", echo=True, prompt_logprobs=1)
    answer = Answer()
    for chunk in (prompt[1:3], prompt[3:]):  # a prompt computed in two pieces, no token yet
        assert not rig.push(answer, TokenOutput(1, prompt_logprobs=[item(token) for token in chunk]))
    assert answer.deltas == []
    for token in ids:
        rig.push(answer, TokenOutput(1, [token]))
    rig.push(answer, TokenOutput(1, end=completed()))
    first, *others = answer.deltas
    assert first.prompt_text == "Once upon a time"
    assert first.prompt_logprobs is not None
    assert [entry and entry.logprob for entry in first.prompt_logprobs] == [None, *(-float(t) for t in prompt[1:])]
    assert all(delta.prompt_text is None and delta.prompt_logprobs is None for delta in others)
    assert answer.text == " there was"


def test_prompt_logprobs_of_a_single_token_prompt(tokenizer: Tokenizer) -> None:
    answer = Rig(tokenizer, text=None, token_ids=[5], prompt_logprobs=1).play([6])
    assert answer.deltas[0].prompt_logprobs == [None]
    answer = Rig(tokenizer, text=None, token_ids=[5]).play([6])
    assert answer.deltas[0].prompt_logprobs is None


def test_echo_of_token_ids_is_their_text(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, text=None, token_ids=tokenizer.encode("Once upon"), echo=True)
    assert rig.play([5]).deltas[0].prompt_text == "Once upon"


@pytest.mark.parametrize("state", ["timeout", "failed", "cancelled"])
def test_an_error_keeps_what_was_there_and_closes(state: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The cat")
    end = End(state, error=ErrorInfo(500, "why"), completion_tokens=len(ids))
    answer = Rig(tokenizer).play(ids, end=end)
    assert answer.text == "The cat"
    assert (answer.end.state, answer.end.error) == (state, ErrorInfo(500, "why"))


@pytest.mark.parametrize("state", ["timeout", "failed"])
def test_a_complete_answer_stays_complete(state: str, tokenizer: Tokenizer) -> None:
    """The engine had not heard of the stop string yet when it gave up on the request."""
    end = End(state, error=ErrorInfo(500, "why"))
    answer = Rig(tokenizer, stop="END").play(tokenizer.encode(TEXTS[0]), end=end)
    assert (answer.end.state, answer.end.finish_reason, answer.end.error) == ("completed", "stop", None)
    assert answer.text == "The cat sat. "


def test_what_comes_for_the_unknown_or_forgotten_is_ignored(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, stream=True)
    assert rig.worker.push(TokenOutput(99, [5])) == (None, False)
    rig.worker.forget(1)
    rig.worker.forget(1)
    assert rig.worker.push(TokenOutput(1, [5], end=completed())) == (None, False)
    assert rig.worker.open_requests == 0


def test_an_end_without_any_token(tokenizer: Tokenizer) -> None:
    end = End("rejected", error=ErrorInfo(429, "full"))
    answer = Rig(tokenizer, stream=True).play([], end=end)
    assert (answer.text, answer.end.state) == ("", "rejected")


def test_two_requests_do_not_mix(tokenizer: Tokenizer) -> None:
    worker = TextWorker(tokenizer)
    worker.prepare(TextRequest([1, 2], SamplingParams(), text="Once"))
    one, two = tokenizer.encode("first answer here"), tokenizer.encode("second answer here")
    for a, b in zip(one, two, strict=False):
        worker.push(TokenOutput(1, [a]))
        worker.push(TokenOutput(2, [b]))
    shared = min(len(one), len(two))
    for request_id, ids in ((1, one), (2, two)):
        delta, _ = worker.push(TokenOutput(request_id, end=completed()))
        assert delta is not None
        assert delta.text == tokenizer.decode(ids[:shared])


@pytest.mark.timeout(60)  # seconds where minutes would be the fault
def test_a_long_unstreamed_answer_costs_time_in_proportion(tokenizer: Tokenizer) -> None:
    """Copying all that came before with every token would touch 10^10 list entries here."""
    rig = Rig(tokenizer)
    count = 200_000
    answer = Answer()
    for _ in range(count):
        rig.push(answer, TokenOutput(1, [408]))
    rig.push(answer, TokenOutput(1, end=completed()))
    assert len(answer.token_ids) == count
