"""What every answer of this dialect carries around its content: identity and usage."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.sse import DONE, event


def new_id(prefix: str) -> str:
    """An identifier: the prefix and 32 hexadecimal digits."""
    return prefix + uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Heading:
    """The same in every chunk of an answer. `model` is the served name, whatever alias was asked for."""

    id: str
    created: int
    model: str

    def as_json(self, kind: str) -> dict[str, Any]:
        """The first four keys of a body."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def opened(self, kind: str) -> bytes:
        """The first four keys as bytes, the brace left open."""
        return orjson.dumps(self.as_json(kind))[:-1]


@dataclass(frozen=True, slots=True)
class UsageRule:
    """Where usage shows up in a stream."""

    has_final: bool = False
    """An extra chunk with the sums over all choices ends the stream."""
    is_running: bool = False
    """Every chunk carries the numbers of its choice so far."""
    shows_null: bool = False
    """Chunks without numbers say so with a null; otherwise the key is left out."""

    @classmethod
    def of(cls, stream_options: Any, *, always_shown: bool) -> UsageRule:
        """The rule that a request's stream_options ask for.

        Both options default to true, so an empty object means numbers in every chunk.
        """
        if stream_options is None or not stream_options.include_usage:
            return cls(shows_null=always_shown)
        is_running = bool(stream_options.continuous_usage_stats)
        return cls(has_final=True, is_running=is_running, shows_null=True)

    def closing(self, heading: bytes, total: dict[str, int]) -> bytes:
        """The end of a stream: the chunk with the sums, where it was asked for, and [DONE].

        `heading`: the first four keys, the brace left open.
        """
        if not self.has_final:
            return DONE
        return event(heading + b',"choices":[],"usage":' + orjson.dumps(total) + b"}") + DONE


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
