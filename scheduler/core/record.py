"""The scheduler's record of one request in flight: where it is, and what of it was relayed.

The relayed token ids are kept because they are all that is needed to go on elsewhere when the worker dies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from scheduler.core.ledger import Account
from scheduler.core.types import Feature, Request

if TYPE_CHECKING:
    from scheduler.core.pool import Worker


class Phase(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Choice:
    """What was relayed of one choice."""

    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    cumulative_logprob: float | None = None


@dataclass(slots=True, eq=False)
class Record:
    """One request in flight. `eq` is identity: a record is a thing, not a value."""

    request: Request
    model: str
    """Canonical name; the request may have used an alias."""
    arrival: int
    """Counts up over all requests; kept when it has to go back to the queue."""
    account: Account
    """Its tenant's, with this model."""
    needs: frozenset[Feature]
    queued_at: float
    level: tuple[int, int] = (0, 1)
    """(priority, 0 for one that a worker let go of, else 1): lower levels come first."""
    is_aged: bool = False
    """It has waited so long that nobody of its tenant may come before it any more."""
    age_at: float = math.inf
    """When it is moved up next."""
    due_at: float = math.inf
    """When its first token, or all of it, must be there."""
    is_due_ordered: bool = True
    """Whether the order of its line looks at that."""
    phase: Phase = Phase.QUEUED
    submitted_at: float = 0.0
    worker: Worker | None = None
    handle: int = 0
    """Names the present attempt; every attempt has its own, so late words of an old one are nobody's."""
    dispatched_at: float = 0.0
    waited_s: float = 0.0
    """Time spent in the queue, over all attempts."""
    was_beyond_slots: bool = False
    """Whether all slots of its worker were taken when it was placed there."""
    was_started: bool = False
    first_token_at: float | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    displacements: int = 0
    """Workers that died or let go of it."""
    lost_with: str = ""
    moved_from: str | None = None
    """Worker that began what the present attempt continues."""
    notified_position: int | None = None
    notify_at: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens taken to be in the cache of the worker it was placed on."""
    is_charged: bool = False
    pending_tokens: int = 0
    """Tokens its worker has to compute before it can show the next one; 0 once it has."""
    stranded_at: float | None = None
    """Since when nobody could take it for want of any worker."""

    @property
    def order(self) -> tuple[int, int]:
        """(priority, arrival number): first come first served."""
        return self.request.priority, self.arrival

    @property
    def key(self) -> tuple[int, float, int]:
        """Its place in its tenant's line. Changes only while it is in no line."""
        if self.is_aged:
            return 0, 0.0, self.arrival
        return 1, self.due_at if self.is_due_ordered else 0.0, self.arrival

    def is_pressing(self, now: float) -> bool:
        """Whether half of its time is gone."""
        return now - self.queued_at >= (self.due_at - self.queued_at) / 2

    @property
    def seats(self) -> int:
        """Slots it takes on a worker."""
        return max(1, self.request.num_sequences)

    @property
    def num_relayed(self) -> int:
        """Tokens the client has, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def num_generated(self) -> int:
        """Tokens generated here: relayed, without what the client brought."""
        return self.num_relayed - sum(len(r.token_ids) for r in self.request.resumed)

    @property
    def num_uncached(self) -> int:
        """Tokens to compute before it can show the next one."""
        return self.request.num_prompt_tokens - self.cached_tokens + self.num_relayed

    @property
    def all_choices_ended(self) -> bool:
        """Whether nothing but the closing words is missing."""
        ended = sum(choice.is_finished for choice in self.choices.values())
        return ended >= self.seats

    def relay(self, index: int, offset: int, token_ids: Sequence[int]) -> bool:
        """Note tokens that go to the client. False: they do not continue what it has."""
        choice = self.choices.get(index)
        if choice is None:
            if index >= self.seats:
                return False
            choice = self.choices[index] = Choice()
        known = choice.token_ids
        if (offset != len(known) and token_ids) or choice.is_finished:
            return False
        known.extend(token_ids)
        self.account.output_tokens += len(token_ids)
        return True

    def end_choice(self, index: int, cumulative_logprob: float | None) -> None:
        """Note that the choice has had its last delta."""
        choice = self.choices[index]
        choice.is_finished = True
        choice.cumulative_logprob = cumulative_logprob

    def progress(self) -> list[tuple[int, Choice]]:
        """Choices with something to continue from, in order."""
        return sorted(
            ((i, c) for i, c in self.choices.items() if c.token_ids or c.is_finished),
            key=lambda pair: pair[0],
        )
