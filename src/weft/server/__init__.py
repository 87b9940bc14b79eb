"""Floor 6: the worker's HTTP app, one module per API family. `create_app` is all that others need."""

from __future__ import annotations

from weft.server.app import create_app

__all__ = ["create_app"]
