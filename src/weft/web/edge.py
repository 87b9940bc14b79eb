"""What is settled before an endpoint runs: a request's id, key and body size. And the last resort for bugs.

`Edge` is pure ASGI. Invariants: every HTTP answer carries `X-Request-Id`; a body over the limit is refused by its
Content-Length before a byte of it is read, or as soon as the bytes that came pass the limit; an exception that nobody
foresaw ends its own request with 500 and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.core.errors import AuthenticationError, BodyTooLargeError, ForeignOriginError, WeftError
from weft.web import console
from weft.web.errors import error_response, internal_error, log
from weft.web.gone import ClientGone

OPEN_PATHS = frozenset({"/health", "/ready"}) | console.PATHS
"""Probes carry no keys, nor does a browser that is only told an address."""

LINGER_S = 2.0
"""How long the rest of a refused body is read and dropped, so that the client gets to see the answer."""

KEY_PROTOCOL = b"weft-api-key."
"""What browsers, which send no headers with a WebSocket, put before their key as a subprotocol."""

_CHALLENGE = {"WWW-Authenticate": "Bearer"}

REQUEST_ID = "weft.request_id"
"""Key of the request's integer id in the ASGI scope."""

SHOWN_ID = "weft.shown_id"
"""Key of the id that a gateway has given the request; clients see this one, where there is one."""


def _is_own_page(origin: bytes | None, host: bytes) -> bool:
    """Whether a WebSocket comes from a page of this server, or from no page at all."""
    return origin is None or origin.partition(b"://")[2].lower() == host.lower()


class Gate:
    """Counts the HTTP requests that are being answered; a drain waits here until there are none."""

    def __init__(self) -> None:
        self.open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.open += 1
        self._idle.clear()

    def __exit__(self, *exc_info: object) -> None:
        self.open -= 1
        if self.open == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no request is open; at once when there is none."""
        await self._idle.wait()


class Edge:
    """The outermost middleware.

    `new_id` gives the request's id; no key in `api_keys` means open to everybody; `on_refusal` is told the path and the
    error of what was refused by its headers alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], int],
        gate: Gate,
        max_body_bytes: int,
        api_keys: Sequence[str],
        on_refusal: Callable[[str, WeftError], None],
    ) -> None:
        self.app = app
        self.new_id = new_id
        self.gate = gate
        self.max_body_bytes = max_body_bytes
        self.on_refusal = on_refusal
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._upgrade(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with self.gate:
            await _Exchange(self, scope, receive, send).run()

    def check(self, scope: Scope) -> None:
        """Refuses by headers alone: raises AuthenticationError or BodyTooLargeError."""
        given = length = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"content-length":
                length = int(value)
        if self._keys and scope["path"] not in OPEN_PATHS and not self._knows(given):
            raise AuthenticationError("a valid API key is needed: send 'Authorization: Bearer KEY'")
        if length is not None and length > self.max_body_bytes:
            raise self.too_large(f"{length} bytes")

    async def _upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a WebSocket through whose key is right: an HTTP header or, from a browser, a subprotocol.

        A browser lets any page open one to any server, unlike other requests; it says which page, in `Origin`. Only a
        page of this server's own may.
        """
        headers = dict(scope["headers"])
        asked = [name.encode(errors="replace") for name in scope.get("subprotocols") or ()]
        keys = [name.removeprefix(KEY_PROTOCOL) for name in asked if name.startswith(KEY_PROTOCOL)]
        error: WeftError
        if not _is_own_page(headers.get(b"origin"), headers.get(b"host", b"")):
            error = ForeignOriginError(f"Origin: {headers[b'origin']!r:.200} is not a page of this server")
        elif not self._keys or self._knows(headers.get(b"authorization")) or any([self._is_key(key) for key in keys]):
            await self.app(scope, receive, send)
            return
        else:
            error = AuthenticationError(
                "a valid API key is needed: send 'Authorization: Bearer KEY', or the subprotocols"
                " 'weft, weft-api-key.KEY'"
            )
        self.on_refusal(scope["path"], error)
        await receive()  # websocket.connect
        if "websocket.http.response" in (scope.get("extensions") or {}):
            challenge = _CHALLENGE if isinstance(error, AuthenticationError) else None
            await error_response(error, headers=challenge)(scope, receive, send)
        else:  # the server makes it a 403
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    def too_large(self, size: str) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body of {size} is over the limit of {self.max_body_bytes} bytes")

    def _knows(self, given: bytes | None) -> bool:
        kind, _, key = (given or b"").partition(b" ")
        return self._is_key(key.strip()) and kind.lower() == b"bearer"

    def _is_key(self, key: bytes) -> bool:
        return any([hmac.compare_digest(key, known) for known in self._keys])  # all of them: no timing hints


class _Exchange:
    """One request and its answer on their way through the `Edge`."""

    def __init__(self, edge: Edge, scope: Scope, receive: Receive, send: Send) -> None:
        self._edge = edge
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_bytes = 0
        self._refused = False  # the body is over the limit
        self._started = False
        self._id = edge.new_id()
        scope[REQUEST_ID] = self._id

    async def run(self) -> None:
        try:
            try:
                self._edge.check(self._scope)
            except WeftError as error:
                self._refused = isinstance(error, BodyTooLargeError)
                self._edge.on_refusal(self._scope["path"], error)
                raise
            await self._edge.app(self._scope, self.receive, self.send)
        except WeftError as error:
            headers = _CHALLENGE if isinstance(error, AuthenticationError) else None
            await error_response(error, headers=headers)(self._scope, self._receive, self.send)
        except (ClientDisconnect, ClientGone):
            log.debug("request %d: the client is gone", self._id)
        except Exception as error:
            log.exception("request %d: %s %s", self._id, self._scope["method"], self._scope["path"])
            if self._started:
                raise  # the connection must be cut: what was sent is not a whole answer
            await error_response(internal_error(error))(self._scope, self._receive, self.send)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body_bytes += len(message.get("body", b""))
            if self._body_bytes > self._edge.max_body_bytes:
                self._refused = True
                raise self._edge.too_large(f"more than {self._edge.max_body_bytes} bytes")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            shown = self._scope.get(SHOWN_ID, self._id)
            headers = [*message.get("headers", ()), (b"x-request-id", b"%d" % shown)]
            if SHOWN_ID in self._scope:
                headers.append((b"x-weft-worker-request-id", b"%d" % self._id))
            if self._refused:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif self._refused and message["type"] == "http.response.body" and not message.get("more_body"):
            # Closing while the client is still sending would reset the connection, and the answer with it.
            await self._send({**message, "more_body": True})
            await self._drop_rest()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _drop_rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return
