"""Framing of server-sent events. Knows bytes only: not what is in them, not how they are sent."""

from __future__ import annotations

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event. `data` is JSON, so it holds no raw line break."""
    return b"data: " + data + b"\n\n"
