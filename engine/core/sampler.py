"""From logits to the next token: bias, masks, penalties, temperature, truncation, one draw.

Knows numbers only: no text, no stops, no sequences. The order of the steps is part of the contract:

    bias → allowed ids → constraint mask → min_tokens mask → repetition, frequency, presence penalty
    → temperature → top-k → top-p → min-p → softmax → draw

Rows that need none of it (plain greedy) share one argmax over the batch. The others are worked on one at a
time: a row of a 49k vocabulary stays in the core's cache, a batch of them does not, and a row's arithmetic is
then the same to the bit whoever else is in the batch. The draw is `uniform(seed, choice, position)` put
through the inverse of the cumulative distribution, so a token depends on these three and on the logits.
(Runners whose logits move in the last bits with the batch can still move a draw that falls on a boundary.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from candor import errors
from engine.core.philox import uniform
from engine.core.types import Logits, SamplingParams, TokenScores

Ids = NDArray[np.intp]

_EPS = 1e-5
"""Penalties and penalty-like numbers nearer to neutral than this are off."""
_GROUP = 64
"""Tokens per group where a row is reduced in two levels."""
_NEAR, _FEW = 4.0, 2000
"""A nucleus among at most _FEW tokens within _NEAR of the maximum is found by sorting them."""
_BUCKETS, _PER_UNIT = 512, 16
"""Otherwise by buckets: how many, and how many per unit of logit."""


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
            r = np.float32(self._repetition)
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


def sample(logits: Logits, rows: Sequence[Row]) -> list[Sampled | Exception]:
    """The next token of each row, or why there is none (then only that sequence fails)."""
    results: list[Sampled | Exception] = [Sampled(-1)] * len(rows)
    plain = [i for i, row in enumerate(rows) if row.is_plain]
    if plain:
        some = logits if len(plain) == len(rows) else logits[plain]
        for i, token in zip(plain, some.argmax(axis=1).tolist(), strict=True):
            # argmax finds a NaN first, so a broken row cannot pass for an answer.
            is_number = logits[i, token] == logits[i, token]
            results[i] = Sampled(token) if is_number else _broken()
    if len(plain) < len(rows):
        for i, row in enumerate(rows):
            if not row.is_plain:
                try:
                    results[i] = _sample_row(logits[i], row)
                except errors.CandorError as error:
                    results[i] = error
    return results


def _sample_row(raw: Logits, row: Row) -> Sampled:
    rules, params = row.rules, row.rules.params
    z = shaped(raw, row)
    shape = _Distribution(z, params)
    token = shape.best if params.is_greedy else shape.draw(_uniform(row))
    if not rules.needs_logprob:
        return Sampled(token)
    reported = _Distribution(raw, _NEUTRAL) if rules.raw_logprobs else shape
    if rules.num_logprobs is None:
        return Sampled(token, reported.logprob(token))
    scores = reported.scores(token, rules.num_logprobs)
    return Sampled(token, scores.logprobs[0], scores)


def candidates(raw: Logits, row: Row, count: int) -> list[Sampled]:
    """The `count` most likely tokens with their logprobs, best first: what a beam may go on with."""
    rules = row.rules
    shape = _Distribution(shaped(raw, row), rules.params)
    reported = _Distribution(raw, _NEUTRAL) if rules.raw_logprobs else shape
    found = []
    for token in _top(shape.z, count).tolist():
        logprob = shape.logprob(token)
        if logprob > -math.inf:
            wanted = rules.num_logprobs
            scores = None if wanted is None else reported.scores(token, wanted)
            found.append(Sampled(token, logprob, scores))
    return found


def _uniform(row: Row) -> float:
    return uniform(row.rules.params.seed, row.choice, row.position)


def shaped(raw: Logits, row: Row) -> Logits:
    """The row after bias, masks and penalties: everything before the temperature. `raw` is left as it is."""
    rules = row.rules
    if row.is_bare:
        return raw
    z = raw.copy()
    if len(rules.bias_ids):
        z[rules.bias_ids] += rules.bias_values
    if rules.allowed_ids is not None:
        kept = z[rules.allowed_ids]
        z.fill(-np.inf)
        z[rules.allowed_ids] = kept
    if row.mask is not None:
        z[~row.mask] = -np.inf
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
    return _Distribution(raw, _NEUTRAL if rules.raw_logprobs else rules.params).scores(token, k)


class _Distribution:
    """A row behind temperature and truncation. `z` is relative to the row's maximum.

    `kept`: ids that truncation left, in no particular order; None when it is off and all are left.
    """

    def __init__(self, raw: Logits, params: SamplingParams) -> None:
        top = raw.max()
        if not top < np.inf:
            raise _broken()
        if top == -np.inf:
            raise _nothing_allowed()
        z = raw - top
        self.kept: Ids | None = None
        self._weights: Logits | None = None
        if not params.is_greedy:
            if params.temperature != 1.0:
                z /= np.float32(params.temperature)
            self.z = z
            self.kept = self._truncate(params)
        self.z = z

    @property
    def best(self) -> int:
        """The most likely token; among equals the lowest id."""
        return int(self.z.argmax())

    @property
    def weights(self) -> Logits:
        """exp(z) of the kept tokens, in the order of `kept` (of the vocabulary when all are kept)."""
        if self._weights is None:
            self._weights = np.exp(self.z if self.kept is None else self.z[self.kept])
        return self._weights

    @property
    def log_total(self) -> float:
        """Logarithm of the sum of the weights."""
        return math.log(float(self.weights.sum(dtype=np.float64)))

    # --- truncation ---

    def _truncate(self, params: SamplingParams) -> Ids | None:
        has_k = 0 < params.top_k < len(self.z)
        has_p = params.top_p < 1.0
        if not (has_k or has_p or params.min_p > 0):
            return None
        if has_k:
            kept = _by_rank(self.z, _at_least_top(self.z, params.top_k))
            # Equals of the k-th stay.
            floor = self.z[kept[min(params.top_k, len(kept)) - 1]]
            kept = kept[: int(np.searchsorted(-self.z[kept], -floor, side="right"))]
            if has_p:
                weights = np.exp(self.z[kept])
                kept = kept[
                    : _nucleus(weights, params.top_p * float(weights.sum(dtype=np.float64)))
                ]
        elif has_p:
            kept = self._top_p(params.top_p)
        else:
            margin = math.log(params.min_p) - 1e-3
            kept = _by_rank(self.z, np.flatnonzero(self.z >= margin))
        if params.min_p > 0:
            kept = kept[np.exp(self.z[kept]) >= np.float32(params.min_p)]
        return kept

    def _top_p(self, top_p: float) -> Ids:
        """Ids of the nucleus."""
        weights = np.exp(self.z)
        aim = top_p * float(weights.sum(dtype=np.float64))
        near = np.flatnonzero(self.z >= -_NEAR)
        if len(near) <= _FEW and float(weights[near].sum(dtype=np.float64)) > aim:
            kept = _by_rank(self.z, near)
            return kept[: _nucleus(weights[kept], aim)]
        # A flat row: the nucleus is found by buckets of equal width, and only the bucket on its edge is
        # sorted. What is far below the maximum shares the last bucket.
        buckets = np.minimum(self.z * np.float32(-_PER_UNIT), _BUCKETS - 1).astype(np.intp)
        sums = np.cumsum(np.bincount(buckets, weights, _BUCKETS))
        edge = min(int(np.searchsorted(sums, aim, side="right")), _BUCKETS - 1)
        before = float(sums[edge - 1]) if edge else 0.0
        on_edge = _by_rank(self.z, np.flatnonzero(buckets == edge))
        on_edge = on_edge[: _nucleus(weights[on_edge], aim - before)]
        return np.concatenate([np.flatnonzero(buckets < edge), on_edge])

    # --- draw ---

    def draw(self, u: float) -> int:
        """The token at `u` of the cumulative distribution."""
        if self.kept is not None:
            return int(self.kept[_invert(self.weights, u)[0]])
        # Two levels: sums of groups first, then the one group that is hit; a running sum over the whole
        # vocabulary would cost ten times as much. Tokens of a group lie `len // _GROUP` apart.
        weights = self.weights
        columns = len(weights) // _GROUP
        body, tail = (
            weights[: columns * _GROUP].reshape(_GROUP, columns),
            weights[columns * _GROUP :],
        )
        sums = body.sum(axis=0) if columns else np.empty(0, dtype=np.float32)
        column, rest = _invert(np.append(sums, tail), u)
        if column >= columns:
            return columns * _GROUP + column - columns
        row, _ = _invert(body[:, column], rest)
        return row * columns + column

    # --- report ---

    def logprob(self, token: int) -> float:
        """Natural logarithm of the token's probability."""
        if self.kept is not None and token not in self.kept:
            return -math.inf
        return float(self.z[token]) - self.log_total

    def scores(self, token: int, k: int) -> TokenScores:
        """The token first, then the k most likely ones in rank order, the token not repeated."""
        best = _top(self.z, k) if k else np.empty(0, dtype=np.intp)
        ids = np.concatenate([[token], best])
        values = self.z[ids]
        # What truncation dropped has no probability and ranks behind everything that has one.
        if self.kept is not None:
            values = np.where(np.isin(ids, self.kept), values, -np.inf)
        # Whatever beats one of the best is itself among the best, so they rank each other.
        ranks = 1 + np.searchsorted(-values[1:], -values)
        place = np.flatnonzero(best == token)
        if not len(place):
            kept = self.z if self.kept is None else self.z[self.kept]
            ranks[0] = 1 + np.count_nonzero(kept > values[0])
        once = np.delete(np.arange(len(ids)), place + 1)
        return TokenScores(
            token_ids=tuple(ids[once].tolist()),
            logprobs=tuple((values[once].astype(np.float64) - self.log_total).tolist()),
            ranks=tuple(ranks[once].tolist()),
        )


def _invert(weights: Logits, u: float) -> tuple[int, float]:
    """Where `u` of the total falls, and how far into that item, as a fraction. Never a weight of zero."""
    sums = np.cumsum(weights, dtype=np.float64)
    aim = u * float(sums[-1])
    place = int(np.searchsorted(sums, aim, side="right"))
    if place >= len(sums):  # u times the total was rounded up to the total
        place = int(np.flatnonzero(weights)[-1])
    before = float(sums[place - 1]) if place else 0.0
    return place, min(max((aim - before) / float(weights[place]), 0.0), 1.0 - 2.0**-53)


def _nucleus(weights: Logits, aim: float) -> int:
    """How many of the descending weights stay: those with less than `aim` of mass before them, at least one."""
    return 1 + int(np.searchsorted(np.cumsum(weights[:-1], dtype=np.float64), aim, side="left"))


def _at_least_top(z: Logits, k: int) -> Ids:
    """Ids of a superset of the k largest with all their equals, usually a small one.

    The k-th largest of the groups' maxima is a lower bound of the k-th largest value, as k different
    tokens reach it: one cheap pass replaces a partition of the vocabulary.
    """
    columns = len(z) // _GROUP
    if columns < k:
        size = len(z)
        floor = np.partition(z, size - k)[size - k] if k < size else -np.inf
    else:
        tops = z[: columns * _GROUP].reshape(_GROUP, columns).max(axis=0)
        floor = np.partition(tops, columns - k)[columns - k]
    return np.flatnonzero(z >= floor) if floor > -np.inf else np.flatnonzero(z > -np.inf)


def _by_rank(z: Logits, ids: Ids) -> Ids:
    """Ids (ascending) by descending value; equals stay by id."""
    return ids[np.argsort(-z[ids], kind="stable")]


def _top(z: Logits, k: int) -> Ids:
    """The k most likely ids in rank order; masked ones, by id, where fewer than k are left."""
    k = min(k, len(z))
    best = _by_rank(z, _at_least_top(z, k))[:k]
    if len(best) < k:
        masked = np.flatnonzero(z == -np.inf)[: k - len(best)]
        best = np.concatenate([best, masked])
    return best


def _broken() -> errors.Internal:
    return errors.Internal("the model's logits are not finite", reason="BAD_LOGITS")


def _nothing_allowed() -> errors.InvalidArgument:
    return errors.InvalidArgument(
        "no token is allowed here: the constraint and allowed_token_ids have none in common",
        reason="NO_TOKEN_ALLOWED",
        field="allowed_token_ids",
    )


_NEUTRAL = SamplingParams()
