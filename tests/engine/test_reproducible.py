"""Same seed, same answer: alone, in a batch, preempted on the way, resumed from any position elsewhere.

"The same" is tokens, text, scores and endings, not nearly but exactly. CANDOR_TEST_SCALE multiplies the number
of cuts that answers are resumed from; 5 is the full size (100 on the synthetic model).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.guided import Grammars
from engine.core.types import (
    ChoiceEnd,
    Constraint,
    OutputOptions,
    Request,
    Resumed,
    SamplingParams,
    StoppingParams,
    TokenScores,
)
from engine.runners import Runner
from engine.runners.native import NativeRunner
from tests.fakes.engine import Outcome
from tests.fakes.exactness import fresh, scaled, serve, synthetic
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model

CUTS = scaled(20)
NATIVE_CUTS = scaled(3)
WORDS = "Once upon a time there was a river that nobody had ever crossed. Tell me about it, please."


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module")
def grammars(codec: Codec) -> Grammars:
    return Grammars(codec, codec.vocab_size)


@pytest.fixture(scope="module")
def native(model_path: Path) -> Iterator[Runner]:
    runner = NativeRunner(
        str(model_path),
        max_rows=16,
        kv_tokens=2048,
        max_batch_tokens=128,
        max_model_len=512,
        threads=2,
    )
    yield runner
    runner.close()


def asked(codec: Codec, name: str, *, max_tokens: int = 40, stop: tuple[str, ...] = ()) -> Request:
    """The request of a name: each has something that must be carried over from token to token."""
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 1234, "n": 1}
    output: dict[str, Any] = {}
    stopping: dict[str, Any] = {"ignore_eos": name not in ("regex", "json")}
    constraint = None
    match name:
        case "greedy":
            sampling["temperature"] = 0.0
        case "penalties":
            sampling |= {
                "presence_penalty": 0.7,
                "frequency_penalty": 0.9,
                "repetition_penalty": 1.3,
                "top_p": 0.95,
            }
        case "logprobs":
            output["logprobs"] = 5
            sampling |= {"top_k": 50, "min_p": 0.01}
        case "raw logprobs":
            output |= {"logprobs": 2, "raw_logprobs": True}
            sampling["frequency_penalty"] = 1.0
        case "two":
            sampling |= {"n": 2, "presence_penalty": 0.5}
            output["logprobs"] = 1
        case "stop":
            stopping["stop"] = stop
            output["logprobs"] = 0
        case "regex":
            constraint = Constraint("regex", "( ?[A-Za-z]{2,9},){6} (ünd|and) [a-z]{3,7}[.]")
            output["logprobs"] = 0
        case "json":
            schema = (
                '{"type":"array","items":{"enum":["ä","bee","日本"]},"minItems":10,"maxItems":20}'
            )
            constraint = Constraint("json_schema", schema)
            sampling["n"] = 2
    return Request(
        1,
        tuple(codec.encode(WORDS, add_special_tokens=False)),
        sampling=SamplingParams(best_of=sampling["n"], **sampling),
        stopping=StoppingParams(max_tokens, **stopping),
        output=OutputOptions(**output),
        constraint=constraint,
    )


NAMES = ("greedy", "penalties", "logprobs", "raw logprobs", "two", "stop", "regex", "json")


class Reference:
    """A runner's answers when nothing else is there."""

    def __init__(self, runner: Runner, codec: Codec, grammars: Grammars) -> None:
        self.runner, self.codec, self.grammars = runner, codec, grammars

    def alone(self, request: Request, **engine: int) -> Outcome:
        return serve(fresh(self.runner, self.codec, **engine), [request], self.grammars)[
            request.key
        ]

    def request(self, name: str, max_tokens: int = 40) -> Request:
        """The named request; the stop string of "stop" is one that its answer comes to, in two tokens."""
        made = asked(self.codec, name, max_tokens=max_tokens)
        if name != "stop":
            return made
        free = self.alone(replace(made, output=OutputOptions()))
        pieces = [delta.text for delta in free.deltas]
        at = len(pieces) * 2 // 3
        word = pieces[at][-2:] + pieces[at + 1][:2]
        assert word in free.text()
        # The second one is only begun, again and again, so that text is held back.
        return asked(self.codec, name, max_tokens=max_tokens, stop=(word, pieces[3] + "\x00"))


@pytest.fixture(scope="module")
def reference(model_path: Path, codec: Codec, grammars: Grammars) -> Reference:
    return Reference(synthetic(model_path), codec, grammars)


def noise(codec: Codec, count: int, rng: random.Random, **stopping: Any) -> list[Request]:
    """Others in the batch; half of them begin as the request does."""
    prompt = codec.encode(WORDS, add_special_tokens=False)
    return [
        Request(
            1000 + i,
            tuple(
                prompt[: rng.randint(0, len(prompt)) * (i % 2)]
                + rng.choices(range(100, 20_000), k=rng.randint(5, 60))
            ),
            sampling=SamplingParams(temperature=rng.choice([0.0, 1.5]), seed=rng.randint(0, 99)),
            stopping=StoppingParams(rng.randint(20, 80), ignore_eos=True, **stopping),
        )
        for i in range(count)
    ]


Said = tuple[list[int], str, list[TokenScores], ChoiceEnd | None]


def said(outcome: Outcome, choice: int) -> Said:
    """All of a choice."""
    deltas = outcome.of(choice)
    tokens = [t for d in deltas for t in d.token_ids]
    return tokens, outcome.text(choice), outcome.scores(choice), deltas[-1].end if deltas else None


def assert_same(got: Outcome, wanted: Outcome, request: Request) -> None:
    assert got.finished.num_generated_tokens == wanted.finished.num_generated_tokens
    for choice in range(request.sampling.n):
        got.tokens(choice)  # whose offsets must fit
        assert said(got, choice) == said(wanted, choice)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_eight_changes_nothing(reference: Reference, name: str) -> None:
    request = reference.request(name)
    wanted = reference.alone(request)
    for seed in range(3):
        others = noise(reference.codec, 7, random.Random(seed))
        engine = fresh(reference.runner, reference.codec, slots=8, token_budget=48)
        got = serve(engine, [*others[:4], request, *others[4:]], reference.grammars)
        assert_same(got[1], wanted, request)


@pytest.mark.parametrize("name", NAMES)
def test_preemption_changes_nothing(model_path: Path, reference: Reference, name: str) -> None:
    request = reference.request(name)
    wanted = reference.alone(request)
    rng = random.Random(name)
    old = [replace(r, prompt=r.prompt[:40]) for r in noise(reference.codec, 4, rng, min_tokens=20)]
    tight = synthetic(model_path, kv_tokens=200, max_model_len=180)
    engine = fresh(tight, reference.codec, slots=8)
    # The newest is preempted first, and that is the one that matters.
    got = serve(engine, [*old, request], reference.grammars)
    assert engine.load.totals.num_preemptions > 0
    assert_same(got[1], wanted, request)


def cut(whole: Outcome, request: Request, rng: random.Random) -> tuple[Request, list[int]]:
    """The request as it is when each choice has come so far, and how far that is."""
    resumed, cuts = [], []
    for choice in range(request.sampling.n):
        tokens, _, scores, end = said(whole, choice)
        at = rng.randint(0, len(tokens))
        logprob = sum(s.logprobs[0] for s in scores[:at])
        is_finished = at == len(tokens) and rng.random() < 0.5
        assert end is not None
        resumed.append(Resumed(choice, tuple(tokens[:at]), is_finished, logprob))
        cuts.append(-1 if is_finished else at)
    return replace(request, resumed=tuple(resumed)), cuts


def assert_goes_on(got: Outcome, whole: Outcome, cuts: list[int]) -> None:
    """What is said from the cuts on is what was said from there on before."""
    assert got.finished
    for choice, at in enumerate(cuts):
        if at < 0:
            assert not got.of(choice), "a finished choice has nothing more to say"
            continue
        tokens, text, scores, end = said(whole, choice)
        before = "".join(d.text for d in itertools.islice(whole.of(choice), at))
        more, rest, more_scores, more_end = said(got, choice)
        if at == len(tokens):  # its last delta said the end, and did so after all the tokens
            before = text if not rest else text[: len(text) - len(rest)]
        assert more == tokens[at:] and before + rest == text and more_scores == scores[at:]
        assert got.of(choice)[0].token_offset == at
        assert end is not None and more_end is not None
        assert (more_end.reason, more_end.cause) == (end.reason, end.cause)
        if end.cumulative_logprob is not None and more_scores:
            assert more_end.cumulative_logprob == pytest.approx(end.cumulative_logprob, abs=1e-4)


def test_an_answer_goes_on_from_any_cut_on_another_engine(reference: Reference) -> None:
    rng = random.Random(8)
    whole: dict[str, tuple[Request, Outcome]] = {}
    num_cuts = dict.fromkeys(NAMES, 0)
    for i in range(CUTS):
        name = NAMES[i % len(NAMES)]
        if name not in whole:
            made = reference.request(name)
            whole[name] = made, reference.alone(made)
        request, answer = whole[name]
        resumed, cuts = cut(answer, request, rng)
        # Some go on among others.
        others = noise(reference.codec, rng.choice([0, 0, 5]), rng)
        engine = fresh(reference.runner, reference.codec, token_budget=rng.choice([16, 128]))
        got = serve(engine, [*others, resumed], reference.grammars)[1]
        assert_goes_on(got, answer, cuts)
        num_cuts[name] += 1
    print(f"{CUTS} cuts: {num_cuts}")


def test_the_real_model_says_the_same_to_the_bit(
    native: Runner, codec: Codec, grammars: Grammars
) -> None:
    real = Reference(native, codec, grammars)
    rng = random.Random(5)
    whole: dict[str, tuple[Request, Outcome]] = {}
    for name in ("penalties", "two", "regex"):
        request = real.request(name, max_tokens=16)
        whole[name] = request, real.alone(request)
        others = noise(codec, 7, rng)
        others = [replace(r, stopping=replace(r.stopping, max_tokens=8)) for r in others]
        engine = fresh(native, codec, slots=8)
        got = serve(engine, [*others[:4], request, *others[4:]], grammars)
        assert_same(got[1], whole[name][1], request)
    for i in range(NATIVE_CUTS):
        request, answer = whole[list(whole)[i % len(whole)]]
        resumed, cuts = cut(answer, request, rng)
        assert_goes_on(real.alone(resumed), answer, cuts)
    print(f"native: {len(whole)} answers in batches of 8, {NATIVE_CUTS} cuts")
