"""`weft chat`: a conversation in the terminal, with a model loaded here or with a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from weft.config.settings import Settings
from weft.core.errors import EngineError, WeftError
from weft.core.sampling import SamplingParams

Messages = list[dict[str, str]]


class Talker(Protocol):
    """Whoever answers."""

    def answer(self, messages: Messages) -> Iterator[str]: ...


class LocalTalker:
    """A model in this process, with one of its adapters."""

    def __init__(self, settings: Settings, params: SamplingParams, adapter: str | None = None) -> None:
        from weft.engine.llm import LLM

        self._llm = LLM(settings=settings)
        self._params = params
        self._adapter = adapter

    def answer(self, messages: Messages) -> Iterator[str]:
        return self._llm.stream(messages, self._params, adapter=self._adapter)


class ServerTalker:
    """A server that speaks OpenAI's API, at `http://host:port` with or without `/v1`; `model` or its first one."""

    def __init__(self, url: str, params: SamplingParams, api_key: str | None, model: str | None = None) -> None:
        import httpx

        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10.0, read=None))
        self._params = params
        try:
            self._model = model or self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise EngineError(f"{url}: no model can be reached there: {error}") from error

    def answer(self, messages: Messages) -> Iterator[str]:
        body: dict[str, Any] = {"model": self._model, "messages": messages, "stream": True}
        body |= {"temperature": self._params.temperature, "max_tokens": self._params.max_new_tokens}
        if self._params.seed is not None:
            body["seed"] = self._params.seed
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise EngineError(_message(response.read()))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise EngineError(chunk["error"]["message"])
                if chunk["choices"]:
                    yield chunk["choices"][0]["delta"].get("content") or ""


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")


def run_chat(talker: Talker, system: str | None) -> None:
    """Reads turns from stdin until its end; Ctrl-C stops the answer that is running."""
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print("/new starts again, Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == "/new":
            messages = list(start)
        elif line:
            _turn(talker, messages, line)


def _turn(talker: Talker, messages: Messages, line: str) -> None:
    """One question and its answer; the history keeps what was shown, also of an answer that was stopped."""
    messages.append({"role": "user", "content": line})
    pieces: list[str] = []
    stream = talker.answer(messages)
    try:
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr)
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        if not pieces:
            messages.pop()
            return
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    print()
    messages.append({"role": "assistant", "content": "".join(pieces)})
