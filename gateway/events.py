"""What answers a generation request, as plain data: the other half of `gateway.spec`.

Knows neither protobuf nor any dialect. `gateway.translate` makes these from the wire, the dialects render
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, as parallel lists.

    The sampled token comes first, then the most likely ones in rank order without the sampled one. Values
    may be -inf. `texts` are what each token adds behind the text before it.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]
    texts: Sequence[str]


class ChoiceEnd(NamedTuple):
    """Why a choice ended. `stop_reason` is the token id or the string that stopped it, or None."""

    finish_reason: str
    stop_reason: int | str | None
    cumulative_logprob: float


class Delta(NamedTuple):
    """What one step added to one choice. `logprobs` has one entry per token, or none."""

    choice: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs]
    end: ChoiceEnd | None


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; position 1 is next."""

    position: int
    eta_ms: int | None


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has taken the request."""

    worker_id: str
    num_cached_tokens: int
    queue_us: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """One entry per prompt token; the first one is None."""

    positions: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The request went on on another worker."""

    to_worker_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every choice of one prompt has ended; its last event."""

    num_cached_tokens: int


Event = Queued | Started | PromptLogprobs | Delta | Moved | Finished


class Tagged(NamedTuple):
    """An event, and which prompt of the request it belongs to."""

    prompt: int
    event: Event
