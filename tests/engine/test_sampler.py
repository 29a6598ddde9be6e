"""The sampler against a slow and plain one, its draws, its reports, and numbers that have hurt others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from candor import errors
from engine.core.philox import philox, uniform
from engine.core.sampler import Penalties, Row, Rules, Sampled, candidates, prompt_scores, sample
from engine.core.types import Logits, SamplingParams

VOCAB = 300


def oracle(
    raw: Logits,
    p: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    mask: NDArray[np.bool_] | None = None,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> NDArray[np.float64]:
    """Probabilities of the next token, token by token, straight from the description."""
    z = raw.astype(np.float64)
    for token, bias in p.logit_bias:
        z[token] += bias
    for token in range(len(z)):
        banned = p.allowed_token_ids is not None and token not in p.allowed_token_ids
        banned |= mask is not None and not mask[token]
        banned |= len(output) < min_tokens and token in stop_ids
        if banned:
            z[token] = -np.inf
    counts = Counter(output)
    for token in {*prompt, *output}:
        z[token] = (
            z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
        )
    for token, count in counts.items():
        z[token] -= p.frequency_penalty * count + p.presence_penalty
    if p.is_greedy:
        return softmax(z)
    z /= p.temperature
    order = sorted(range(len(z)), key=lambda t: (-z[t], t))
    if p.top_k != -1:
        floor = z[order[min(p.top_k, len(z)) - 1]]
        z[z < floor] = -np.inf
    weights = np.exp(z - z.max())
    probabilities = weights / weights.sum()
    before = 0.0
    for rank, token in enumerate(order):
        if rank and p.top_p < 1 and before >= p.top_p:  # at 1 it is off, whatever the sum rounds to
            z[token] = -np.inf
        before += probabilities[token]
    z[np.exp(z - z.max()) < p.min_p] = -np.inf
    return softmax(z)


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of logits."""
    weights: NDArray[np.float64] = np.exp(z - z.max())
    weights /= weights.sum()
    return weights


def one(raw: Logits, row: Row) -> Sampled:
    """The result for one row, which must be a token."""
    (result,) = sample(raw[None, :], [row])
    assert isinstance(result, Sampled), result
    return result


def distribution(raw: Logits, row: Row) -> NDArray[np.float64]:
    """Probabilities as the sampler reports them."""
    scores = one(raw, row).scores
    assert scores is not None
    found = np.zeros(len(raw))
    for token, logprob in zip(scores.token_ids, scores.logprobs, strict=True):
        found[token] = math.exp(logprob)
    return found


def make_logits(seed: int, spread: float) -> Logits:
    """Random logits on a grid, so that equal values occur."""
    rng = np.random.default_rng(seed)
    return (np.round(rng.standard_normal(VOCAB) * spread * 4) / 4).astype(np.float32)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 2, 7, 50, 299, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0)), ((3, 2.0), (3, 2.0))]),
    allowed_token_ids=st.sampled_from([None, (3, 9, 11, 12, 200), tuple(range(VOCAB))]),
)


@settings(max_examples=300, deadline=None)
@given(
    params,
    st.integers(0, 10_000),
    st.sampled_from([0.3, 2.0, 6.0]),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.lists(st.integers(0, 20), max_size=12),
    st.booleans(),
    st.sampled_from([0, 5]),
)
def test_probabilities_equal_the_plain_computation(
    p: SamplingParams,
    seed: int,
    spread: float,
    prompt: list[int],
    output: list[int],
    has_mask: bool,
    min_tokens: int,
) -> None:
    raw = make_logits(seed, spread)
    mask = None
    if has_mask:
        mask = np.random.default_rng(seed).random(VOCAB) < 0.7
        mask[[3, 9]] = True
    stop_ids = (0, 11)
    penalties = Penalties(p, prompt) if Penalties.are_wanted(p) else None
    for token in output:
        if penalties:
            penalties.add(token)
    rules = Rules.of(p, stop_ids=stop_ids, min_tokens=min_tokens, num_logprobs=VOCAB)
    row = Row(rules, 0, len(output), penalties, mask)
    expected = oracle(
        raw, p, prompt=prompt, output=output, mask=mask, stop_ids=stop_ids, min_tokens=min_tokens
    )
    found = distribution(raw, row)
    # A float32 sum may put a token on the other side of a cut that the oracle's sum just touches.
    differing = np.flatnonzero((found > 0) != (expected > 0))
    assert len(differing) <= 1, (differing, found[differing], expected[differing])
    if not len(differing):
        assert np.allclose(found, expected, atol=1e-5, rtol=1e-3)
    assert found[one(raw, row).token] > 0


@pytest.mark.parametrize("repetition", [5e-324, 1e-300, 1e-38, 1e-20])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_the_smallest_repetition_penalties_leave_numbers(
    repetition: float, temperature: float
) -> None:
    raw = make_logits(1, 6.0)
    raw[3], raw[4], raw[5] = 2.0, -2.0, 0.0
    p = SamplingParams(
        repetition_penalty=repetition, temperature=temperature, allowed_token_ids=(3, 4, 9)
    )
    rules = Rules.of(p, num_logprobs=2)
    sampled = one(raw, Row(rules, 0, 0, Penalties(p, [3, 4, 5, 6])))
    assert sampled.token == 3
    assert sampled.scores is not None and np.isfinite(sampled.scores.logprobs[0])


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e308])
def test_any_heat_is_uniform_over_what_is_allowed(temperature: float) -> None:
    p = SamplingParams(temperature=temperature, allowed_token_ids=(3, 9, 11, 40), top_p=0.99)
    found = distribution(
        make_logits(1, 6.0), Row(Rules.of(p, num_logprobs=VOCAB), 0, 0, Penalties(p, []))
    )
    assert np.allclose(found[[3, 9, 11, 40]], 0.25)


def test_sampling_follows_the_distribution() -> None:
    raw = make_logits(1, 1.5)
    for p in (SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.7)):
        expected = oracle(raw, p)
        draws = [one(raw, Row(Rules.of(p), 0, i)).token for i in range(6_000)]
        found = np.bincount(draws, minlength=VOCAB) / len(draws)
        assert np.abs(found - expected).max() < 0.02
        assert not found[expected == 0].any()


@pytest.mark.parametrize("size", [5, 63, 64, 65, 130, 49152])
def test_vocabularies_of_any_size_are_drawn_from_whole(size: int) -> None:
    raw = np.full(size, -50.0, np.float32)
    raw[-1] = 5.0
    assert one(raw, Row(Rules.of(SamplingParams()), 0, 0)).token == size - 1
    raw[-1], raw[0] = -50.0, 5.0
    assert one(raw, Row(Rules.of(SamplingParams()), 0, 0)).token == 0


def test_a_token_depends_on_seed_choice_and_position_only() -> None:
    logits = np.stack([make_logits(i, 1.0) for i in range(8)])
    p = SamplingParams(seed=-7, top_p=0.9, temperature=1.3)
    rows = [Row(Rules.of(p), choice=i % 3, position=i) for i in range(8)]
    together = sample(logits, rows)
    for i in reversed(range(8)):
        assert sample(logits[i : i + 1], rows[i : i + 1]) == [together[i]]
    others = {uniform(seed, c, i) for seed in (1, 2) for c in (0, 1) for i in (0, 1)}
    assert len(others) == 8


def test_philox_equals_numpys() -> None:
    for counter, key in [((5, 3, 0, 0), (7, 0)), ((1, 2, 3, 4), (2**64 - 1, 6))]:
        before = np.array([counter[0] - 1, *counter[1:]], dtype=np.uint64)
        theirs = np.random.Philox(counter=before, key=np.array(key, dtype=np.uint64))
        assert philox(counter, key) == tuple(int(w) for w in theirs.random_raw(4))
    mean = sum(uniform(1, 0, i) for i in range(4000)) / 4000
    assert abs(mean - 0.5) < 0.02
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0) != uniform(1, 0, 0)


def test_reported_scores_put_the_token_first_and_rank_the_rest() -> None:
    raw = np.array([0.0, 3.0, 1.0, 3.0, -1.0], np.float32)
    scores = prompt_scores(raw, 4, Rules.of(SamplingParams()), 3)
    assert scores.token_ids == (4, 1, 3, 2)
    assert scores.ranks == (5, 1, 1, 3)
    assert scores.logprobs[1] == scores.logprobs[2] > scores.logprobs[3] > scores.logprobs[0]
    inside = prompt_scores(raw, 3, Rules.of(SamplingParams()), 3)
    assert inside.token_ids == (3, 1, 2) and inside.ranks == (1, 1, 3)
    alone = prompt_scores(raw, 2, Rules.of(SamplingParams()), 0)
    assert alone.token_ids == (2,) and alone.ranks == (3,)


def test_dropped_tokens_are_minus_infinity_and_rank_last() -> None:
    raw = np.array([4.0, 3.0, 2.0, 1.0, 0.0], np.float32)
    scores = prompt_scores(raw, 3, Rules.of(SamplingParams(top_k=2)), 4)
    assert scores.token_ids == (3, 0, 1, 2)
    assert scores.logprobs[0] == scores.logprobs[3] == -math.inf
    assert scores.ranks == (3, 1, 2, 3)
    assert sum(math.exp(v) for v in scores.logprobs) == pytest.approx(1)


def test_masked_alternatives_fill_up_the_list() -> None:
    raw = np.arange(5, dtype=np.float32)
    p = SamplingParams(temperature=0, allowed_token_ids=(1, 2))
    scores = one(raw, Row(Rules.of(p, num_logprobs=4), 0, 0)).scores
    assert scores is not None
    assert scores.token_ids == (2, 1, 0, 3)
    assert scores.logprobs[2:] == (-math.inf, -math.inf) and scores.ranks == (1, 2, 3, 3)


def test_raw_logprobs_are_the_models_own() -> None:
    raw = make_logits(5, 2.0)
    p = SamplingParams(temperature=0.1, top_k=3, logit_bias=((7, 50.0),))
    row = Row(Rules.of(p, num_logprobs=2, raw_logprobs=True), 0, 0)
    result = one(raw, row)
    assert result.token == 7 and result.scores is not None
    exact = raw.astype(np.float64) - np.log(np.exp(raw.astype(np.float64)).sum())
    assert result.logprob == pytest.approx(exact[7], abs=1e-5)
    assert result.scores.logprobs[1] == pytest.approx(exact.max(), abs=1e-5)


def test_a_greedy_report_ignores_temperature_and_truncation() -> None:
    raw = make_logits(5, 2.0)
    p = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1)
    found = distribution(raw, Row(Rules.of(p, num_logprobs=VOCAB), 0, 0))
    assert np.allclose(found, oracle(raw, SamplingParams()), atol=1e-6)


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_the_greedy_token_with_finite_logprobs(temperature: float) -> None:
    raw = make_logits(3, 3.0)
    raw[17] = 30.0
    p = SamplingParams(temperature=temperature, seed=1, top_k=50)
    for position in range(50):
        result = one(raw, Row(Rules.of(p, num_logprobs=1), 0, position))
        assert result.token == 17
        assert result.logprob is not None and math.isfinite(result.logprob)


def test_top_k_off_keeps_every_token() -> None:
    raw = make_logits(1, 0.5)
    draws = {
        one(raw, Row(Rules.of(SamplingParams(temperature=1.5)), 0, i)).token for i in range(99)
    }
    assert len(draws) > 30


def test_no_probability_is_computed_when_nobody_needs_it() -> None:
    raw = make_logits(1, 0.5)
    assert one(raw, Row(Rules.of(SamplingParams(n=2, best_of=2)), 0, 0)).logprob is None
    ranked = one(raw, Row(Rules.of(SamplingParams(n=1, best_of=2)), 0, 0))
    assert ranked.logprob is not None and ranked.scores is None


def test_min_tokens_gives_way_when_only_a_stop_is_left() -> None:
    raw = make_logits(1, 0.5)
    mask = np.zeros(VOCAB, np.bool_)
    mask[11] = True
    rules = Rules.of(SamplingParams(temperature=0), stop_ids=(11,), min_tokens=4)
    assert one(raw, Row(rules, 0, 0, None, mask)).token == 11


def test_a_row_fails_alone() -> None:
    logits = np.stack([make_logits(i, 1.0) for i in range(4)])
    logits[1, 5] = np.nan
    logits[2, 5] = np.nan
    plain, drawn = Rules.of(SamplingParams(temperature=0)), Rules.of(SamplingParams())
    forbidden = Row(drawn, 0, 0, None, np.zeros(VOCAB, np.bool_))
    results = sample(logits, [Row(plain, 0, 0), Row(plain, 0, 0), Row(drawn, 0, 0), forbidden])
    assert isinstance(results[0], Sampled)
    assert isinstance(results[1], errors.Internal) and isinstance(results[2], errors.Internal)
    assert isinstance(results[3], errors.InvalidArgument)


def test_the_logits_of_the_runner_are_left_alone() -> None:
    raw = make_logits(1, 1.0)
    before = raw.copy()
    p = SamplingParams(temperature=0.5, top_p=0.5, logit_bias=((1, 3.0),), presence_penalty=1)
    one(raw, Row(Rules.of(p, num_logprobs=3), 0, 0, Penalties(p, [1, 2])))
    assert (raw == before).all()


def test_candidates_of_a_beam_come_best_first() -> None:
    raw = make_logits(1, 2.0)
    p = SamplingParams(temperature=0, best_of=2, use_beam_search=True)
    found = candidates(raw, Row(Rules.of(p), 0, 0), 4)
    exact = np.log(oracle(raw, SamplingParams()))
    assert [s.token for s in found] == sorted(range(VOCAB), key=lambda t: (-raw[t], t))[:4]
    assert found[0].logprob == pytest.approx(exact.max(), abs=1e-5)
