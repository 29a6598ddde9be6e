"""Log lines: JSON, with the request id, and never longer than a line may be."""

from __future__ import annotations

import json
import logging
from typing import Any

from candor.telemetry import MAX_FIELD, JsonFormatter, request_id


def line(message: str, **extra: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"msg": message, "levelno": 20, "levelname": "INFO", **extra})
    return dict(json.loads(JsonFormatter("svc").format(record)))


def test_a_line_carries_service_message_extras_and_the_request_id() -> None:
    token = request_id.set("req-1")
    try:
        got = line("done", status=200, path="/x")
    finally:
        request_id.reset(token)
    assert (got["service"], got["message"], got["request_id"]) == ("svc", "done", "req-1")
    assert (got["status"], got["path"], got["level"]) == (200, "/x", "info")


def test_small_structures_stay_structures() -> None:
    assert line("m", models={"a": 1}, names=["b"])["models"] == {"a": 1}


def test_what_clients_send_is_cut_before_it_is_logged() -> None:
    token = request_id.set("r" * 10**6)
    try:
        got = line("m" * 10**6, path="\0" * 10**6, tags=["t"] * 10**6)
    finally:
        request_id.reset(token)
    assert all(len(str(value)) < MAX_FIELD + 40 for value in got.values())
    assert got["path"].endswith("(1000000 characters)")
