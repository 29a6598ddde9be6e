"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass

from candor.settings import setting
from scheduler.core import POLICIES
from scheduler.core.types import Limits


@dataclass(frozen=True)
class Config:
    """The scheduler: admits or refuses requests, orders them, and places them on engine workers."""

    scheduler: str = setting("127.0.0.1:50051", "address of the gRPC door", unit="host:port")
    tokenizer: str = setting(
        "127.0.0.1:50052", "tokenizer service, asked for text and chat prompts", unit="host:port"
    )
    placement: str = setting(
        "expected_wait",
        "which worker gets a request: "
        + "; ".join(f"{name}: {row.about}" for name, row in POLICIES.items()),
        choices=tuple(POLICIES),
    )
    max_queued_requests: int = setting(
        1024, "requests that may wait; more are refused with 429", unit="requests", minimum=0
    )
    max_queued_tokens: int = setting(
        4_000_000,
        "prompt tokens that may wait; more are refused with 429",
        unit="tokens",
        minimum=0,
    )
    max_queue_wait_s: float = setting(
        600.0, "longest wait for a worker before a request is given up", unit="s", minimum=0.001
    )
    max_workers: int = setting(1024, "workers that may be attached", unit="workers", minimum=1)
    max_encoding: int = setting(
        256, "text and chat prompts that may be at the tokenizer", unit="requests", minimum=1
    )
    encode_timeout_s: float = setting(
        30.0, "longest wait for the tokenizer", unit="s", minimum=0.001
    )
    window_slack: int = setting(
        2, "requests a worker holds beyond its slots", unit="requests", minimum=0
    )
    lease_ms: int = setting(
        10_000, "time without progress after which a worker is given up", unit="ms", minimum=10
    )
    connect_timeout_s: float = setting(
        5.0, "longest wait for an attached worker's own address", unit="s", minimum=0.001
    )
    worker_wait_s: float = setting(
        10.0,
        "how long requests wait for a new worker when the last one is gone",
        unit="s",
        minimum=0.0,
    )
    lost_memory_s: float = setting(
        60.0, "how long a lost worker stays listed", unit="s", minimum=0.0
    )
    queued_after_ms: int = setting(
        250, "wait after which a client is told its place in the queue", unit="ms", minimum=0
    )
    queued_every_ms: int = setting(
        1000, "least time between two such messages", unit="ms", minimum=1
    )
    client_buffer: int = setting(
        16_384, "events that may wait for a client that does not read", unit="events", minimum=1
    )
    worker_buffer: int = setting(
        4096, "commands that may wait for a worker that does not read", unit="commands", minimum=1
    )
    max_sessions: int = setting(
        10_000, "sessions whose last worker is remembered", unit="sessions", minimum=1
    )
    drain_grace_s: float = setting(
        30.0, "how long running requests may go on after SIGTERM", unit="s", minimum=0.0
    )
    log_level: str = setting(
        "info", "least severity that is logged", choices=("debug", "info", "warning", "error")
    )

    def limits(self) -> Limits:
        """What the core wants to know of this."""
        return Limits(
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_wait_s=self.max_queue_wait_s,
            max_workers=self.max_workers,
            window_slack=self.window_slack,
            lease_s=self.lease_ms / 1000,
            worker_wait_s=self.worker_wait_s,
            lost_memory_s=self.lost_memory_s,
            notify_after_s=self.queued_after_ms / 1000,
            notify_every_s=self.queued_every_ms / 1000,
            max_sessions=self.max_sessions,
        )
