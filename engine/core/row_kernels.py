"""Compiled loops over one row of logits: exponentials with their sums, the draw, the edge of a nucleus.

Knows arrays only. numpy would do, and the tests hold these loops to it; but it walks a row of 49k numbers once
per operation, and here one walk does it all. A row is always worked on alone and in the same order, so its
numbers are the same to the bit whatever the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
Row = NDArray[np.float32]

GROUP = 64
"""Neighbouring tokens that are summed up and topped together."""
BUCKETS, PER_UNIT = 512, 16
"""A row sorted roughly: buckets of a sixteenth of a logit, all beyond the last one in it."""

# exp(x) = 2^n e^r with |r| <= ln 2 / 2; e^r by its Taylor series, which is as good as float32 there.
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)
"""Below, exp is nothing that a sum of float32 would notice."""
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
_NOTHING = np.float32(-np.inf)
_C3, _C4 = np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6, _C7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)


_READ = numba.types.Array(numba.float32, 1, "C", readonly=True)
_MASK = numba.types.Array(numba.boolean, 1, "C", readonly=True)
_F4, _I4 = numba.float32[::1], numba.int32[::1]


def _compiled(result: Any, *arguments: Any) -> Callable[[F], F]:
    """Compile at import for these types (from the cache on disk after the first time), never in a step.

    No row has a NaN in it: whoever calls has looked at its maximum, which would be one.
    """
    options: Any = {
        "cache": True,
        "nogil": True,
        "fastmath": {"contract", "reassoc", "nsz", "nnan"},
    }
    return cast("Callable[[F], F]", numba.njit(result(*arguments), **options))


class Weighed(NamedTuple):
    """A row and its exponentials."""

    z: Row
    weights: Row
    """exp(z)."""
    sums: Row
    """Of the weights of each GROUP of neighbours."""


class _Scratch(threading.local):
    """Memory for rows of one length, a set for each thread. Fresh memory would cost a page fault every few
    hundred tokens, which together take longer than the arithmetic."""

    def __init__(self) -> None:
        self.size = -1
        self.turn = 0

    def next(self, size: int) -> Weighed:
        """Room for one of the two rows that may be looked at together."""
        self._fit(size)
        self.turn = 1 - self.turn
        return self.rows[self.turn]

    def copy(self, size: int) -> Row:
        """Room for a row that is changed before it is weighed."""
        self._fit(size)
        return self.changed

    def _fit(self, size: int) -> None:
        if size != self.size:
            self.size = size
            self.changed = np.empty(size, np.float32)
            sums = -(-size // GROUP)
            self.rows = [
                Weighed(*(np.empty(n, np.float32) for n in (size, size, sums))) for _ in range(2)
            ]


_scratch = _Scratch()


def weigh(raw: Row, highest: np.float32, temperature: np.float32) -> Weighed:
    """z = (raw - highest) / temperature and what follows from it.

    The arrays belong to the caller until the call after the next one on this thread.
    """
    out = _scratch.next(len(raw))
    bits = out.weights.view(np.int32)
    _weigh(np.ascontiguousarray(raw), highest, temperature, out.z, out.weights, bits, out.sums)
    return out


def copied(raw: Row, mask: NDArray[np.bool_] | None) -> Row:
    """The row, with -inf where `mask` allows nothing; the caller's until the next call on this thread."""
    out = _scratch.copy(len(raw))
    if mask is None:
        out[:] = raw
    else:
        _keep_allowed(np.ascontiguousarray(raw), mask, out)
    return out


@_compiled(numba.void, _READ, _MASK, _F4)
def _keep_allowed(raw: Row, mask: NDArray[np.bool_], out: Row) -> None:
    for i in range(len(raw)):
        out[i] = raw[i] if mask[i] else _NOTHING


@_compiled(numba.void, _READ, numba.float32, numba.float32, _F4, _F4, _I4, _F4)
def _weigh(
    raw: Row,
    highest: np.float32,
    temperature: np.float32,
    z: Row,
    weights: Row,
    bits: NDArray[np.int32],
    sums: Row,
) -> None:
    size = len(raw)
    series = np.empty(GROUP, np.float32)
    for group in range(len(sums)):
        start = group * GROUP
        count = min(GROUP, size - start)
        for i in range(count):
            x = (raw[start + i] - highest) / temperature
            z[start + i] = x
            x = max(x, _LEAST)
            n = np.floor(x * _LOG2E + _HALF)
            r = (x - n * _LN2_HIGH) - n * _LN2_LOW
            series[i] = _ONE + r * (
                _ONE + r * (_HALF + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7)))))
            )
            # The bits of 2^n: `bits` is the same memory as `weights`.
            bits[start + i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        total = _ZERO
        for i in range(count):
            weight = series[i] * weights[start + i] if z[start + i] >= _LEAST else _ZERO
            weights[start + i] = weight
            total += weight
        sums[group] = total


@_compiled(numba.intp, _F4, _F4, numba.float64)
def draw(weights: Row, sums: Row, u: float) -> int:
    """The token at `u` of the cumulative distribution, in order of ids. Never one of weight zero."""
    total = 0.0
    for group in range(len(sums)):
        total += np.float64(sums[group])
    aim = u * total
    # Where rounding leaves the aim at the very end, the last token with a weight is meant.
    running, before, hit = 0.0, 0.0, 0
    for group in range(len(sums)):
        if sums[group] > 0:
            hit, before = group, running
            running += np.float64(sums[group])
            if running > aim:
                break
    found = -1
    for i in range(hit * GROUP, min((hit + 1) * GROUP, len(weights))):
        if weights[i] > 0:
            found = i
            before += np.float64(weights[i])
            if before > aim:
                break
    return found


@_compiled(_F4, _F4)
def group_tops(z: Row) -> Row:
    """The largest z of each GROUP of neighbours."""
    whole = len(z) // GROUP
    tops = np.empty((len(z) + GROUP - 1) // GROUP, np.float32)
    for group in range(whole):  # of one length, so that the compiler can unroll it
        top = z[group * GROUP]
        for i in range(GROUP):
            top = max(top, z[group * GROUP + i])
        tops[group] = top
    if whole < len(tops):
        top = z[whole * GROUP]
        for i in range(whole * GROUP, len(z)):
            top = max(top, z[i])
        tops[whole] = top
    return tops


@_compiled(numba.intp[::1], _F4, _F4, numba.float32)
def ids_at_least(z: Row, tops: Row, floor: float) -> NDArray[np.intp]:
    """Ids with at least this z, ascending."""
    count = 0
    for group in range(len(tops)):
        if tops[group] >= floor:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(z))):
                count += z[i] >= floor
    found = np.empty(count, np.intp)
    count = 0
    for group in range(len(tops)):
        if tops[group] >= floor:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(z))):
                if z[i] >= floor:
                    found[count] = i
                    count += 1
    return found


@_compiled(numba.intp, _F4, _F4, numba.float32)
def count_above(z: Row, tops: Row, value: float) -> int:
    """How many have more than this z."""
    count = 0
    for group in range(len(tops)):
        if tops[group] > value:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(z))):
                count += z[i] > value
    return count


@numba.njit(inline="always")
def _bucket(z: float) -> int:
    scaled = z * np.float32(-PER_UNIT)
    return int(scaled) if scaled < BUCKETS - 1 else BUCKETS - 1


@_compiled(numba.float64[::1], _F4, _F4)
def bucket_sums(z: Row, weights: Row) -> NDArray[np.float64]:
    """The weights by bucket of z, the likeliest tokens first."""
    sums = np.zeros(BUCKETS, np.float64)
    for i in range(len(z)):
        sums[_bucket(z[i])] += np.float64(weights[i])
    return sums


@_compiled(numba.intp[::1], _F4, _F4, numba.intp)
def cut_behind(z: Row, weights: Row, edge: int) -> NDArray[np.intp]:
    """Take away the weights of buckets behind `edge`; returns the ids in it."""
    count = 0
    for i in range(len(z)):
        bucket = _bucket(z[i])
        if bucket > edge:
            weights[i] = 0
        elif bucket == edge:
            count += 1
    found = np.empty(count, np.intp)
    count = 0
    for i in range(len(z)):
        if _bucket(z[i]) == edge:
            found[count] = i
            count += 1
    return found


@_compiled(numba.void, _F4, _F4)
def sum_groups(weights: Row, sums: Row) -> None:
    """Bring the groups' sums up to date with changed weights."""
    for group in range(len(sums)):
        total = _ZERO
        for i in range(group * GROUP, min((group + 1) * GROUP, len(weights))):
            total += weights[i]
        sums[group] = total
