"""The compiled loops against numpy, on rows as long as real ones and on awkward ones."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.core.distribution import Distribution
from engine.core.row_kernels import (
    GROUP,
    count_above,
    draw,
    group_tops,
    ids_at_least,
    sum_groups,
    weigh,
)
from engine.core.types import SamplingParams

SIZES = [1, 63, 64, 65, 300, 49152]


def row(size: int, seed: int = 0, spread: float = 3.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    raw = (rng.standard_normal(size) * spread).astype(np.float32)
    raw[rng.random(size) < 0.1] = -np.inf
    raw[size // 2] = 5.0
    return raw


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 7.0, 1e38])
def test_weights_are_exponentials_and_their_sums(size: int, temperature: float) -> None:
    raw = row(size)
    z, weights, sums = weigh(raw, raw.max(), np.float32(temperature))
    expected = (raw - raw.max()) / np.float32(temperature)
    np.testing.assert_array_max_ulp(z, expected, maxulp=1)
    exact = np.exp(z.astype(np.float64))
    np.testing.assert_allclose(weights, np.where(z >= -87, exact, 0), rtol=4e-7)
    assert not weights[np.isneginf(raw)].any() and weights[raw.argmax()] == 1
    padded = np.zeros(len(sums) * GROUP)
    padded[:size] = weights
    np.testing.assert_allclose(sums, padded.reshape(-1, GROUP).sum(axis=1), rtol=1e-6)
    highest = np.full(len(sums) * GROUP, -np.inf, np.float32)
    highest[:size] = z
    np.testing.assert_array_equal(group_tops(z), highest.reshape(-1, GROUP).max(axis=1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("floor", [-1e30, -9.0, -2.0, 0.0, 1.0])
def test_ids_by_value_are_those_of_a_comparison(size: int, floor: float) -> None:
    raw = row(size)
    z = weigh(raw, raw.max(), np.float32(1)).z
    tops = group_tops(z)
    np.testing.assert_array_equal(ids_at_least(z, tops, floor), np.flatnonzero(z >= floor))
    assert count_above(z, tops, floor) == np.count_nonzero(z > np.float32(floor))


def test_a_row_that_is_no_neighbour_of_itself_is_read_right() -> None:
    wide = np.stack([row(300, 1), row(300, 2)], axis=1)
    column = wide[:, 1]
    got = weigh(column, column.max(), np.float32(1))
    expected = weigh(column.copy(), column.max(), np.float32(1))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("size", SIZES)
def test_a_draw_is_the_place_in_the_running_sum(size: int) -> None:
    raw = row(size, 3)
    _, weights, sums = weigh(raw, raw.max(), np.float32(1))
    running = np.cumsum(weights, dtype=np.float64)
    for u in [*np.random.default_rng(4).random(200), 0.0, 1 - 2.0**-53]:
        token = draw(weights, sums, u)
        assert weights[token] > 0
        # Sums of float32 groups may move a boundary by a millionth.
        below = running[token] - weights[token]
        assert below - 2e-6 * running[-1] <= u * running[-1] <= running[token] + 2e-6 * running[-1]
    allowed = np.flatnonzero(weights)
    assert draw(weights, sums, 0.0) == allowed[0]
    assert draw(weights, sums, np.nextafter(1.0, 0.0)) == allowed[-1] or weights[allowed[-1]] < 1e-4


def test_a_draw_never_takes_what_has_no_weight() -> None:
    weights = np.zeros(200, np.float32)
    weights[[70, 130]] = 1e-30, 1.0
    sums = np.empty(4, np.float32)
    sum_groups(weights, sums)
    assert {draw(weights, sums, u) for u in (0.0, 0.3, 0.999, 1.0)} <= {70, 130}
    assert draw(weights, sums, 1.0) == 130


@pytest.mark.parametrize("temperature", [0.7, 2.0, 5.0])
@pytest.mark.parametrize(("top_p", "min_p"), [(0.9, 0.0), (0.5, 0.0), (0.95, 0.05), (1e-6, 0.0)])
def test_a_nucleus_of_a_long_row_is_that_of_a_sort(
    temperature: float, top_p: float, min_p: float
) -> None:
    raw = row(49152, 5)
    shape = Distribution(raw, SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p))
    z = raw.astype(np.float64) / temperature
    weights = np.exp(z - z.max())
    order = np.argsort(-z, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = order[before < top_p * weights.sum()]
    kept = kept[weights[kept] >= min_p]
    total = weights[kept].sum()
    drawn = {shape.draw(u) for u in np.linspace(0, 1, 500, endpoint=False)}
    assert drawn <= {*kept.tolist(), int(order[min(len(kept), len(order) - 1)])}
    assert shape.log_total == pytest.approx(np.log(total), abs=1e-5)
    first, dropped = int(kept[0]), int(order[-1])
    assert shape.logprob(first) == pytest.approx(np.log(weights[first] / total), abs=1e-5)
    assert shape.logprob(dropped) == -np.inf
    scores = shape.scores(dropped, 3)
    assert scores.logprobs[0] == -np.inf and abs(scores.ranks[0] - 1 - len(kept)) <= 1
    middle = int(kept[len(kept) // 2])
    assert abs(shape.scores(middle, 0).ranks[0] - 1 - len(kept) // 2) <= 1, "equal as float32"
