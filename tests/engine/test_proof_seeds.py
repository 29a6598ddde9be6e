"""Same seed, same answer: alone, in company, preempted, with drafts, cut anywhere and resumed elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.guided import Grammars
from engine.core.types import (
    Constraint,
    OutputOptions,
    Request,
    Resumed,
    SamplingParams,
    StoppingParams,
)
from engine.runners import Runner, open_runner
from tests.fakes.engine import Outcome
from tests.fakes.proofs import Smaller, new_engine, serve, size, synthetic
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model

SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 16}, "ages": {"type": '
    '"array", "items": {"type": "integer"}, "maxItems": 3}}, "required": ["name", "ages"]}'
)
TEXT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class World:
    """Two workers of one kind, and their vocabulary."""

    here: Runner
    there: Runner
    codec: Codec
    grammars: Grammars
    kinds: Sequence[Request]


@pytest.fixture(scope="module", params=["synthetic", "native"])
def world(request: pytest.FixtureRequest, model_path: Path) -> Iterator[World]:
    codec = open_codec(model_path)

    def load() -> Runner:
        if request.param == "synthetic":
            return synthetic(model_path)
        return open_runner(
            "native",
            str(model_path),
            max_rows=16,
            kv_tokens=4096,
            max_batch_tokens=128,
            max_model_len=512,
            threads=2,
        )

    here, there = load(), load()
    yield World(here, there, codec, Grammars(codec, here.vocab_size), kinds_of_requests(codec))
    here.close()
    there.close()


def kinds_of_requests(codec: Codec) -> list[Request]:
    """One of each thing that has a memory of what was generated."""

    def ask(key: int, words: str, **fields: Any) -> Request:
        prompt = tuple(codec.encode(TEXT.format(words), add_special_tokens=False))
        parts: dict[str, Any] = {"sampling": SamplingParams(seed=key)}
        return Request(key, prompt, **{**parts, **fields})

    def chosen(key: int, n: int = 1, **fields: Any) -> SamplingParams:
        return SamplingParams(n=n, best_of=n, seed=key, **fields)

    return [
        ask(
            1,
            "What is the capital of France?",
            sampling=chosen(1, temperature=0.0),
            stopping=StoppingParams(24),
            output=OutputOptions(logprobs=5),
        ),
        ask(
            2,
            "Tell me a story about a red fox and a red hen.",
            sampling=chosen(2, temperature=0.9, top_p=0.95, repetition_penalty=1.15),
            stopping=StoppingParams(28, stop=(" the hen", "zzz", ". The")),
            output=OutputOptions(logprobs=0),
        ),
        ask(
            3,
            "List some fruits.",
            sampling=chosen(
                3, n=3, temperature=1.2, top_k=50, presence_penalty=0.8, frequency_penalty=0.3
            ),
            stopping=StoppingParams(16, ignore_eos=True),
        ),
        ask(
            4,
            "Describe a person in JSON.",
            sampling=chosen(4, temperature=1.0),
            stopping=StoppingParams(40),
            output=OutputOptions(logprobs=3),
            constraint=Constraint("json_schema", SCHEMA),
        ),
        ask(
            5,
            "Repeat: red green blue red green blue red green blue red green",
            sampling=chosen(5, n=2, temperature=0.4, min_p=0.02),
            stopping=StoppingParams(24, min_tokens=20),
        ),
        ask(
            6,
            "Write some letters.",
            sampling=chosen(6, temperature=1.0, logit_bias=((198, 4.0), (260, -3.0))),
            stopping=StoppingParams(20, stop_token_ids=(17,)),
            constraint=Constraint("regex", "([a-f]{2,5}[ -]){2,9}end"),
            output=OutputOptions(logprobs=1, raw_logprobs=True),
        ),
        ask(
            7,
            "Say two words again and again.",
            sampling=chosen(7, temperature=0.8, logit_bias=((500, 22.0), (501, 21.0))),
            stopping=StoppingParams(30),
            output=OutputOptions(logprobs=2),
        ),
    ]


def said(outcome: Outcome, n: int) -> list[object]:
    """Everything that a client can see of the choices, to the bit."""
    return [
        (outcome.tokens(c), outcome.text(c), outcome.scores(c), outcome.of(c)[-1].end)
        for c in range(n)
    ]


def alone(world: World, request: Request) -> Outcome:
    engine = new_engine(world.here, world.codec, slots=1, speculates=False)
    return serve(engine, world.grammars, [request])[request.key]


def test_company_preemption_and_drafts_change_nothing(world: World) -> None:
    expected = {r.key: said(alone(world, r), r.sampling.n) for r in world.kinds}
    more = [replace(r, key=r.key + 100, prompt=r.prompt[:-3]) for r in world.kinds[:4]]

    def check(got: dict[int, Outcome], how: str) -> None:
        for r in world.kinds:
            assert said(got[r.key], r.sampling.n) == expected[r.key], (how, r)

    batch = new_engine(world.here, world.codec, slots=8, speculates=False)
    check(serve(batch, world.grammars, [*more, *world.kinds]), "in a batch of 8")
    drafting = new_engine(world.here, world.codec, slots=8)
    check(serve(drafting, world.grammars, [*world.kinds, *more]), "with drafts")
    check(serve(drafting, world.grammars, world.kinds), "from the prefix cache")
    assert drafting.totals.accepted_tokens and drafting.totals.cached_tokens
    longest = max(len(r.prompt) for r in world.kinds) + 41
    small = new_engine(Smaller(world.here, longest + 40, longest), world.codec)
    check(serve(small, world.grammars, world.kinds), "preempted")
    assert small.load.totals.num_preemptions > 5


def test_an_answer_that_was_cut_goes_on_elsewhere_with_the_very_same_tokens(world: World) -> None:
    rng = random.Random(7)
    whole = {r.key: alone(world, r) for r in world.kinds}
    for at in range(size(14, 100)):
        request = world.kinds[at % len(world.kinds)]
        before = whole[request.key]
        # The last token travels with the end: who has heard of it does not ask for more.
        cuts = [rng.randint(0, len(before.tokens(c)) - 1) for c in range(request.sampling.n)]
        resumed = replace(
            request,
            resumed=tuple(
                resumed_at(before, choice, cut) for choice, cut in enumerate(cuts) if cut
            ),
        )
        company = [r for r in world.kinds if r.key != request.key][: rng.randint(0, 3)]
        there = new_engine(world.there, world.codec, speculates=rng.random() < 0.5)
        after = serve(there, world.grammars, [resumed, *company])[request.key]
        for choice, cut in enumerate(cuts):
            check_continuation(before, after, choice, cut)


def resumed_at(whole: Outcome, choice: int, cut: int) -> Resumed:
    """What a scheduler knows of a choice when its worker dies."""
    told = sum(s.logprobs[0] for s in whole.scores(choice)[:cut])
    return Resumed(choice, tuple(whole.tokens(choice)[:cut]), cumulative_logprob=told)


def check_continuation(whole: Outcome, rest: Outcome, choice: int, cut: int) -> None:
    deltas = rest.of(choice)
    tokens = [t for d in deltas for t in d.token_ids]
    assert tokens == whole.tokens(choice)[cut:]
    assert deltas[0].token_offset == cut
    assert rest.scores(choice) == whole.scores(choice)[cut:]
    assert text_of_first(whole, choice, cut) + rest.text(choice) == whole.text(choice)
    assert rest.reason(choice) == whole.reason(choice)
    end, expected = deltas[-1].end, whole.of(choice)[-1].end
    assert end is not None and expected is not None
    assert (end.cumulative_logprob is None) == (expected.cumulative_logprob is None)
    if end.cumulative_logprob is not None:
        assert end.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-9)


def text_of_first(whole: Outcome, choice: int, cut: int) -> str:
    """The text that was out when `cut` tokens were; one token a delta, as nothing was drafted."""
    return "".join(d.text for d in whole.of(choice)[:cut])
