"""How often every child says that its loop turns."""

from __future__ import annotations

from weft.config.settings import Settings


def heartbeat_interval_s(settings: Settings) -> float:
    """Once a second; more often where less than four would fit into `engine.heartbeat_s`."""
    return min(1.0, settings.engine.heartbeat_s / 4)
