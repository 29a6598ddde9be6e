"""How a worker generates: the interface between its gRPC side and whatever computes.

Everything here is called on the event loop and returns at once; events come back through the sink, one frame
per step, on the event loop as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.types import EngineLoad, Event, Request, StepStats


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the backend is, with its measured speed in tokens per second."""

    engine: EngineLoad
    prefill_rate: float | None = None
    decode_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """What one step says to one sink. Events between steps carry the stats of the last one."""

    stats: StepStats
    load: Load
    events: Sequence[Event]


class Sink(Protocol):
    """Who submitted; hears what becomes of it."""

    def deliver(self, frame: Frame) -> None:
        """Take a frame. Called on the event loop; must not block or raise."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Whether the backend gets on, for the worker's reports."""

    step_seq: int
    """Of the last step that was finished."""
    step_unix_ms: int
    is_idle: bool
    """Whether no request is open."""
    load: Load
    digests: Sequence[int] = ()
    """Of cached prefixes, see `engine.core.kv.slots.block_digests`."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a backend can do."""

    backend: str
    runner: str
    slots: int
    kv_tokens: int
    max_model_len: int
    vocab_size: int
    is_batch_invariant: bool


class Backend(Protocol):
    """A way to generate."""

    description: Description

    def next_key(self) -> int:
        """A key for a new request."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request; the sink hears of it until its one Finished or Failed."""
        ...

    def abort(self, key: int) -> None:
        """Forget a request; its sink hears nothing more. Unknown keys are ignored."""
        ...

    def progress(self) -> Progress:
        """How it is doing now."""
        ...

    async def wait_idle(self) -> None:
        """Return once no request is open."""
        ...

    def close(self) -> bool:
        """Stop for good, whatever is running. False when a forward pass does not come back."""
        ...
