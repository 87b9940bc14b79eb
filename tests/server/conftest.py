"""An app over a scripted client, and an HTTP client that talks to it without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fakes import EMBEDDER, FACTS, FakeEngineClient, settings
from weft.server import create_app


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def app(engine: FakeEngineClient) -> FastAPI:
    return create_app(engine, FACTS, settings())  # type: ignore[arg-type]


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as client:
        yield client


@pytest.fixture
async def embedder(engine: FakeEngineClient) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of an app whose model makes embeddings of 4 dimensions."""
    app = create_app(engine, EMBEDDER, settings())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as client:
        yield client
