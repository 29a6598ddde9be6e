"""Logs as JSON lines that carry the request id, and metrics for processes that have no HTTP door.

Prompts and answers are never logged here.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Any

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("candor_request_id", default="")
"""The request being worked on in this task; every log record carries it."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


MAX_FIELD, MAX_TRACE = 1_000, 20_000
"""Characters of one field of a log line, and of a traceback."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message, request_id, then the record's extras."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        if rid := request_id.get():
            line["request_id"] = _cut(rid)
        line |= {k: _cut(v) for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info), MAX_TRACE)
        return json.dumps(line, default=str, ensure_ascii=False)


def _cut(value: Any, limit: int = MAX_FIELD) -> Any:
    """A value as a field may hold it: what clients send ends up here, so no text is too long to log."""
    if isinstance(value, int | float | bool) or value is None:
        return value
    text = value if isinstance(value, str) else str(value)
    if len(text) <= limit:
        # Small structures stay structures, for whoever reads the lines by program.
        return value if isinstance(value, dict | list | tuple) else text
    return f"{text[:limit]}… ({len(text)} characters)"


def setup_logging(service: str, level: str = "info") -> None:
    """Send every record of this process to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
