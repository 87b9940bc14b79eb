"""Chat templates: jinja2 in a sandbox, with Hugging Face's conventions.

A template comes with the checkpoint and runs in `ImmutableSandboxedEnvironment`: it reaches no Python internals and
changes no argument, a `range` is bounded by the sandbox, and it may write no more than `MAX_RENDERED_CHARS`. Whatever
goes wrong in it ends one request with an `InvalidRequestError`, nothing else. What is not bounded is time: nested loops
that write nothing are the checkpoint's author's to avoid. Users' text is never run as a template.

Content as a list of parts: which form a template takes is found by trying, per role, once. A one-part list is rendered
beside the plain string. Equal results mean that the template handles lists itself, and lists are passed on; else lists
are flattened to a string, unless the template shows only the list's text, in which case strings are wrapped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.core.errors import InvalidRequestError, ModelLoadError
from weft.text.chat_messages import ContentForm, normalize_messages

MAX_RENDERED_CHARS = 1 << 26
"""A rendered chat longer than this (characters; twice the default `http.max_body_bytes`) is refused."""

_PROBE = "weft probe text"


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body: variables set inside stay inside, as where the tag comes from.
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` that stores no underscore-prefixed name, which could otherwise stand in for Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # So that a template may use the name "self".
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store the underscore-prefixed name {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: no HTML escapes, non-ASCII characters as they are, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_Namespace
    )
    return environment


class ChatTemplate:
    """One template or a set of named ones; "tool_use" serves requests with tools, "default" all others.

    Immutable; rendering may happen in several threads at once.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps `bos_token`, `eos_token`, … to their texts, which templates use as variables.

        Errors: `ModelLoadError` naming the line of a broken template, or if named templates have no "default".
        """
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise ModelLoadError(
                f"chat template: none of {sorted(sources)} is named 'default'; set model.chat_template"
            )
        self.special_tokens = dict(special_tokens)
        self._templates = {name: _Template(name, text, self.special_tokens) for name, text in sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The chat as text. `kwargs` are further variables, such as `enable_thinking`.

        Errors: `InvalidRequestError`: a malformed message (names the field), or what the template itself complains of.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates[name]
        if "messages" in kwargs:
            raise InvalidRequestError("messages cannot be set as a template variable", param="chat_template_kwargs")
        variables = {"tools": tools, "documents": documents, **kwargs}
        variables |= {"add_generation_prompt": add_generation_prompt}
        return template.render(normalize_messages(messages, template.content_form), variables)


class _Template:
    """One compiled template and what is known of the content it takes."""

    def __init__(self, name: str, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # For example a constant expression that fails while it is folded.
            raise ModelLoadError(f"chat template {name!r}: {type(error).__name__}: {error}") from error
        self._special_tokens = special_tokens
        self._content_forms: dict[str, ContentForm] = {}

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        total = 0
        try:
            for piece in self._compiled.generate({**self._special_tokens, **variables, "messages": messages}):
                pieces.append(piece)
                total += len(piece)
                if total > MAX_RENDERED_CHARS:
                    raise _TemplateRefusal(f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters")
        except jinja2.TemplateError as error:
            message = error.message or type(error).__name__
            raise InvalidRequestError(f"chat template: {message}", param="messages", code="chat_template") from error
        except Exception as error:  # A template is a program: anything may come out of it.
            message = f"chat template failed on these messages: {type(error).__name__}: {error}"
            raise InvalidRequestError(message, param="messages", code="chat_template") from error
        return "".join(pieces)

    def content_form(self, role: str) -> ContentForm:
        """Found by trying, see the module's text. Only the four usual roles are remembered: roles are users' text."""
        if role not in ("system", "user", "assistant", "tool"):
            return self._try_content_forms(role)
        if role not in self._content_forms:
            self._content_forms[role] = self._try_content_forms(role)
        return self._content_forms[role]

    def _try_content_forms(self, role: str) -> ContentForm:
        as_text = self._try(role, _PROBE)
        as_parts = self._try(role, [{"type": "text", "text": _PROBE}])
        if as_parts is not None and as_parts == as_text:
            return ContentForm.BOTH
        if as_parts and _PROBE in as_parts and _PROBE not in (as_text or ""):
            # A list that was merely printed, as Python or as JSON, shows its keys.
            printed = "'text'" in as_parts or '"text"' in as_parts
            return ContentForm.TEXT if printed else ContentForm.PARTS
        return ContentForm.TEXT

    def _try(self, role: str, content: Any) -> str | None:
        hello: dict[str, Any] = {"role": "user", "content": "Hello"}
        probe: dict[str, Any] = {"role": role, "content": content}
        if role == "user":
            messages = [probe]
        elif role in ("assistant", "tool"):
            messages = [hello, probe]
        else:
            messages = [probe, hello]
        try:
            return self.render(messages, {"tools": None, "documents": None, "add_generation_prompt": False})
        except InvalidRequestError:
            return None
