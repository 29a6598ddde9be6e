"""What truncation leaves of a row of logits: who may be drawn, who is drawn, and what is reported.

Knows one row of numbers and temperature, top-k, top-p and min-p; nothing about masks, penalties or requests.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from candor import errors
from engine.core.row_kernels import (
    BUCKETS,
    bucket_sums,
    count_above,
    cut_behind,
    draw,
    group_tops,
    ids_at_least,
    sum_groups,
    weigh,
)
from engine.core.types import Logits, SamplingParams, TokenScores

Ids = NDArray[np.intp]

_NEAR, _FEW = 4.0, 2000
"""A nucleus among at most _FEW tokens within _NEAR of the maximum is found by sorting them."""

_FINITE = float(np.finfo(np.float32).min)
_HOTTEST = 1e38
"""Legal is any temperature, but what float32 holds as infinity would turn a masked -inf into no number."""


class Distribution:
    """A row behind temperature and truncation. `z` is relative to the row's maximum.

    `kept`: ids that truncation left, in no particular order. None when it is off, and when it left too many to
    list: then it took away the weights of the others. Made of memory that the distribution after the next one
    on this thread uses again.
    """

    def __init__(self, raw: Logits, params: SamplingParams) -> None:
        highest = raw.max()
        if not highest < np.inf:
            raise broken()
        if highest == -np.inf:
            raise nothing_allowed()
        temperature = 1.0 if params.is_greedy else min(params.temperature, _HOTTEST)
        self.z, self._all_weights, self._sums = weigh(raw, highest, np.float32(temperature))
        self._is_cut = False
        self.kept = None if params.is_greedy else self._truncate(params)

    @property
    def best(self) -> int:
        """The most likely token; among equals the lowest id."""
        return int(self.z.argmax())

    @cached_property
    def weights(self) -> Logits:
        """exp(z) of the kept tokens, in the order of `kept` (of the vocabulary when all are kept)."""
        return self._all_weights if self.kept is None else self._all_weights[self.kept]

    @cached_property
    def log_total(self) -> float:
        """Logarithm of the sum of the weights."""
        parts = self._sums if self.kept is None else self.weights
        return math.log(float(parts.sum(dtype=np.float64)))

    @cached_property
    def _tops(self) -> Logits:
        return group_tops(self.z)

    # --- truncation ---

    def _truncate(self, params: SamplingParams) -> Ids | None:
        has_k = 0 < params.top_k < len(self.z)
        has_p = params.top_p < 1.0
        if not (has_k or has_p or params.min_p > 0):
            return None
        if has_k:
            kept = self._ranked(params.top_k)
            # Equals of the k-th stay.
            floor = self.z[kept[min(params.top_k, len(kept)) - 1]]
            kept = kept[: int(np.searchsorted(-self.z[kept], -floor, side="right"))]
            if has_p:
                weights = self._all_weights[kept]
                kept = kept[
                    : _nucleus(weights, params.top_p * float(weights.sum(dtype=np.float64)))
                ]
        elif has_p:
            listed = self._top_p(params.top_p)
            if listed is None:
                self._cut(params.top_p, params.min_p)
                return None
            kept = listed
        else:
            margin = math.log(params.min_p) - 1e-3
            kept = _by_rank(self.z, ids_at_least(self.z, self._tops, margin))
        if params.min_p > 0:
            kept = kept[self._all_weights[kept] >= np.float32(params.min_p)]
        return kept

    def _top_p(self, top_p: float) -> Ids | None:
        """Ids of the nucleus; None when it is a large one."""
        weights = self._all_weights
        aim = top_p * float(self._sums.sum(dtype=np.float64))
        near = ids_at_least(self.z, self._tops, -_NEAR)
        if len(near) > _FEW or float(weights[near].sum(dtype=np.float64)) <= aim:
            return None
        kept = _by_rank(self.z, near)
        return kept[: _nucleus(weights[kept], aim)]

    def _cut(self, top_p: float, min_p: float) -> None:
        """Find the nucleus by buckets of equal width, of which only the one on its edge is sorted."""
        weights = self._all_weights
        sums = np.cumsum(bucket_sums(self.z, weights))
        aim = top_p * float(sums[-1])
        edge = min(int(np.searchsorted(sums, aim, side="right")), BUCKETS - 1)
        before = float(sums[edge - 1]) if edge else 0.0
        on_edge = _by_rank(self.z, cut_behind(self.z, weights, edge))
        weights[on_edge[_nucleus(weights[on_edge], aim - before) :]] = 0
        if min_p > 0:
            weights[weights < np.float32(min_p)] = 0
        sum_groups(weights, self._sums)
        self._is_cut = True

    def _is_kept(self, ids: Ids) -> NDArray[np.bool_]:
        if self.kept is not None:
            return np.isin(ids, self.kept)
        return self._all_weights[ids] > 0 if self._is_cut else np.ones(len(ids), np.bool_)

    # --- draw ---

    def draw(self, u: float) -> int:
        """The token at `u` of the cumulative distribution."""
        if self.kept is None:
            return int(draw(self._all_weights, self._sums, u))
        return int(self.kept[_invert(self.weights, u)])

    # --- report ---

    def logprob(self, token: int) -> float:
        """Natural logarithm of the token's probability."""
        if not self._is_kept(np.array([token]))[0]:
            return -math.inf
        return float(self.z[token]) - self.log_total

    def scores(self, token: int, k: int) -> TokenScores:
        """The token first, then the k most likely ones in rank order, the token not repeated."""
        best = self.top_ids(k).tolist() if k else []
        ids = np.array([token, *(i for i in best if i != token)])
        # What truncation dropped has no probability and ranks behind everything that has one.
        values = np.where(self._is_kept(ids), self.z[ids], -np.inf)
        # Whatever beats one of the best is itself among the best, so they rank each other.
        is_best = token in best
        ranks = 1 + np.searchsorted(np.sort(-values) if is_best else -values[1:], -values)
        if not is_best:
            ranks[0] = 1 + self._num_above(values[0])
        return TokenScores(
            token_ids=tuple(ids.tolist()),
            logprobs=tuple((values.astype(np.float64) - self.log_total).tolist()),
            ranks=tuple(ranks.tolist()),
        )

    def _num_above(self, value: float) -> int:
        """Kept tokens that are likelier than this."""
        if self.kept is not None:
            return int(np.count_nonzero(self.z[self.kept] > value))
        if self._is_cut and value == -np.inf:
            return int(np.count_nonzero(self._all_weights))
        # What is likelier than a token that was kept was kept too.
        return int(count_above(self.z, self._tops, value))

    # --- ranks ---

    def top_ids(self, k: int) -> Ids:
        """The k most likely ids in rank order; masked ones, by id, where fewer than k are left."""
        k = min(k, len(self.z))
        best = self._ranked(k)[:k]
        if len(best) < k:
            masked = np.flatnonzero(self.z == -np.inf)[: k - len(best)]
            best = np.concatenate([best, masked])
        return best

    def _ranked(self, k: int) -> Ids:
        """Ids of the k largest with all their equals in rank order, and maybe some more behind them.

        The k-th largest of the groups' maxima is a lower bound of the k-th largest value, as k different
        tokens reach it: that replaces a partition of the vocabulary.
        """
        parts = self._tops if k <= len(self._tops) else self.z
        floor = np.partition(parts, len(parts) - k)[len(parts) - k] if k < len(parts) else -np.inf
        return _by_rank(self.z, ids_at_least(self.z, self._tops, max(float(floor), _FINITE)))


def _invert(weights: Logits, u: float) -> int:
    """Where `u` of the total falls. Never on a weight of zero."""
    sums = np.cumsum(weights, dtype=np.float64)
    place = int(np.searchsorted(sums, u * float(sums[-1]), side="right"))
    if place >= len(sums):  # u times the total was rounded up to the total
        place = int(np.flatnonzero(weights)[-1])
    return place


def _nucleus(weights: Logits, aim: float) -> int:
    """How many of the descending weights stay: those with less than `aim` of mass before them, at least one."""
    return 1 + int(np.searchsorted(np.cumsum(weights[:-1], dtype=np.float64), aim, side="left"))


def _by_rank(z: Logits, ids: Ids) -> Ids:
    """Ids (ascending) by descending value; equals stay by id."""
    return ids[np.argsort(-z[ids], kind="stable")]


def broken() -> errors.Internal:
    """A row that holds no numbers, or none that are finite."""
    return errors.Internal("the model's logits are not finite", reason="BAD_LOGITS")


def nothing_allowed() -> errors.InvalidArgument:
    return errors.InvalidArgument(
        "no token is allowed here: the constraint and allowed_token_ids have none in common",
        reason="NO_TOKEN_ALLOWED",
        field="allowed_token_ids",
    )
