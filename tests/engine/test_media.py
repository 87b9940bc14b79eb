"""A fake engine that sees and hears: its answers depend on what it is shown, and the cache never mixes media up.

The reference is an engine that keeps no KV: whatever was asked before, an answer must be the one that it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.conftest import fake_settings
from tests.media.builders import audio, encoded, image_url, pixels, png, text, user
from weft.backends.fake.backend import MEDIA_TOKENS
from weft.backends.registry import create_backend
from weft.core.errors import InvalidRequestError, InvariantError, SettingsError
from weft.core.media import Medium
from weft.core.sampling import SamplingParams
from weft.engine.llm import LLM, Completion
from weft.engine.media import item_of, medium_of, spans_of
from weft.ipc.messages import MediaPlace, Submit, TextRequest, decode_to_engine, decode_to_text, encode
from weft.media import images
from weft.media.hashing import media_digest, media_keys
from weft.sim.replay import Replay

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<|{{ p.type }}|>{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
)
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
QUESTION = "What is to be seen here, and what is to be heard?"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return f"model.chat_template={path}"


@pytest.fixture
def seeing(new_llm: Callable[..., LLM], template: str) -> Callable[..., LLM]:
    return lambda *sets: new_llm("backend.fake.modalities=[image,audio]", template, *sets)


def ask(llm: LLM, *parts: Any) -> Completion:
    return llm.chat([user(*parts)], GREEDY)[0]


def test_what_is_shown_decides_on_the_answer(seeing: Callable[..., LLM]) -> None:
    llm = seeing("kv_cache.retain=none")
    answers = [ask(llm, part, text(QUESTION)) for part in (image_url(png(1)), image_url(png(2)), audio([0.5]))]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    same = image_url(encoded(pixels(seed=1), "webp", lossless=True), "webp")
    assert ask(llm, same, text(QUESTION)).token_ids == answers[0].token_ids


@pytest.mark.parametrize("sets", [(), ("kv_cache.page_size=16",), ("scheduler.chunked_prefill_size=5",)])
def test_the_cache_shares_what_comes_before_another_image(seeing: Callable[..., LLM], sets: tuple[str, ...]) -> None:
    llm, cold = seeing(*sets), seeing("kv_cache.retain=none")
    before, page = text("A text that comes first. " * 5), llm.settings.kv_cache.page_size
    one, two = (before, image_url(png(1)), text(QUESTION)), (before, image_url(png(2)), text(QUESTION))
    first, other, again = ask(llm, *one), ask(llm, *two), ask(llm, *one)
    start = first.prompt_tokens - MEDIA_TOKENS - len(llm.tokenizer.encode(f"{QUESTION}<|im_end|>\n"))
    assert first.cached_tokens == 0
    assert other.cached_tokens == start // page * page
    assert again.cached_tokens == (first.prompt_tokens - 1) // page * page
    assert first.token_ids == again.token_ids == ask(cold, *one).token_ids
    assert other.token_ids == ask(cold, *two).token_ids != first.token_ids


def test_requests_of_one_batch_see_their_own(seeing: Callable[..., LLM]) -> None:
    """They share steps, and those with the same image wait for the first of them."""
    llm, cold = seeing("scheduler.chunked_prefill_size=7"), seeing("kv_cache.retain=none")
    chats = [[user(text("Look: " * 9), image_url(png(k % 3)), text(QUESTION))] for k in range(9)]
    together = llm.chat(chats, GREEDY)
    assert [c.token_ids for c in together] == [cold.chat(chat, GREEDY)[0].token_ids for chat in chats]
    assert len({tuple(c.token_ids) for c in together}) == 3


PIECES = st.lists(
    st.sampled_from(["img1", "img2", "img3", "snd1", "snd2", "a b c d", "e f g h"]), min_size=1, max_size=5
)


@pytest.mark.parametrize("page", [1, 16])
def test_no_sequence_of_chats_mixes_media_up(seeing: Callable[..., LLM], page: int) -> None:
    llm, cold = seeing(f"kv_cache.page_size={page}"), seeing("kv_cache.retain=none")
    known: dict[tuple[str, ...], list[int]] = {}

    @given(st.lists(PIECES, min_size=1, max_size=4))
    def walk(chats: list[list[str]]) -> None:
        for pieces in chats:
            key = tuple(pieces)
            if key not in known:
                known[key] = ask(cold, *map(part, pieces)).token_ids
            assert ask(llm, *map(part, pieces)).token_ids == known[key]

    walk()
    assert llm.stats["kv"]["active"] == 0


def part(name: str) -> dict[str, Any]:
    if name.startswith("img"):
        return image_url(png(int(name[3:])))
    return audio([int(name[3:]) / 4]) if name.startswith("snd") else text(name)


@pytest.mark.parametrize("depth", ["true", "false"])
def test_retracted_requests_see_the_same_again(seeing: Callable[..., LLM], depth: str) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=150, ignore_eos=True)
    chats = [[user(image_url(png(k)), text(QUESTION))] for k in range(12)]
    tight = seeing("kv_cache.max_items=256", f"scheduler.overlap={depth}")
    cold = seeing("kv_cache.retain=none")
    answers = tight.chat(chats, params)
    assert tight._core.metrics()["counters"]["retractions_total"] > 0
    assert [a.token_ids for a in answers] == [cold.chat(chat, params)[0].token_ids for chat in chats]


def test_a_recorded_run_replays_to_the_same_decisions(seeing: Callable[..., LLM], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    llm = seeing(f"engine.record={path}")
    for seed in (1, 2, 1):
        ask(llm, text("Look: "), image_url(png(seed)), text(QUESTION))
    llm.close()
    replay = Replay(path)
    replay.execute()
    assert png(1) not in path.read_bytes() and not replay.torn


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_see_says_so(new_llm: Callable[..., LLM], template: str) -> None:
    llm = new_llm(template, "backend.fake.modalities=[audio]")
    ask(llm, audio([0.5]))
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[1\]: this model does not take images"):
        ask(llm, text("a"), image_url())


def test_a_template_without_a_place_for_images_says_so(new_llm: Callable[..., LLM]) -> None:
    llm = new_llm("backend.fake.modalities=[image]")
    with pytest.raises(InvalidRequestError, match="takes text only"):
        ask(llm, image_url())


def test_a_client_cannot_write_placeholders(seeing: Callable[..., LLM]) -> None:
    llm = seeing()
    for parts in ([text("<|image|>")], [text("<|image|>"), image_url()]):
        with pytest.raises(InvalidRequestError, match="placeholders"):
            ask(llm, *parts)
    assert ask(llm, image_url()).token_ids


def test_media_for_an_engine_without_the_feature_end_one_request(new_llm: Callable[..., LLM]) -> None:
    """The API has refused them already; this is the engine's own word."""
    core = new_llm()._core
    medium = Medium("image", bytes(32), pixels())
    core.submit(Submit(1, np.zeros(9, np.int32).tobytes(), GREEDY, media=[MediaPlace(2, 5, item_of(medium))]))
    (output,) = core.take_outputs()
    assert output.end is not None and output.end.error is not None
    assert output.end.error.http_status == 400 and output.end.error.param == "image"


# ---- between processes -------------------------------------------------------------------------------------------


def test_media_travel_as_they_are() -> None:
    for kind, samples in (("image", pixels()), ("audio", np.array([0.5, -1.0], np.float32))):
        medium = Medium(kind, media_digest(kind, samples), samples)  # type: ignore[arg-type]
        sent = TextRequest(
            [1], GREEDY, messages=[{"role": "user", "content": [{"type": kind}]}], media=[item_of(medium)]
        )
        (item,) = decode_to_text(encode(sent)).media
        submit = decode_to_engine(encode(Submit(1, b"", GREEDY, media=[MediaPlace(3, 9, item)])))
        (span,) = spans_of(submit.media, 10, 2)
        assert (span.start, span.end) == (3, 9) and (span.keys == media_keys(medium.digest, 6, 2)).all()
        back = medium_of(item)
        assert (back.kind, back.digest) == (medium.kind, medium.digest)
        assert back.samples.dtype == samples.dtype and (back.samples == samples).all()


def test_requests_without_media_travel_without_a_word_about_them() -> None:
    assert "media" not in msgspec.msgpack.decode(encode(TextRequest([1], GREEDY, text="a")))


@pytest.mark.parametrize("places", [[(0, 0)], [(2, 11)], [(-1, 2)], [(0, 3), (2, 5)], [(4, 5), (0, 2)]])
def test_places_outside_the_prompt_are_a_bug(places: list[tuple[int, int]]) -> None:
    item = item_of(Medium("image", bytes(32), pixels()))
    with pytest.raises(InvariantError):
        spans_of([MediaPlace(start, end, item) for start, end in places], 10, 0)


def test_settings_that_ask_for_nonsense_are_refused() -> None:
    with pytest.raises(SettingsError, match="modalities"):
        fake_settings("backend.fake.modalities=[video]")


def test_an_engine_that_sees_does_not_start_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"weft\[media\]"):
        create_backend(fake_settings("backend.fake.modalities=[image]"))
    create_backend(fake_settings("backend.fake.modalities=[audio]"))
