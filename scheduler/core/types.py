"""The words of the scheduler's core: requests, workers, limits, and the actions it asks its shell for.

Plain values. Instants (`x_at`) are seconds of one monotonic clock that the caller owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from candor.errors import CandorError

if TYPE_CHECKING:
    from scheduler.core.pool import Worker
    from scheduler.core.record import Record


class ModelKind(StrEnum):
    """What a model is for."""

    GENERATIVE = "generative"
    EMBEDDING = "embedding"


class Feature(StrEnum):
    """What a worker may be able to do beyond plain sampling."""

    CONSTRAINT = "constraint"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    RESUME = "resume"
    SEED = "seed"


class WorkerState(StrEnum):
    """What a worker is good for."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a worker describes it."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: ModelKind = ModelKind.GENERATIVE
    max_model_len: int = 0
    fingerprint: str = ""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Who a worker is. `payload` belongs to the shell."""

    worker_id: str
    instance_id: str
    model: Model
    slots: int
    features: frozenset[Feature] = frozenset()
    payload: object = None


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker says it is. None: not measured."""

    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    prefill_rate: float | None = None
    """Tokens per second."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says about itself, at least every third of its lease."""

    state: WorkerState
    last_step_seq: int
    is_idle: bool
    load: Load | None = None
    cached_prefixes: tuple[int, ...] = ()
    """Digests of whole blocks that are resident there, those of salted prompts left out."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A choice of which the client has a beginning already."""

    index: int
    token_ids: tuple[int, ...]
    is_finished: bool = False
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What admission, order and placement need to know of a request. `payload` belongs to the shell."""

    request_id: str
    model: str
    num_prompt_tokens: int
    context_tokens: int
    """Positions it needs at least: the prompt and one token, or the longest text to embed."""
    kind: ModelKind = ModelKind.GENERATIVE
    max_token_id: int = 0
    fingerprint: str | None = None
    num_sequences: int = 1
    needs: frozenset[tuple[Feature, str]] = frozenset()
    """Features it cannot do without, each with the request field that asks for it."""
    resumed: tuple[Resumed, ...] = ()
    priority: int = 0
    """Lower runs earlier."""
    tenant: str = ""
    session_id: str | None = None
    prefix_digests: tuple[int, ...] = ()
    """One per whole block of the prompt (`core.prefixes`)."""
    is_salted: bool = False
    """Whether its prefixes are shared with few; workers do not report those."""
    deadline_at: float | None = None
    first_token_by: float | None = None
    payload: object = None


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may use. None: as much as there is."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Prompt and generated tokens together."""
    concurrent: int | None = None
    """Requests in flight, waiting or running."""
    weight: float = 1.0
    """Its share where tenants compete, relative to the others'."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The core's settings; `scheduler.config` says what each is for."""

    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    max_wait_s: float = 600.0
    max_workers: int = 1024
    window_slack: int = 2
    lease_s: float = 10.0
    worker_wait_s: float = 10.0
    lost_memory_s: float = 60.0
    notify_after_s: float = 0.25
    notify_every_s: float = 1.0
    max_sessions: int = 10_000
    age_s: float = 30.0
    quantum: int = 4000
    max_tenants: int = 10_000
    max_cached_blocks: int = 4096
    shed: bool = True


@dataclass(slots=True)
class Stats:
    """Totals since the start. submitted = finished + failed + cancelled + refused + in flight."""

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0


# --- actions: what the shell must do, in this order -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to the worker under this handle, with the tokens relayed so far."""

    record: Record
    worker: Worker
    handle: int


@dataclass(frozen=True, slots=True)
class CancelOnWorker:
    """Tell the worker to stop the attempt; its seat counts as free already."""

    record: Record
    worker: Worker
    handle: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The request's one ending: this error."""

    record: Record
    error: CandorError


@dataclass(frozen=True, slots=True)
class Complete:
    """The request's one ending: everything was relayed, only the worker's closing words were lost with it."""

    record: Record


@dataclass(frozen=True, slots=True)
class NotifyQueued:
    """Tell the client where it stands."""

    record: Record
    position: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class TellDrain:
    """Tell the worker to finish what it has and leave."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class DropWorker:
    """The worker is given up: close what connects it."""

    worker: Worker
    why: str


Action: TypeAlias = (
    Dispatch | CancelOnWorker | Fail | Complete | NotifyQueued | TellDrain | DropWorker
)
