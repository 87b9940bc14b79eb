"""Logging to stderr, as text for people or as JSON for machines, one line an event."""

from __future__ import annotations

import json
import logging
import sys
import time

from weft.config.settings import LogSettings


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": record.processName,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(settings: LogSettings, role: str) -> None:
    """Configures the root logger of this process, which is `role` in every line."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(processName)s: %(message)s"))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(settings.level.upper())
    logging.getLogger("uvicorn.error").setLevel(max(logging.root.level, logging.WARNING))
    _name_process(role)


def _name_process(role: str) -> None:
    old = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = old(*args, **kwargs)
        record.processName = role
        return record

    logging.setLogRecordFactory(factory)
