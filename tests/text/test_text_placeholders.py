"""Placeholders: templates write them, prompts have as many tokens as the engine makes of a medium."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InvalidRequestError
from weft.text.chat_template import ChatTemplate
from weft.text.placeholders import Placeholder, expanded

PARTS = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<|{{ p.type }}|>{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
TEXT, IMAGE, AUDIO = {"type": "text", "text": "a"}, {"type": "image"}, {"type": "audio"}

PLACEHOLDERS = {
    "image": Placeholder("<|image|>", 900, lambda shape: shape[0]),
    "audio": Placeholder("<|audio|>", 901, lambda shape: 2),
}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def run(text: str, *media: tuple[str, list[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    return expanded(text, media, PLACEHOLDERS, encode)  # type: ignore[arg-type]


def test_templates_that_take_lists_get_the_placeholders() -> None:
    template = ChatTemplate(PARTS, {})
    assert template.render(user(TEXT, IMAGE, TEXT, AUDIO)) == "user: a<|image|>a<|audio|>;"


def test_templates_that_take_strings_only_refuse_them() -> None:
    template = ChatTemplate(STRINGS, {})
    assert template.render(user(TEXT, TEXT)) == "user: a\na;"
    with pytest.raises(InvalidRequestError, match="takes text only") as caught:
        template.render(user(TEXT, AUDIO))
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1]", "unsupported_content")


@pytest.mark.parametrize("part", [{"type": "image", "data": "x"}, {"type": "image_url", "image_url": {"url": "x"}}])
def test_nothing_but_placeholders_comes_through(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(PARTS, {}).render(user(TEXT, part))
    assert caught.value.param == "messages[0].content[1].type"


def test_each_medium_gets_its_tokens() -> None:
    ids, spans = run("ab<|image|>c<|audio|><|image|>", ("image", [3, 5, 3]), ("audio", [7]), ("image", [1, 1, 3]))
    assert ids == [97, 98, 900, 900, 900, 99, 901, 901, 900]
    assert spans == [(2, 5), (6, 8), (8, 9)]


def test_a_chat_without_media_is_only_text() -> None:
    assert run("ab") == ([97, 98], [])
    assert expanded("ab<|image|>", [], {}, encode)[0] == encode("ab<|image|>")


@pytest.mark.parametrize(
    ("text", "media"),
    [
        ("a", [("image", [1])]),
        ("<|image|>", []),
        ("<|image|><|image|>", [("image", [1])]),
        ("<|image|>", [("audio", [1])]),
        ("<|audio|><|image|>", [("image", [1]), ("audio", [1])]),
    ],
)
def test_clients_cannot_write_placeholders_themselves(text: str, media: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        run(text, *media)
    assert (caught.value.param, caught.value.code) == ("messages", "unsupported_content")


@given(st.lists(st.text("ab<|>image", max_size=8) | st.integers(1, 5), max_size=8))
def test_spans_cover_the_placeholders_and_nothing_else(pieces: list[str | int]) -> None:
    text = "".join("<|image|>" if isinstance(piece, int) else piece for piece in pieces)
    sizes = [piece for piece in pieces if isinstance(piece, int)]
    if text.count("<|image|>") != len(sizes):
        return
    ids, spans = run(text, *(("image", [size]) for size in sizes))
    covered = [i for start, end in spans for i in range(start, end)]
    assert covered == [i for i, token in enumerate(ids) if token == 900]
    assert [end - start for start, end in spans] == sizes
    assert [i for i in ids if i != 900] == encode(text.replace("<|image|>", ""))
