"""The engine's words: what a request asks for, what a step plans, what it says afterwards.

Plain data without behaviour that matters. Knows neither protobuf nor any framework.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.core.sequence import Sequence

Logits = NDArray[np.float32]


# --- what a request asks for -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; every default resolved, the seed included."""

    n: int = 1
    best_of: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken. Below 1e-5 a division by the temperature overflows."""
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a choice ends. `max_tokens` None: as many as the context holds."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    hold_back_longest_stop: bool = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the answer carries. A number of logprobs of None means none at all, 0 the token's own."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    raw_logprobs: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text must look like. `kind`: json_schema, regex, grammar, choice, json_object."""

    kind: str
    value: str = ""
    choices: tuple[str, ...] = ()
    whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A choice that was begun elsewhere: generation goes on behind its last token."""

    choice: int
    token_ids: tuple[int, ...]
    is_finished: bool = False
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request for generation. `key` is the caller's and comes back on every event."""

    key: int
    prompt: tuple[int, ...]
    request_id: str = ""
    sampling: SamplingParams = SamplingParams()
    stopping: StoppingParams = StoppingParams()
    output: OutputOptions = OutputOptions()
    constraint: Constraint | None = None
    cache_salt: str = ""
    deadline_at: float | None = None
    """On the engine's clock; the request fails once it has passed."""
    resumed: tuple[Resumed, ...] = ()


# --- what a step plans -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanItem:
    """The next `num_known` tokens of one sequence, and drafted ones behind its end."""

    sequence: Sequence
    start: int
    num_known: int
    wants_all_logits: bool
    """Whether every position is scored (prompt logprobs), not only the last one of the sequence."""
    drafts: tuple[int, ...] = ()
    """Tokens that may follow, computed along with the last known one and verified by its sampling."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch that belong to this item."""
        return self.num_known + len(self.drafts)

    @property
    def is_last(self) -> bool:
        """Whether the sequence is computed up to its end, so that it gets a next token."""
        return self.start + self.num_known == len(self.sequence.token_ids)

    @property
    def num_logits(self) -> int:
        """Rows of logits that belong to this item."""
        return self.num_known if self.wants_all_logits else int(self.is_last) + len(self.drafts)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes: decodes first, then prefill chunks."""

    items: tuple[PlanItem, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch."""
        return sum(item.num_tokens for item in self.items)


@dataclass(slots=True)
class StepStats:
    """What one step did and where its time went, in seconds."""

    step_seq: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    """Sequences that were at their end and got a next token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Tokens beyond those, that drafts were right about."""
    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    emit_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.plan_s + self.forward_s + self.sample_s + self.emit_s


# --- what it says afterwards -------------------------------------------------------------------------


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why and how a choice ended. `cause`: the stop token or string; None for EOS and for length.

    `cumulative_logprob` is None when nobody needed it (no logprobs, best_of equal to n).
    """

    reason: FinishReason
    cause: int | str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log probabilities at one position: the token itself first, then the best in rank order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a seat. `request` has its defaults resolved."""

    key: int
    num_prompt_tokens: int
    num_cached_tokens: int
    request: Request


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Scores of the prompt: one entry per token, the first None."""

    key: int
    positions: tuple[TokenScores | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice."""

    key: int
    choice: int
    token_offset: int
    token_ids: tuple[int, ...]
    text: str
    scores: tuple[TokenScores, ...] = ()
    end: ChoiceEnd | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Every choice has ended."""

    key: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    """Drafted tokens that were right; each saved a step."""
    queue_s: float
    """From submit to the first forward pass; preemptions later count as decode."""
    prefill_s: float
    """From there to the first token."""
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer. `error` is one of candor.errors, or a fault of ours."""

    key: int
    error: Exception


Event = Started | PromptScored | Delta | Finished | Failed


@dataclass(slots=True)
class Totals:
    """Counts since the engine started."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_preemptions: int = 0
    num_failed_steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    """Positions that running sequences hold; cached ones can be had back at any time."""
    kv_cached_tokens: int = 0
    kv_total_tokens: int = 0
    totals: Totals = field(default_factory=Totals)
