"""Answers that are cut anywhere and go on in a fresh engine: as if nobody had cut them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import fake_settings
from weft.backends.base import Backend
from weft.backends.fake.backend import FakeBackend
from weft.backends.registry import BUNDLED_MODEL
from weft.core.errors import InvalidRequestError
from weft.core.plan import SamplingRow, StepPlan
from weft.core.sampling import SamplingParams
from weft.engine.core import EngineCore
from weft.engine.runner import run_step
from weft.engine.text_worker import TextWorker
from weft.ipc.messages import End, LogprobItem, Submit, TextDelta, TextRequest, TokenOutput
from weft.sim.replay import Replay
from weft.text.tokenizer import Tokenizer

EOS = 2
PROMPT = "Once upon a time"
WORDS = "The end. é你好 😀 of it, END"


@dataclass
class Answer:
    """What a client gets, event by event."""

    events: list[tuple[list[int], str]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    end: End | None = None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.events)

    @property
    def ids(self) -> list[int]:
        return [token for ids, _ in self.events for token in ids]

    def facts(self) -> tuple[Any, ...]:
        assert self.end is not None
        end = self.end
        return end.state, end.finish_reason, end.stop, end.prompt_tokens, end.completion_tokens, end.error

    def add(self, delta: TextDelta) -> None:
        assert self.end is None
        self.events.append((delta.token_ids, delta.text))
        self.logprobs += delta.logprobs or []
        self.end = delta.end


class Wordy(FakeBackend):
    """Says `WORDS` again and again, with mistakes that depend on all tokens, the seed, and penalised output."""

    features = frozenset({"logprobs", "prompt_logprobs", "penalties", "logit_bias"})

    def __init__(self, words: list[int], **options: Any) -> None:
        super().__init__(vocab_size=8000, max_context_tokens=512, eos_token_ids=(EOS,), **options)
        self._words = words

    def _sample(self, plan: StepPlan, sampling: SamplingRow) -> int:
        number = super()._sample(plan, sampling)
        if sampling.output_ids is not None and len(sampling.output_ids):
            assert (sampling.output_ids >= 0).all()
            number += int(sampling.output_ids.sum()) + len(sampling.output_ids)
        if number % 16 == 0 and EOS not in sampling.banned and not sampling.params.ignore_eos:
            return EOS
        in_order = number % 4 != 0
        return self._words[(sampling.output_index if in_order else number // 4) % len(self._words)]


class Engine:
    """A core whose steps are computed as late as its depth allows, with its text worker; `run` serves one request."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, *sets: str) -> None:
        self.core = EngineCore(fake_settings("kv_cache.max_items=2048", *sets), backend)
        self.core.load()
        self.worker = TextWorker(tokenizer)
        self.submits: list[Submit] = []
        self.answers: dict[int, Answer] = {}

    def run(self, ids: list[int] | None = None, chars: int | None = None, **params: Any) -> Answer:
        """The answer to `PROMPT`, or how it goes on after `ids`."""
        return self.run_all([(ids, chars)], **params)[0]

    def run_all(self, cuts: list[tuple[list[int] | None, int | None]], **params: Any) -> list[Answer]:
        answers = [self.submit(ids, chars, **params) for ids, chars in cuts]
        self.finish()
        return answers

    def submit(self, ids: list[int] | None = None, chars: int | None = None, **params: Any) -> Answer:
        request_id = len(self.answers) + 1
        request = TextRequest([request_id], SamplingParams(**params), text=PROMPT, stream=True)
        request.resume_ids, request.resume_chars = ids or [], chars
        (submit,) = self.worker.prepare(request)
        self.submits.append(submit)
        self.core.submit(submit)
        self.answers[request_id] = Answer()
        return self.answers[request_id]

    def finish(self) -> None:
        flights: list[StepPlan] = []
        while self.worker.open_requests:
            while len(flights) < self.core.depth and (plan := self.core.begin()) is not None:
                flights.append(plan)
            if flights:
                self.core.land(run_step(self.core.backend, flights.pop(0)))
            for output in self.core.take_outputs():
                self._push(self.answers[output.request_id], output)
            self.core.scheduler.check()
        while self.core.has_work:  # steps of requests whose text was complete before
            while flights:
                self.core.land(run_step(self.core.backend, flights.pop(0)))
            assert not self.core.step()

    def _push(self, answer: Answer, output: TokenOutput) -> None:
        delta, complete = self.worker.push(output)
        if delta is not None:
            answer.add(delta)
        if complete:
            self.core.complete(output.request_id)


@pytest.fixture(scope="session")
def words(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(WORDS, add_special_tokens=False)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 8},
    "penalties": {"seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "min-tokens": {"seed": 4, "min_tokens": 25},
    "no-eos": {"seed": 8, "ignore_eos": True},
    "stop": {"seed": 6, "ignore_eos": True, "stop": ("你好 é", "it, ENDTh")},
    "stop-kept": {"seed": 1, "ignore_eos": True, "stop": ("of it, ", "好�", "The"), "include_stop": True},
    "stop-after-min-tokens": {"seed": 2, "min_tokens": 9, "ignore_eos": True, "stop": ("e", "n")},
    "half-a-character-at-the-end": {"seed": 6, "max_new_tokens": 5},
    "held-text-at-the-end": {"seed": 6, "max_new_tokens": 15, "stop": (" of it, ENDing",)},
}


def check_all_cuts(whole: Answer, engine: Engine, **params: Any) -> None:
    """Cuts after every event, with and without a count of characters."""
    ids: list[int] = []
    shown = ""
    pieces = []
    for event_ids, text in whole.events:
        ids, shown = ids + event_ids, shown + text
        pieces.append((ids, shown))
    if whole.end is not None and whole.end.finish_reason == "stop" and whole.end.stop is None:
        pieces.pop()  # by its end token, which nobody is told: it can only be cut before
    assert len(pieces) >= 3
    for ids, shown in pieces:
        told = [None, len(shown), len(shown) // 2, 0]
        for chars, rest in zip(told, engine.run_all([(ids, chars) for chars in told], **params), strict=True):
            known = shown if chars is None else shown[:chars]
            assert (known + rest.text, ids + rest.ids) == (whole.text, whole.ids), (len(ids), chars)
            assert rest.facts() == whole.facts(), (len(ids), chars)


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_on_as_if_it_had_not_been_cut(
    case: str, overlap: str, tokenizer: Tokenizer, words: list[int]
) -> None:
    params = {"max_new_tokens": 40} | CASES[case]
    whole = Engine(Wordy(words), tokenizer).run(**params)
    cold = ("kv_cache.retain=none",)  # every resumed request computes all of its tokens
    check_all_cuts(whole, Engine(Wordy(words), tokenizer, f"scheduler.overlap={overlap}", *cold), **params)
    chunked = (f"scheduler.overlap={overlap}", "scheduler.chunked_prefill_size=4")
    check_all_cuts(whole, Engine(Wordy(words), tokenizer, *chunked), **params)


def test_the_cases_are_what_they_say(tokenizer: Tokenizer, words: list[int]) -> None:
    """The cuts above go through characters and stop strings, and the answers end in all ways."""
    answers = {
        name: Engine(Wordy(words), tokenizer).run(**({"max_new_tokens": 40} | case)) for name, case in CASES.items()
    }
    assert any(ids and not text for ids, text in answers["no-eos"].events), "no character was cut"
    ends = {name: (a.end.finish_reason, a.end.stop) for name, a in answers.items() if a.end is not None}
    assert ends["no-eos"] == ("length", None)
    assert ends["penalties"] == ends["seeded"] == ends["min-tokens"] == ("stop", None)
    assert ends["stop"] == ("stop", "it, ENDTh")
    assert ends["stop-kept"] == ("stop", "The")
    assert ends["stop-after-min-tokens"] == ("stop", "e")
    assert answers["half-a-character-at-the-end"].events[-1][1] == "\ufffd"
    assert answers["held-text-at-the-end"].events[-1][1] == " of it"
    assert min(len(answer.events) for answer in answers.values()) >= 5


@pytest.mark.parametrize("sequences", [True, False])
def test_engines_with_sequences_go_on_too(sequences: bool, tokenizer: Tokenizer, words: list[int]) -> None:
    params = {"max_new_tokens": 20, "seed": 4, "ignore_eos": True}
    options = {"num_sequences": 12, "shares_prefixes": sequences}
    whole = Engine(Wordy(words, **options), tokenizer).run(**params)
    check_all_cuts(whole, Engine(Wordy(words, **options), tokenizer), **params)


@contextmanager
def demo_model() -> Iterator[Backend]:
    pytest.importorskip("torch", reason="needs the torch engine")
    from weft.backends.torch.backend import TorchBackend

    backend = TorchBackend(Path(BUNDLED_MODEL), dtype="float32")
    yield backend
    backend.close()


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("case", ["greedy", "seeded", "penalties", "min-tokens", "stop"])
def test_a_real_model_goes_on(case: str, overlap: str, tokenizer: Tokenizer) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True} | CASES[case] | {"ignore_eos": case != "min-tokens"}
    if case == "stop":
        params["stop"] = ("e ", " an")
    params["min_tokens"] = min(15, params.get("min_tokens", 0))
    with demo_model() as first, demo_model() as second:
        whole = Engine(first, tokenizer).run(**params)
        check_all_cuts(whole, Engine(second, tokenizer, f"scheduler.overlap={overlap}"), **params)


def test_no_logprobs_of_what_was_told_and_their_places_go_on(tokenizer: Tokenizer, words: list[int]) -> None:
    params = {"max_new_tokens": 12, "seed": 3, "ignore_eos": True, "logprobs": 1}
    whole = Engine(Wordy(words), tokenizer).run(**params)
    engine = Engine(Wordy(words), tokenizer)
    rest = engine.run(whole.ids[:5], **params)
    assert rest.logprobs == whole.logprobs[5:]
    request = TextRequest([99], SamplingParams(**params), text=PROMPT, stream=True, resume_ids=whole.ids[:5])
    worker = TextWorker(tokenizer)
    worker.prepare(request)
    delta, _ = worker.push(TokenOutput(99, [words[0]], [LogprobItem(words[0], -0.5, [], [])]))
    assert delta is not None
    assert delta.resumed_bytes == b"".join(map(tokenizer.token_bytes, whole.ids[:5]))


def test_what_was_held_back_may_have_been_sent(tokenizer: Tokenizer, words: list[int]) -> None:
    """A client that has more characters than a stream shows, such as those that came with the end, gets the others."""
    params = {"max_new_tokens": 14, "seed": 8, "ignore_eos": True, "stop": (WORDS + "!",)}
    whole = Engine(Wordy(words), tokenizer).run(**params)
    for cut in range(1, 14):
        ids = whole.ids[:cut]
        have = len(tokenizer.decode(ids).rstrip("\ufffd"))
        rest = Engine(Wordy(words), tokenizer).run(ids, have, **params)
        assert whole.text[:have] + rest.text == whole.text


def test_a_request_without_a_seed_goes_on(tokenizer: Tokenizer, words: list[int]) -> None:
    rest = Engine(Wordy(words), tokenizer).run(words[:6], max_new_tokens=10, ignore_eos=True)
    assert len(rest.ids) == 4
    assert rest.end is not None
    assert (rest.end.finish_reason, rest.end.completion_tokens) == ("length", 10)


def test_it_takes_its_place_in_the_queue_and_may_be_retracted(tokenizer: Tokenizer, words: list[int]) -> None:
    params = {"max_new_tokens": 70, "ignore_eos": True}
    engine = Engine(Wordy(words), tokenizer, "kv_cache.max_items=160", "http.max_concurrent_requests=4")
    engine.core.scheduler._ratio.value = 0.0
    wholes = [Engine(Wordy(words), tokenizer).run(seed=seed, **params) for seed in range(6)]
    cuts = [whole.ids[:k] for whole, k in zip(wholes, (3, 30, 10, 69, 20, 70), strict=True)]
    rests = [engine.submit(ids, seed=seed, **params) for seed, ids in enumerate(cuts)]
    assert len(engine.core.scheduler.queued) == 1  # the last one is complete
    engine.finish()
    for whole, ids, rest in zip(wholes, cuts, rests, strict=True):
        assert ids + rest.ids == whole.ids
        assert rest.facts() == whole.facts()
    assert engine.core.scheduler.meters.retractions > 0


def test_usage_and_meters_count_what_they_should(tokenizer: Tokenizer, words: list[int]) -> None:
    params = {"max_new_tokens": 20, "seed": 8, "ignore_eos": True}
    engine = Engine(Wordy(words), tokenizer)
    whole = engine.run(**params)
    rest = engine.run(whole.ids[:15], **params)
    assert rest.end is not None
    assert whole.end is not None
    assert rest.end.cached_tokens == rest.end.prompt_tokens  # what is cached of the output is no part of the prompt
    assert rest.end.miss is None
    assert engine.core.scheduler.meters.generation_tokens == 20 + 5
    colder = Engine(Wordy(words), tokenizer).run(whole.ids[:15], **params)
    assert colder.end is not None
    assert colder.end.miss == whole.end.miss


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"resume_ids": [7, 8000]}, {}, "token id 8000 is not in the vocabulary"),
    ({"resume_ids": [7, -1]}, {}, "token id -1 is not in the vocabulary"),
    ({"resume_ids": [7, 8, 9]}, {"max_new_tokens": 2}, "it has 3 tokens, but at most 2"),
    ({"resume_ids": [7] * 600}, {"max_new_tokens": None}, "context 512"),
    ({"resume_ids": [7, EOS]}, {"ignore_eos": False}, f"token id {EOS} ends an answer"),
    ({"resume_ids": [7, 8]}, {"stop_token_ids": (7,)}, "token id 7 ends an answer"),
    ({"resume_ids": [7, 8]}, {"prompt_logprobs": 1}, "not allowed with log probabilities of the prompt"),
    ({"resume_ids": [7, 8], "resume_chars": 99}, {}, "weft_resume.chars: 99 is not allowed"),
    ({"resume_ids": [7, 8], "resume_chars": -1}, {}, "weft_resume.chars: -1 is not allowed"),
    ({"resume_chars": 1}, {}, "weft_resume.chars: 1 is not allowed"),
    ({"resume_ids": [7], "stream": False}, {}, "only allowed for one answer that streams"),
    ({"resume_ids": [7], "echo": True}, {}, "without echo"),
    ({"resume_ids": [7], "request_ids": [1, 2]}, {}, "only allowed for one answer"),
    ({"resume_ids": [7]}, {"embed": True}, "only allowed for one answer"),
]


@pytest.mark.parametrize(("fields", "params", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_go_on_is_refused(
    fields: dict[str, Any], params: dict[str, Any], message: str, tokenizer: Tokenizer, words: list[int]
) -> None:
    engine = Engine(Wordy(words), tokenizer)
    sampling = SamplingParams(**({"max_new_tokens": 10, "ignore_eos": True} | params))
    fields = {"request_ids": [1], "stream": True} | fields
    request = TextRequest(params=sampling, text=PROMPT, **fields)
    try:
        (submit,) = engine.worker.prepare(request)
    except InvalidRequestError as error:
        assert message in error.message
        assert engine.worker.open_requests == 0
        return
    engine.core.submit(submit)
    (output,) = engine.core.step()
    assert output.end is not None
    assert output.end.error is not None
    assert output.end.error.http_status == 400
    assert output.end.error.param == "weft_resume"
    assert message in output.end.error.message
    assert not engine.core.has_work


def test_end_tokens_before_min_tokens_are_tokens_like_others(tokenizer: Tokenizer, words: list[int]) -> None:
    rest = Engine(Wordy(words), tokenizer).run([EOS, words[0]], max_new_tokens=4, min_tokens=3)
    assert rest.end is not None
    assert rest.end.error is None


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_recorded_run_with_resumed_requests_replays(
    overlap: str, tmp_path: Path, tokenizer: Tokenizer, words: list[int]
) -> None:
    params = {"max_new_tokens": 16, "seed": 9, "ignore_eos": True, "stop": ("你好",)}
    whole = Engine(Wordy(words), tokenizer).run(**params)
    path = tmp_path / "trace"
    engine = Engine(Wordy(words), tokenizer, f"engine.record={path}", f"scheduler.overlap={overlap}")
    cuts: list[tuple[list[int] | None, int | None]] = [
        (whole.ids[:3], None),
        (None, None),
        (whole.ids, 0),
        (words[:1] * 16, 0),
        (words[:1] * 17, 0),
    ]
    first, unresumed, stopped, full, refused = engine.run_all(cuts, **params)
    engine.core.close()
    assert first.ids == whole.ids[3:]
    assert unresumed.ids == whole.ids
    assert stopped.facts() == whole.facts()
    assert full.facts()[1] == "length"
    assert refused.end is not None
    assert refused.end.state == "rejected"
    replay = Replay(path)
    replay.execute()
    records = {record.request_id: record.output_tokens for record in replay.measure.records}
    assert records == {1: records[2], 2: records[2], 3: len(whole.ids), 4: 16}
    assert replay.measure.refused == {"context_length_exceeded": 1}


def test_the_bytes_of_ids(tokenizer: Tokenizer, words: list[int]) -> None:
    engine = Engine(Wordy(words), tokenizer)
    engine.run(words[:3], max_new_tokens=5)
    assert np.frombuffer(engine.submits[0].resume_ids, np.int32).tolist() == words[:3]
    assert not engine.submits[0].complete
