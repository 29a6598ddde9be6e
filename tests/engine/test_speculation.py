"""Drafts change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.speculation import (
    GRAM,
    MOST,
    Acceptance,
    Drafter,
    Lookup,
    Speculator,
    StepCosts,
)
from engine.core.types import (
    Constraint,
    OutputOptions,
    Request,
    Resumed,
    SamplingParams,
    StoppingParams,
)
from tests.fakes.engine import VOCAB, ByteCodec, Outcome, ScriptedRunner, Ticks, drive, noise

FREE = StepCosts([(1, 1.0), (64, 1.0)])
"""Another token costs nothing: every draft pays."""
DEAR = StepCosts([(1, 1.0), (64, 64.0)])
"""Another token costs a step."""


def echo(token_ids: Sequence[int]) -> Any:
    """A voice that often says again what followed its last two tokens before."""
    logits = noise(token_ids)
    ids = list(token_ids)
    for at in range(len(ids) - 1, 1, -1):
        if ids[at - 2 : at] == ids[-2:]:
            logits[ids[at]] += np.float32(9 if sum(ids) % 5 else -9)
            break
    return logits


def engine(runner: ScriptedRunner, costs: StepCosts | None, slots: int = 4) -> Engine:
    return Engine(
        runner,
        ByteCodec(),
        slots=slots,
        token_budget=64,
        mixed_budget=32,
        clock=Ticks(),
        speculator=Speculator(costs) if costs else None,
    )


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """One of everything that has a say in what the next token is."""
    made = []
    for key in range(count):
        n = rng.choice([1, 1, 2])
        made.append(
            Request(
                key,
                tuple(bytes(rng.choices(b"abcd", k=rng.randint(1, 60)))),
                sampling=SamplingParams(
                    n=n,
                    best_of=n,
                    temperature=rng.choice([0, 0.7, 1.3]),
                    top_p=rng.choice([1, 0.9]),
                    top_k=rng.choice([-1, 8]),
                    presence_penalty=rng.choice([0, 0, 1]),
                    frequency_penalty=rng.choice([0, 0, 0.5]),
                    repetition_penalty=rng.choice([1, 1, 1.2]),
                    seed=rng.randint(-9, 9),
                    logit_bias=rng.choice([(), ((98, 3.0),)]),
                ),
                stopping=StoppingParams(
                    rng.randint(1, 80),
                    min_tokens=rng.choice([0, 1]),
                    stop=rng.choice([(), (), ("abcabd",), ("dd", "qq")]),
                    stop_token_ids=rng.choice([(), (ord("z"),)]),
                ),
                output=OutputOptions(logprobs=rng.choice([None, None, 3])),
                constraint=rng.choice(
                    [None, None, Constraint("regex", "([a-d]{3,9} ){1,9}(abcd){0,9}[a-d ]*")]
                ),
            )
        )
    return made


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteCodec(), VOCAB)


def serve(made: Sequence[Request], grammars: Grammars, on: Engine) -> dict[int, Outcome]:
    for request in made:
        matcher = grammars.compile(request.constraint) if request.constraint else None
        on.submit(request, matcher)
    return drive(on)


def said(outcome: Outcome) -> list[object]:
    """Everything but the ledger."""
    ends = {d.choice: d.end for d in outcome.deltas if d.end}
    return [
        (c, outcome.tokens(c), outcome.text(c), outcome.scores(c), ends[c]) for c in sorted(ends)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_the_answer_is_the_same_with_and_without(seed: int, grammars: Grammars) -> None:
    made = random_requests(random.Random(seed), 20)
    plain_runner, runner, tight = (
        ScriptedRunner(echo),
        ScriptedRunner(echo),
        ScriptedRunner(echo, kv_tokens=160, max_rows=6, max_model_len=150),
    )
    plain = serve(made, grammars, engine(plain_runner, None))
    fast_engine, tight_engine = engine(runner, FREE), engine(tight, FREE)
    for other in (serve(made, grammars, fast_engine), serve(made, grammars, tight_engine)):
        for key in plain:
            assert said(other[key]) == said(plain[key]), made[key]
    assert fast_engine.totals.accepted_tokens > 10
    assert runner.num_forwards < plain_runner.num_forwards
    assert tight_engine.load.totals.num_preemptions > 0 < tight_engine.totals.accepted_tokens


@pytest.mark.parametrize("cut", [1, 2, 7, 19, 30])
def test_a_resumed_answer_goes_on_with_the_same_tokens(cut: int) -> None:
    made = Request(
        1,
        tuple(b"abcdabcdab"),
        sampling=SamplingParams(seed=4, temperature=0.7),
        stopping=StoppingParams(40, ignore_eos=True),
    )
    whole = serve([made], None, engine(ScriptedRunner(echo), None))[1]  # type: ignore[arg-type]
    told = tuple(whole.tokens()[:cut])
    rest = dataclasses.replace(made, resumed=(Resumed(0, told),))
    resumed = engine(ScriptedRunner(echo), FREE)
    got = serve([rest], None, resumed)[1]  # type: ignore[arg-type]
    assert [t for d in got.deltas for t in d.token_ids] == whole.tokens()[cut:]


def test_a_step_says_one_delta_with_all_its_tokens() -> None:
    runner = ScriptedRunner(lambda ids: peak_of(ids[0]))
    on = engine(runner, FREE)
    on.submit(
        Request(
            1,
            (97,) * 8,
            sampling=SamplingParams(temperature=0),
            stopping=StoppingParams(40),
            output=OutputOptions(logprobs=1),
        )
    )
    outcome = drive(on)[1]
    assert outcome.text() == "a" * 40 and len(outcome.scores()) == 40
    assert max(len(d.token_ids) for d in outcome.deltas) == MOST + 1
    done = outcome.finished
    assert done.num_accepted_tokens == done.num_draft_tokens == 40 - len(outcome.deltas)
    assert runner.num_forwards == len(outcome.deltas)


def peak_of(token: int) -> Any:
    logits = np.linspace(0.0, -1.0, VOCAB, dtype=np.float32)
    logits[token] = 10
    return logits


def test_wrong_drafts_end_drafting_and_leave_no_kv() -> None:
    def never(ids: Sequence[int]) -> Any:
        # Anything but what stood behind the last three tokens before.
        draft = Lookup().propose(ids, 1)
        logits = noise(ids)
        if draft:
            logits[draft[0]] = -50
        return logits

    costs = StepCosts([(1, 1.0), (2, 1.4), (64, 26.0)])
    runner = ScriptedRunner(never)
    on = engine(runner, costs)
    on.submit(Request(1, tuple(b"abab" * 9), stopping=StoppingParams(400, ignore_eos=True)))
    done = drive(on)[1].finished
    assert done.num_accepted_tokens == 0 and 0 < done.num_draft_tokens < 40
    assert sum(map(len, runner.tokens)) == 36 + 399


def test_a_prompt_that_waits_goes_before_drafts() -> None:
    runner = ScriptedRunner(echo)
    on = engine(runner, FREE)
    on.submit(Request(1, tuple(b"abcd" * 8), stopping=StoppingParams(60, ignore_eos=True)))
    on.step()
    on.submit(Request(2, tuple(b"x" * 200), stopping=StoppingParams(1)))
    for _ in range(6):
        _, stats = on.step()
        assert stats.num_prefill_tokens and not stats.num_draft_tokens
    drive(on)


# --- the parts ---


def test_lookup_finds_the_last_place_and_grows_with_the_text() -> None:
    lookup = Lookup()
    ids = [*b"abcX abcY abc"]
    assert bytes(lookup.propose(ids, 4)) == b"Y ab"
    ids += b"Q ab"
    assert bytes(lookup.propose(ids, 2)) == b"cQ"
    ids += b"Z"
    assert lookup.propose(ids, 4) == [], "abZ was never there"


def test_lookup_goes_on_behind_its_own_end() -> None:
    assert bytes(Lookup().propose([*b"-xyxyx"], 6)) == b"yxyxyx"
    assert Lookup().propose([*b"aa"], 4) == [] and Lookup().propose([*b"aaa"], 4) == []
    assert GRAM == 3


@pytest.mark.parametrize(("num_others", "drafts"), [(0, True), (1, True), (15, False)])
def test_a_full_batch_drafts_less(num_others: int, drafts: bool) -> None:
    # Idle up to 8 tokens, dear beyond.
    costs = StepCosts([(1, 1.0), (8, 1.2), (9, 1.5), (64, 20.0)])
    drafter = Drafter(Lookup(), Acceptance())
    ids = [*b"abcdabcdabc"]
    asked = [(drafter, ids, 99)] + [(Drafter(Lookup(), Acceptance()), [1], 9)] * num_others
    found = Speculator(costs).drafts(asked, 64)
    assert bool(found[0]) is drafts and not any(found[1:])


def test_costs_are_lines_between_what_was_measured_and_never_fall() -> None:
    costs = StepCosts([(4, 2.0), (1, 1.0), (6, 1.5), (8, 4.0)])
    assert [costs(n) for n in (1, 2, 4, 6, 7, 8, 10)] == pytest.approx([1, 4 / 3, 2, 2, 3, 4, 6])


def test_a_request_that_was_switched_off_is_tried_again() -> None:
    acceptance = Acceptance()
    begun = acceptance.chance
    for _ in range(6):
        acceptance.note(4, 0, was_refused=True)
    low = acceptance.chance
    assert low < 0.25 and acceptance.num_drafted == 24
    for _ in range(60):
        acceptance.rest()
    assert low < acceptance.chance <= begun and acceptance.chance > 0.6
    for _ in range(20):
        acceptance.note(4, 4, was_refused=False)
    assert acceptance.chance > 0.95 and acceptance.num_accepted == 80


def test_dear_steps_are_never_spent_on_drafts() -> None:
    runner = ScriptedRunner(echo)
    on = engine(runner, DEAR)
    on.submit(Request(1, tuple(b"abcd" * 8), stopping=StoppingParams(60, ignore_eos=True)))
    assert drive(on)[1].finished.num_draft_tokens == 0
