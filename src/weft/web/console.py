"""The web console's files, as worker and gateway serve them: `routes()`.

A fixed list of files out of the package, read once. They hold no secrets and need no key (`PATHS` for whoever checks
keys): a browser cannot send one when it is given an address. The page asks for the key and sends it itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "api.js": _SCRIPT,
    "app.js": _SCRIPT,
    "audio.js": _SCRIPT,
    "chat.js": _SCRIPT,
    "dom.js": _SCRIPT,
    "draw.js": _SCRIPT,
    "live.js": _SCRIPT,
    "session.js": _SCRIPT,
    "tree.js": _SCRIPT,
}
INDEX = "index.html"
_PAGES = {"/console": INDEX, "/console/": INDEX} | {f"/console/{name}": name for name in FILES if name != INDEX}
PATHS = frozenset(_PAGES)

# Nothing from elsewhere, no inline code, no frame around it. ws: and wss: are there for browsers whose 'self' has no
# WebSockets.
_POLICY = (
    "default-src 'self'; connect-src 'self' ws: wss:; script-src 'self'; style-src 'self'; img-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """GET /console and its files, to be added to an app's routes."""
    return [Route(path, _endpoint(name), methods=["GET"], include_in_schema=False) for path, name in _PAGES.items()]


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = files("weft").joinpath("assets", "console", name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    headers = _HEADERS | {"ETag": tag}

    async def answer(request: Request) -> Response:
        known = (one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(","))
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=FILES[name], headers=headers)

    return answer
