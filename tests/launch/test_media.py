"""`weft serve` with the fake engine that sees: an image goes from HTTP through all processes into the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.engine.test_media import TEMPLATE
from tests.launch.worker import END_LIMIT_S, Worker
from tests.media.builders import audio, image_url, input_audio, pcm, png, text, user, wav
from weft.backends.fake.backend import MEDIA_TOKENS

SIGHT = ("--set", "backend.fake.modalities=[image]")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with Worker(*SIGHT, "--set", f"model.chat_template={template}") as running:
        yield running


def ask(worker: Worker, *parts: Any) -> Any:
    client = OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=END_LIMIT_S)
    return client.chat.completions.create(
        model="weft-demo",
        messages=[user(*parts)],  # type: ignore[list-item]
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_answers_depend_on_the_image_and_the_cache_tells_them_apart(worker: Worker) -> None:
    question = text("What do you see? " * 4)
    first, other, again = (ask(worker, question, image_url(png(seed))) for seed in (1, 2, 1))
    words = [answer.choices[0].message.content for answer in (first, other, again)]
    assert words[0] == words[2] != words[1]
    assert 0 < cached(other) < cached(again) == first.usage.prompt_tokens - 1
    tokens = worker.http.post("/tokenize", json={"messages": [user(question, image_url())]}).raise_for_status().json()
    assert tokens["count"] == first.usage.prompt_tokens
    assert tokens["tokens"].count(0) == MEDIA_TOKENS


def test_what_it_does_not_take_is_refused(worker: Worker) -> None:
    for part in (audio([0.5]), input_audio(wav(b"\0\0")), input_audio(pcm([0.5]), "pcm_f32")):
        with pytest.raises(BadRequestError) as caught:
            ask(worker, text("a"), part)
        assert caught.value.code == "unsupported_content"
        assert "messages[0].content[1]: this model does not take sound (the fake engine" in caught.value.message
    with pytest.raises(BadRequestError) as caught:
        ask(worker, text("<|image|>"), image_url())
    assert caught.value.code == "unsupported_content"
