"""One growing row of token ids, and the request it belongs to: the engine's working state.

Knows what was generated and what follows from it (text, stops, penalties, constraint); not how tokens are
computed or in which order sequences run.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.sampler import Penalties, Row, Rules, Sampled
from engine.core.speculation import Acceptance, Drafter, Lookup
from engine.core.stops import Stopper, StopRules, Verdict
from engine.core.types import ChoiceEnd, Delta, FinishReason, Request, TokenScores

if TYPE_CHECKING:
    from engine.core.beam import BeamSearch
    from engine.core.prompt_scores import PromptScores


class Matcher(Protocol):
    """A constraint at work on one sequence (`engine.core.guided`)."""

    def mask(self) -> NDArray[np.bool_]:
        """The tokens that may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Take a token; whether it was an end, behind which nothing is allowed.

        Raises InvalidArgument when the constraint cannot go on.
        """
        ...

    def fork(self) -> Matcher:
        """An independent copy in the same state."""
        ...


@dataclass(slots=True, eq=False)
class RequestState:
    """A request at work: its choices, its counts, its ledger."""

    request: Request
    rules: Rules
    stop_rules: StopRules
    sequences: list[Sequence] = field(default_factory=list)
    submitted_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    is_ended: bool = False
    num_cached: int = 0
    num_generated: int = 0
    num_open: int = 0
    """Choices that have not ended."""
    matcher: Matcher | None = None
    """The constraint at its beginning; every choice works on a copy of its own."""
    beam: BeamSearch | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    prompt_scores: PromptScores | None = None
    """Collected while the prompt is computed, when prompt logprobs are wanted; None once they are out."""

    @property
    def key(self) -> int:
        """The caller's name for it."""
        return self.request.key


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. `token_ids` is prompt and output; the first `num_computed` have KV in `row`."""

    state: RequestState
    choice: int
    token_ids: list[int]
    stopper: Stopper
    penalties: Penalties | None = None
    matcher: Matcher | None = None
    cumulative_logprob: float = 0.0
    num_computed: int = 0
    row: int | None = None
    scores_prompt: bool = False
    """Whether every position of the prompt must be computed here, as its scores are wanted."""
    drafter: Drafter = field(init=False)

    def __post_init__(self) -> None:
        self.drafter = Drafter(Lookup(), self.state.acceptance)

    @property
    def num_prompt(self) -> int:
        """Tokens it started from."""
        return len(self.state.request.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens of the choice so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def draft_room(self) -> int:
        """Tokens that may be drafted: so many can follow the next one."""
        # Beams part after every token, and while the prompt is scored every row of logits has its meaning.
        if self.state.beam is not None or self.scores_prompt:
            return 0
        return self.state.stop_rules.max_tokens - self.num_generated - 1

    def sampling_row(self) -> Row:
        """What the sampler must know to choose the next token."""
        mask = self.matcher.mask() if self.matcher else None
        return Row(self.state.rules, self.choice, self.num_generated, self.penalties, mask)

    def with_texts(self, scores: TokenScores | None) -> tuple[TokenScores, ...]:
        """Scores of the next token with the text that each candidate would add; call before `take`."""
        if scores is None:
            return ()
        peek = self.stopper.stream.peek_text
        return (replace(scores, texts=tuple(peek(t) for t in scores.token_ids)),)

    def take(self, sampled: Sampled) -> Delta:
        """Append a token, with everything that follows from it."""
        offset = self.num_generated
        scores = self.with_texts(sampled.scores)
        verdict = self._append(sampled.token)
        if sampled.logprob is not None:
            self.cumulative_logprob += sampled.logprob
        return Delta(
            key=self.state.key,
            choice=self.choice,
            token_offset=offset,
            token_ids=(sampled.token,),
            text=verdict.text,
            scores=scores,
            end=self.end_of(verdict),
        )

    def replay(self, token_ids: Seq[int]) -> list[Verdict]:
        """Take tokens that were chosen before, up to the end if they contain one; returns their verdicts."""
        verdicts: list[Verdict] = []
        for token in token_ids:
            verdicts.append(self._append(token))
            if verdicts[-1].reason is not None:
                break
        return verdicts

    def _append(self, token: int) -> Verdict:
        self.token_ids.append(token)
        if self.penalties is not None:
            self.penalties.add(token)
        verdict = self.stopper.push(token)
        is_open = verdict.reason is None
        if self.matcher is not None and is_open and self.matcher.accept(token):
            # End of sequence as an ordinary token (ignore_eos): the constraint ends the choice instead.
            return Verdict(verdict.text + self.stopper.end().text, FinishReason.STOP)
        return verdict

    def end_of(self, verdict: Verdict) -> ChoiceEnd | None:
        """The end that a verdict stands for, if it is one."""
        if verdict.reason is None:
            return None
        score = self.cumulative_logprob if self.state.rules.needs_logprob else None
        return ChoiceEnd(verdict.reason, verdict.cause, score)
