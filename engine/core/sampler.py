"""From logits to the next token: bias, masks, penalties, temperature, truncation, one draw.

Knows numbers only: no text, no stops, no sequences. The order of the steps is part of the contract:

    bias → allowed ids → constraint mask → min_tokens mask → repetition, frequency, presence penalty
    → temperature → top-k → top-p → min-p → softmax → draw

Rows that need none of it (plain greedy) are one argmax. The others are worked on one at a time: a row of a
49k vocabulary stays in the core's cache, a batch of them does not, and a row's arithmetic is
then the same to the bit whoever else is in the batch. The draw is `uniform(seed, choice, position)` put
through the inverse of the cumulative distribution, so a token depends on these three and on the logits.
(Runners whose logits move in the last bits with the batch can still move a draw that falls on a boundary.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from candor import errors
from engine.core.distribution import Distribution, Ids, broken, nothing_allowed
from engine.core.philox import uniform
from engine.core.row_kernels import copied
from engine.core.types import Logits, SamplingParams, TokenScores

_EPS = 1e-5
"""Penalties and penalty-like numbers nearer to neutral than this are off."""
_LEAST_REPETITION = 1e-30
"""Legal are all above 0, but a smaller divisor would leave what float32 holds, also behind the temperature."""


class Penalties:
    """Which tokens a sequence has seen: in the prompt (repetition) and in its output (all three)."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        seen = list(dict.fromkeys(prompt)) if self._repeats else []
        self._place = {token: i for i, token in enumerate(seen)}
        self._size = len(seen)
        self._ids = np.array([*seen, *[0] * 32], dtype=np.intp)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    @staticmethod
    def are_wanted(params: SamplingParams) -> bool:
        """Whether any of the three is on."""
        return (
            abs(params.repetition_penalty - 1) >= _EPS
            or abs(params.frequency_penalty) >= _EPS
            or abs(params.presence_penalty) >= _EPS
        )

    @property
    def _repeats(self) -> bool:
        return abs(self._repetition - 1) >= _EPS

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            self._size += 1
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
        self._counts[place] += 1

    def apply(self, z: Logits) -> None:
        """Change the logits of seen tokens in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = z[ids]
        if self._repeats:
            r = np.float32(max(self._repetition, _LEAST_REPETITION))
            values = np.where(values > 0, values / r, values * r)
        if abs(self._frequency) >= _EPS:
            values -= np.float32(self._frequency) * counts
        if abs(self._presence) >= _EPS:
            values -= np.float32(self._presence) * (counts > 0)
        z[ids] = values


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request's parameters mean for a row of logits, prepared once."""

    params: SamplingParams
    bias_ids: Ids
    bias_values: Logits
    allowed_ids: Ids | None
    stop_ids: Ids
    """Masked while fewer than min_tokens tokens exist."""
    min_tokens: int
    num_logprobs: int | None
    """Alternatives to report; None: none, and no probabilities are computed for the report."""
    raw_logprobs: bool
    needs_logprob: bool
    """Whether the token's own logprob is wanted (reported, or summed to rank choices)."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        num_logprobs: int | None = None,
        raw_logprobs: bool = False,
    ) -> Rules:
        """Prepare. `stop_ids`: every id that can stop the choice."""
        bias: dict[int, float] = {}
        for token, value in params.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        allowed = params.allowed_token_ids
        return cls(
            params=params,
            bias_ids=np.array(list(bias), dtype=np.intp),
            bias_values=np.array(list(bias.values()), dtype=np.float32),
            allowed_ids=np.array(sorted(set(allowed)), np.intp) if allowed is not None else None,
            stop_ids=np.array(sorted(set(stop_ids)), dtype=np.intp),
            min_tokens=min_tokens,
            num_logprobs=num_logprobs,
            raw_logprobs=raw_logprobs,
            needs_logprob=num_logprobs is not None or params.best_of > params.n,
        )


@dataclass(slots=True)
class Row:
    """One row of logits that becomes a token: `position` tokens of `choice` exist already."""

    rules: Rules
    choice: int
    position: int
    penalties: Penalties | None = None
    mask: NDArray[np.bool_] | None = None
    """Tokens that the constraint allows now."""

    @property
    def is_plain(self) -> bool:
        """Whether the argmax of the logits is the answer."""
        return self.rules.params.is_greedy and not self.rules.needs_logprob and self.is_bare

    @property
    def is_bare(self) -> bool:
        """Whether no bias, mask or penalty applies."""
        rules = self.rules
        return (
            not len(rules.bias_ids)
            and rules.allowed_ids is None
            and self.mask is None
            and self.penalties is None
            and self.position >= rules.min_tokens
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token; its logprob where somebody needs it; its scores where they are reported."""

    token: int
    logprob: float | None = None
    scores: TokenScores | None = None


def sample(logits: Iterable[Logits], rows: Sequence[Row]) -> list[Sampled | Exception]:
    """The next token of each row, or why there is none (then only that sequence fails)."""
    results: list[Sampled | Exception] = []
    for raw, row in zip(logits, rows, strict=True):
        try:
            results.append(_plain(raw) if row.is_plain else _sample_row(raw, row))
        except errors.CandorError as error:
            results.append(error)
    return results


def _plain(raw: Logits) -> Sampled:
    token = int(raw.argmax())
    # argmax finds a NaN first, so a broken row cannot pass for an answer.
    if not raw[token] < np.inf:
        raise broken()
    if raw[token] == -np.inf:
        raise nothing_allowed()
    return Sampled(token)


def _sample_row(raw: Logits, row: Row) -> Sampled:
    rules, params = row.rules, row.rules.params
    z = shaped(raw, row)
    if params.is_greedy and not rules.needs_logprob:
        return _plain(z)
    shape = Distribution(z, params)
    token = shape.best if params.is_greedy else shape.draw(_uniform(row))
    if not rules.needs_logprob:
        return Sampled(token)
    reported = Distribution(raw, _NEUTRAL) if rules.raw_logprobs else shape
    if rules.num_logprobs is None:
        return Sampled(token, reported.logprob(token))
    scores = reported.scores(token, rules.num_logprobs)
    return Sampled(token, scores.logprobs[0], scores)


def candidates(raw: Logits, row: Row, count: int) -> list[Sampled]:
    """The `count` most likely tokens with their logprobs, best first: what a beam may go on with."""
    rules = row.rules
    shape = Distribution(shaped(raw, row), rules.params)
    reported = Distribution(raw, _NEUTRAL) if rules.raw_logprobs else shape
    found = []
    for token in shape.top_ids(count).tolist():
        logprob = shape.logprob(token)
        if logprob > -math.inf:
            wanted = rules.num_logprobs
            scores = None if wanted is None else reported.scores(token, wanted)
            found.append(Sampled(token, logprob, scores))
    return found


def _uniform(row: Row) -> float:
    return uniform(row.rules.params.seed, row.choice, row.position)


def shaped(raw: Logits, row: Row) -> Logits:
    """The row after bias, masks and penalties: everything before the temperature. `raw` is left as it is.

    What is returned may be overwritten by the next call.
    """
    rules = row.rules
    if row.is_bare:
        return raw
    z = copied(raw, row.mask)
    if len(rules.bias_ids):
        z[rules.bias_ids] += rules.bias_values
    if rules.allowed_ids is not None:
        kept = z[rules.allowed_ids]
        z.fill(-np.inf)
        z[rules.allowed_ids] = kept
    if row.position < rules.min_tokens:
        stops = z[rules.stop_ids]
        z[rules.stop_ids] = -np.inf
        if z.max() == -np.inf:
            # The constraint is complete and only a stop is left: the constraint wins over min_tokens.
            z[rules.stop_ids] = stops
    if row.penalties is not None:
        row.penalties.apply(z)
    return z


def prompt_scores(raw: Logits, token: int, rules: Rules, k: int) -> TokenScores:
    """Scores of a prompt token: temperature and truncation apply, bias, masks and penalties do not."""
    return Distribution(raw, _NEUTRAL if rules.raw_logprobs else rules.params).scores(token, k)


_NEUTRAL = SamplingParams()
