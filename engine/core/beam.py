"""Beam search for one request: the `best_of` likeliest beginnings go on, the best `n` ends are the answer.

Knows scores and hypotheses; who computes the beams' logits and moves their rows is the engine's business.
Every step looks at twice as many candidates as there are beams, so that as many unfinished ones remain even
when half of them end. A score is the cumulative logprob divided by length ^ length_penalty, where the length
is that of prompt and output without the end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.sampler import Sampled
from engine.core.sequence import RequestState, Sequence
from engine.core.stops import Verdict
from engine.core.types import TokenScores


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended."""

    token_ids: tuple[int, ...]
    text: str
    scores: tuple[TokenScores, ...]
    verdict: Verdict
    cumulative_logprob: float
    score: float


@dataclass(frozen=True, slots=True)
class Child:
    """A beam of the next step and the one that it goes on from."""

    parent: Sequence
    sequence: Sequence


Grow = Callable[[Sequence, int], tuple[Sequence, list[Verdict]]]
"""Makes a beam with one more token; returns it and the verdicts over its whole output."""


class BeamSearch:
    """The running beams and the finished hypotheses of one request."""

    def __init__(self, state: RequestState, grow: Grow) -> None:
        self._params = state.request.sampling
        self._width = self._params.best_of
        self._num_prompt = len(state.request.prompt)
        self._eos_id = state.stop_rules.eos_id
        self._grow = grow
        self._running: list[Sequence] = []
        self._candidates: dict[Sequence, list[Sampled]] = {}
        self._scores: dict[Sequence, tuple[TokenScores, ...]] = {}
        self.finished: list[Hypothesis] = []

    def start(self, sequence: Sequence) -> None:
        """Begin with the prompt as the only beam."""
        self._running = [sequence]
        self._scores = {sequence: ()}

    @property
    def num_candidates(self) -> int:
        """Continuations that each beam reports."""
        return 2 * self._width

    def report(self, sequence: Sequence, found: list[Sampled]) -> None:
        """Note how a beam could go on."""
        self._candidates[sequence] = found

    @property
    def is_ready(self) -> bool:
        """Whether every running beam has reported."""
        return bool(self._running) and len(self._candidates) == len(self._running)

    def expand(self) -> list[Child]:
        """The next beams, best first; empty when the search is over."""
        ranked = sorted(
            (
                (parent.cumulative_logprob + (sampled.logprob or 0.0), parent, sampled)
                for parent in self._running
                for sampled in self._candidates[parent]
            ),
            key=lambda entry: -entry[0],
        )
        children: list[Child] = []
        scores: dict[Sequence, tuple[TokenScores, ...]] = {}
        for total, parent, sampled in ranked[: self.num_candidates]:
            so_far = self._scores[parent]
            if sampled.scores is not None:
                so_far += parent.with_texts(sampled.scores)
            sequence, verdicts = self._grow(parent, sampled.token)
            sequence.cumulative_logprob = total
            if verdicts[-1].reason is not None:
                self._finish(sequence, verdicts, so_far)
            else:
                scores[sequence] = so_far
                children.append(Child(parent, sequence))
            if len(children) == self._width:
                break
        self._candidates, self._scores = {}, scores
        self._running = [child.sequence for child in children]
        if self._is_over():
            self._running = []
            return []
        return children

    def best(self) -> list[Hypothesis]:
        """The answer once the search is over: the n best, best first."""
        return self.finished[: self._params.n]

    def _finish(
        self, sequence: Sequence, verdicts: list[Verdict], scores: tuple[TokenScores, ...]
    ) -> None:
        tokens = tuple(sequence.token_ids[self._num_prompt :])
        ended = Hypothesis(
            token_ids=tokens,
            text="".join(v.text for v in verdicts),
            scores=scores,
            verdict=verdicts[-1],
            cumulative_logprob=sequence.cumulative_logprob,
            score=self._score(sequence),
        )
        self.finished.append(ended)
        # Stable, so the one that was found first wins among equals.
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self._width :]

    def _score(self, sequence: Sequence) -> float:
        length = len(sequence.token_ids) - (sequence.token_ids[-1] == self._eos_id)
        return float(sequence.cumulative_logprob / length**self._params.length_penalty)

    def _is_over(self) -> bool:
        if not self._running:
            return True
        if len(self.finished) < self._width:
            return False
        best_running = max(self._score(sequence) for sequence in self._running)
        return self._params.early_stopping or self.finished[-1].score >= best_running
