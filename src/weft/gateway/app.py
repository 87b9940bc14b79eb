"""The gateway's app, put together. Processes, signals and sockets are `launch/`'s.

What whoever runs it finds in the `Gateway`: `app`; `start` and `close` for its tasks; `drain`, after which nothing new
is taken; `gate`, whose `wait_idle()` returns once every open HTTP request has had its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config.settings import Settings
from weft.core.errors import UnavailableError
from weft.gateway.admin import Admin
from weft.gateway.asked import KINDS
from weft.gateway.health import Health
from weft.gateway.pool import Pool
from weft.gateway.proxy import Proxy
from weft.gateway.sessions import Sessions
from weft.web import console
from weft.web.edge import Edge, Gate
from weft.web.errors import install_handlers, log

PASSED_GET = ("/v1/models", "/v1/models/{name:path}")
PASSED_POST = ("/tokenize", "/detokenize", "/v1/audio/speech")


class Gateway:
    """Everything of one gateway. `admin.take_in` adds workers."""

    def __init__(self, settings: Settings) -> None:
        gateway = settings.gateway
        self.pool = Pool(
            time.monotonic,
            max_queue_size=gateway.max_queue_size,
            lease_s=gateway.worker_lease_s,
            alpha=gateway.eta_ema_alpha,
        )
        keys = settings.http.api_keys
        authorization = [(b"authorization", b"Bearer " + keys[0].encode())] if keys else []
        self.health = Health(self.pool, gateway.health_interval_s, authorization)
        self.proxy = Proxy(self.pool, self.health, settings)
        self.gate = Gate()
        self.sessions = Sessions(self.proxy, self.gate)
        self.admin = Admin(self.pool, self.health, self.proxy, self.sessions)
        self._timer: asyncio.Task[None] | None = None
        self.app: ASGIApp = self._app(settings)

    def start(self) -> None:
        """To be called inside the running event loop."""
        self._timer = asyncio.create_task(self._mind_time(), name="gateway timer")

    async def drain(self) -> None:
        """Takes nothing new from now on; returns when all that runs has ended."""
        self.proxy.draining = True
        await self.sessions.close_idle()
        await self.gate.wait_idle()

    def end_all(self) -> None:
        """Ends whoever still waits."""
        self.pool.fail_all(UnavailableError("the gateway is shutting down", code="draining"))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self.health.close()

    async def _mind_time(self) -> None:
        """Takes silent leases back, and tries workers that have rested."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.pool.failure.wait(), self.pool.next_event_s())
            self.pool.failure.clear()
            try:
                self.pool.expire()
                self.pool.settle()
            except Exception:  # a bug; time goes on all the same
                log.exception("the gateway's timer")

    def _app(self, settings: Settings) -> ASGIApp:
        admin, proxy = self.admin, self.proxy
        routes = [
            *(Route(path, _asgi(proxy.generating), methods=["POST"]) for path in KINDS),
            *(Route(path, _asgi(proxy.passing), methods=["GET"]) for path in PASSED_GET),
            *(Route(path, _asgi(proxy.passing), methods=["POST"]) for path in PASSED_POST),
            WebSocketRoute("/ws/streaming/{session_id:path}", self.sessions.endpoint),
            Route("/streaming/stop", admin.stop_streaming, methods=["POST"]),
            Route("/workers", admin.list_workers, methods=["GET"]),
            Route("/workers", admin.add_worker, methods=["POST"]),
            Route("/workers", admin.remove_worker, methods=["DELETE"]),
            Route("/workers/{name}", admin.remove_worker, methods=["DELETE"]),
            Route("/workers/{name}/{path:path}", admin.of_worker, methods=["GET"]),
            Route("/api/queue", admin.list_queue, methods=["GET"]),
            Route("/api/queue/{ticket}", admin.get_ticket, methods=["GET"]),
            Route("/api/queue/{ticket}", admin.cancel_ticket, methods=["DELETE"]),
            Route("/api/routes", admin.list_routes, methods=["GET"]),
            Route("/health", admin.health, methods=["GET"]),
            Route("/ready", admin.ready, methods=["GET"]),
            Route("/stats", admin.stats, methods=["GET"]),
            Route("/metrics", admin.metrics, methods=["GET"]),
            Route("/v1/requests", admin.requests, methods=["GET"]),
            Route("/v1/sessions", admin.sessions, methods=["GET"]),
            Route("/v1/sessions/{session_id:path}", admin.end_session, methods=["DELETE"]),
            Route("/flush_cache", admin.flush_cache, methods=["POST"]),
            Route("/abort", admin.abort, methods=["POST"]),
        ]
        app = Starlette(routes=[*routes, *console.routes()])
        app.router.redirect_slashes = False
        install_handlers(app)
        ids = itertools.count(1)
        return Edge(
            app,
            new_id=lambda: next(ids),
            gate=self.gate,
            max_body_bytes=settings.http.max_body_bytes,
            api_keys=settings.http.api_keys,
            on_refusal=lambda path, error: None,
        )


def _asgi(app: ASGIApp) -> ASGIApp:
    """Starlette takes functions for endpoints with a Request; an object is taken for an ASGI app."""

    class Endpoint:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)

    return Endpoint()
