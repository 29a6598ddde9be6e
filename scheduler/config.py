"""The scheduler's settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from candor.settings import SettingError, setting
from scheduler.core import ORDERS, POLICIES
from scheduler.core.types import Limits, TenantLimits


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
    order: str = setting(
        "deficit_prefix",
        "who is next within a priority: "
        + "; ".join(f"{name}: {row.about}" for name, row in ORDERS.items()),
        choices=tuple(ORDERS),
    )
    fair_quantum: int = setting(
        4000,
        "work a tenant may be served before the others' turn (deficit_prefix): more keeps prefixes together, "
        "less is fairer",
        unit="tokens",
        minimum=1,
    )
    age_s: float = setting(
        30.0,
        "wait after which a request goes before all younger ones of its tenant and one priority up, "
        "each time",
        unit="s",
        minimum=0.001,
    )
    shed: bool = setting(
        True, "give up waiting requests whose first token cannot be in time any more"
    )
    tenants: str = setting(
        "",
        "limits per tenant: a JSON object, or @ and the name of a file with one; tenant (* for all others) "
        "to requests_per_minute, tokens_per_minute, concurrent, weight",
    )
    max_tenants: int = setting(
        10_000, "tenants remembered while they are idle", unit="tenants", minimum=1
    )
    max_cached_blocks: int = setting(
        4096,
        "blocks of 64 tokens that are remembered to be cached, per worker",
        unit="blocks",
        minimum=0,
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

    def __post_init__(self) -> None:
        """A wrong tenant limit ends the process at start, like any other wrong setting."""
        self.tenant_limits()

    def tenant_limits(self) -> Mapping[str, TenantLimits]:
        """By tenant. Raises SettingError, naming the tenant and the number that is wrong."""
        text, source = self.tenants, "tenants"
        if text.startswith("@"):
            source = f"tenants file {text[1:]}"
            try:
                text = Path(text[1:]).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingError(f"{source} cannot be read: {error}") from None
        try:
            known = json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise SettingError(f"{source}: not JSON: {error}") from None
        if not isinstance(known, dict):
            raise SettingError(f"{source}: not a JSON object")
        return {name: _tenant(f"{source}: `{name}`", entry) for name, entry in known.items()}

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
            age_s=self.age_s,
            quantum=self.fair_quantum,
            max_tenants=self.max_tenants,
            max_cached_blocks=self.max_cached_blocks,
            shed=self.shed,
        )


def _tenant(where: str, entry: object) -> TenantLimits:
    known = {f.name for f in dataclasses.fields(TenantLimits)}
    if not isinstance(entry, dict):
        raise SettingError(f"{where} is not an object with {', '.join(sorted(known))}")
    if unknown := set(entry) - known:
        raise SettingError(f"{where} has no limit {', '.join(sorted(unknown))}")
    for name, value in entry.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "concurrent" and not isinstance(value, int):
            is_number = False
        if not is_number or not 0 < value < float("inf"):
            raise SettingError(f"{where}: {name} is {value!r}, it must be a positive number")
    return TenantLimits(**entry)
