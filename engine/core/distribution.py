"""What truncation leaves of a row of logits: who may be drawn, who is drawn, and what is reported.

Knows one row of numbers and temperature, top-k, top-p and min-p; nothing about masks, penalties or requests.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from candor import errors
from engine.core.types import Logits, SamplingParams, TokenScores

Ids = NDArray[np.intp]

_GROUP = 64
"""Tokens per group where a row is reduced in two levels."""
_NEAR, _FEW = 4.0, 2000
"""A nucleus among at most _FEW tokens within _NEAR of the maximum is found by sorting them."""
_BUCKETS, _PER_UNIT = 512, 16
"""Otherwise by buckets: how many, and how many per unit of logit."""

_HOTTEST = 1e38
"""Legal is any temperature, but what float32 holds as infinity would turn a masked -inf into no number."""


class Distribution:
    """A row behind temperature and truncation. `z` is relative to the row's maximum.

    `kept`: ids that truncation left, in no particular order; None when it is off and all are left.
    """

    def __init__(self, raw: Logits, params: SamplingParams) -> None:
        highest = raw.max()
        if not highest < np.inf:
            raise broken()
        if highest == -np.inf:
            raise _nothing_allowed()
        z = raw - highest
        self.kept: Ids | None = None
        self._weights: Logits | None = None
        if not params.is_greedy:
            if params.temperature != 1.0:
                z /= np.float32(min(params.temperature, _HOTTEST))
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
            kept = _by_rank(self.z, _at_least(self.z, params.top_k))
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
        best = top_ids(self.z, k) if k else np.empty(0, dtype=np.intp)
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


def _at_least(z: Logits, k: int) -> Ids:
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


def top_ids(z: Logits, k: int) -> Ids:
    """The k most likely ids in rank order; masked ones, by id, where fewer than k are left."""
    k = min(k, len(z))
    best = _by_rank(z, _at_least(z, k))[:k]
    if len(best) < k:
        masked = np.flatnonzero(z == -np.inf)[: k - len(best)]
        best = np.concatenate([best, masked])
    return best


def broken() -> errors.Internal:
    """A row that holds no numbers, or none that are finite."""
    return errors.Internal("the model's logits are not finite", reason="BAD_LOGITS")


def _nothing_allowed() -> errors.InvalidArgument:
    return errors.InvalidArgument(
        "no token is allowed here: the constraint and allowed_token_ids have none in common",
        reason="NO_TOKEN_ALLOWED",
        field="allowed_token_ids",
    )
