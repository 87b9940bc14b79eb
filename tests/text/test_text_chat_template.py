from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_styles import CHATML, CHATS, LLAMA3, MISTRAL, PARTS, PARTS_ONLY, STYLES, TOOLS

from weft.core.errors import InvalidRequestError, ModelLoadError
from weft.text import ChatTemplate, Tokenizer, chat_template

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def oracle(folders: dict[str, Path]) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folders["byte_level"])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_and_tokenizes_as_transformers_does(
    style: str, chat: list[dict[str, Any]], prompt: bool, oracle: Any, folders: dict[str, Path]
) -> None:
    source = STYLES[style]
    ours = Tokenizer.load(folders["byte_level"], chat_template=source)
    assert ours.chat is not None
    expected = oracle.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=prompt)
    assert ours.chat.render(chat, add_generation_prompt=prompt) == expected
    ids = oracle.apply_chat_template(chat, chat_template=source, add_generation_prompt=prompt, return_dict=False)
    assert ours.encode_chat(chat, add_generation_prompt=prompt) == ids


def test_tools_and_variables_reach_the_template_as_in_transformers(oracle: Any, folders: dict[str, Path]) -> None:
    ours = Tokenizer.load(folders["byte_level"], chat_template=CHATML)
    expected = oracle.apply_chat_template(
        CHATS[1],
        chat_template=CHATML,
        tools=TOOLS,
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    assert ours.encode_chat(CHATS[1], template_kwargs={"tools": TOOLS, "enable_thinking": False}) == expected
    assert "天气 <now>" in ours.decode(expected)


def test_a_template_with_bos_gets_no_second_one(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"], chat_template=LLAMA3)
    ids = tokenizer.encode_chat(user("hi"))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_the_templates_own_complaint_is_the_users_error() -> None:
    template = ChatTemplate(MISTRAL, SPECIAL)
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render([{"role": "assistant", "content": "hi"}])
    assert (caught.value.param, caught.value.http_status) == ("messages", 400)
    assert template.render(user("still alive")).startswith("<|bos|>[INST] still alive")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[5].content.x.y }}",
        "{% set n = namespace(__init__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 1 // 0 }}",
        "{% include 'other' %}",
    ],
)
def test_a_failing_template_ends_one_request(source: str) -> None:
    try:
        template = ChatTemplate(source, {})
    except ModelLoadError:
        return  # Found already at load, which is better still.
    with pytest.raises(InvalidRequestError, match="chat template"):
        template.render(user("hi"))


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    template = ChatTemplate("{% for i in range(200) %}{{ messages[0].content }}{% endfor %}", {})
    assert len(template.render(user("x"))) == 200
    with pytest.raises(InvalidRequestError, match="longer than 1000 characters"):
        template.render(user("x" * 6))


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(ModelLoadError, match="'default', line 3"):
        ChatTemplate("a\nb\n{% for %}", {})
    with pytest.raises(ModelLoadError, match="line 2.*nofilter"):
        ChatTemplate("a\n{{ x | nofilter }}", {})


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with {{ tools | length }} tools"}, {})
    assert template.render(user("x")) == "plain"
    assert template.render(user("x"), tools=[]) == "plain"
    assert template.render(user("x"), tools=TOOLS) == "with 1 tools"
    with pytest.raises(ModelLoadError, match="default"):
        ChatTemplate({"tool_use": "x"}, {})


def test_missing_tools_are_none_and_defined() -> None:
    source = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ other is defined }}"
    assert ChatTemplate(source, {}).render(user("x")) == "True True True False"


def test_content_parts_are_joined_for_templates_that_want_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate(CHATML, SPECIAL)
    assert "user\none\ntwo<|im_end|>" in template.render(user(parts))
    assert "\n<|im_end|>" in template.render(user([]))


def test_content_parts_are_passed_to_templates_that_handle_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate(PARTS, SPECIAL).render(user(parts)) == "user: onetwo;"
    assert ChatTemplate(PARTS, SPECIAL).render(user("plain")) == "user: plain;"
    assert ChatTemplate(PARTS_ONLY, SPECIAL).render(user("plain")) == "plain|"
    printed = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", SPECIAL)
    assert printed.render(user(parts)) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        (user(7), "messages[0].content"),
        (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[0].content[1].type"),
        (user(["a"]), "messages[0].content[0].type"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        ([*user("a"), {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_name_the_field(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHATML, SPECIAL).render(messages)
    assert caught.value.param == param


def test_tool_call_arguments_become_objects_and_the_callers_messages_stay() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "北京"}'}}
    messages = [*user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert 'weather {"city": "北京"}</tool_call>' in ChatTemplate(CHATML, SPECIAL).render(messages)
    assert call["function"] == {"name": "weather", "arguments": '{"city": "北京"}'}


def test_template_variables_cannot_replace_the_messages(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"], chat_template=CHATML)
    for name in ("messages", "add_generation_prompt"):
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer.encode_chat(user("hi"), template_kwargs={name: []})
        assert caught.value.param == "chat_template_kwargs"
    tokenizer.encode_chat(user("hi"), template_kwargs={"self": 1, "raise_exception": 1})


def test_without_a_template_chat_is_refused(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["llama"])
    assert tokenizer.chat is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat(user("hi"))
