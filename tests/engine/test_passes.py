"""Who is embedded together: fair turns, a budget that holds, every text once and in its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candor import errors
from engine.core.passes import Job, Passes, TextLimits, check_inputs

LIMITS = TextLimits(max_inputs=3, max_input_tokens=8, vocab_size=100)


def job(*lengths: int) -> Job:
    """A request with texts of these lengths; the ids tell which text they belong to."""
    inputs = [[index] * length for index, length in enumerate(lengths)]
    return Job(inputs, np.full((len(inputs), 1), np.nan, np.float32))


def compute(passes: Passes) -> list[Job]:
    """One pass, whose vectors are the texts' first ids; what became complete."""
    picks = passes.plan()
    vectors = [[job.inputs[index][0]] for job, index in picks]
    return passes.deliver(picks, np.array(vectors, np.float32).reshape(len(picks), 1))


def test_short_requests_share_a_pass_with_a_long_one_that_came_first() -> None:
    passes = Passes(token_budget=10)
    long, first, second = job(*[2] * 50), job(2), job(2)
    for each in (long, first, second):
        passes.add(each)
    assert compute(passes) == [first, second]
    assert (long.num_done, passes.num_open) == (3, 1)


def test_whose_text_did_not_fit_is_next() -> None:
    passes = Passes(token_budget=10)
    small, large = job(*[3] * 9), job(9)
    passes.add(small)
    passes.add(large)
    assert compute(passes) == [] and small.num_done == 1
    assert compute(passes) == [large] and small.num_done == 1


def test_a_text_above_the_budget_has_a_pass_of_its_own() -> None:
    passes = Passes(token_budget=4)
    mixed = job(9, 1, 1)
    passes.add(mixed)
    assert compute(passes) == [] and mixed.num_done == 1
    assert compute(passes) == [mixed]


def test_who_gave_up_is_in_no_further_pass() -> None:
    passes = Passes(token_budget=4)
    given_up, other = job(4, 4, 4), job(4)
    passes.add(given_up)
    passes.add(other)
    picks = passes.plan()
    passes.drop(given_up)
    passes.drop(given_up)
    assert passes.deliver(picks, np.zeros((1, 1), np.float32)) == []
    assert (passes.num_open, passes.num_tokens) == (1, 4)
    assert compute(passes) == [other]
    assert passes.plan() == [] and passes.num_open == 0


@given(
    st.integers(1, 12),
    st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=9), min_size=1, max_size=6),
)
def test_every_text_is_computed_once_within_the_budget(
    budget: int, lengths: list[list[int]]
) -> None:
    passes = Passes(budget)
    jobs = [job(*each) for each in lengths]
    for each in jobs:
        passes.add(each)
    done: list[Job] = []
    for _ in range(sum(map(len, lengths))):
        before = [each.num_done for each in jobs]
        picks = passes.plan()
        picked = [each.inputs[i] for each, i in picks]
        assert len(picked) == 1 or sum(map(len, picked)) <= budget
        done += passes.deliver(picks, np.array([[ids[0]] for ids in picked], np.float32))
        if not passes.num_open:
            break
        assert sum(each.num_done for each in jobs) == sum(before) + len(picked) > sum(before)
    assert sorted(map(id, done)) == sorted(map(id, jobs))
    for each in jobs:
        assert each.vectors[:, 0].tolist() == list(range(len(each.inputs)))


@pytest.mark.parametrize(
    ("inputs", "field", "words"),
    [
        ([], "inputs", "nothing to embed"),
        ([[1]] * 4, "inputs", "4 inputs, at most 3"),
        ([[1], []], "inputs[1]", "no tokens"),
        ([[1] * 9], "inputs[0]", "9 tokens, the model takes 8"),
        ([[1], [2], [3, 100]], "inputs[2]", "token 100, the vocabulary has 100"),
    ],
)
def test_a_wrong_input_is_named_with_its_limit(
    inputs: list[list[int]], field: str, words: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=words) as caught:
        check_inputs(inputs, LIMITS)
    assert caught.value.field == field


def test_inputs_at_every_limit_pass() -> None:
    check_inputs([[0], [99] * 8, [1]], LIMITS)
