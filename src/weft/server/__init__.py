"""Floor 6: the worker's HTTP app, one module per API family. `create_app` is all that others need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.server.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Loads the web framework on first use: the processes that read large bodies need none."""
    if name == "create_app":
        from weft.server.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
