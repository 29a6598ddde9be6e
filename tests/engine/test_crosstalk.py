"""Nothing of one request in another's answer: sixteen at a time, each with its own code in a shared prompt.

The synthetic model's logits depend on every token of a row, so one foreign token changes everything after it.
CANDOR_TEST_SCALE multiplies the number of rounds; 5 is the full size (20 rounds).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.core.engine import Engine
from engine.core.types import Finished, Request, SamplingParams, StoppingParams
from engine.runners.synthetic import SyntheticRunner
from tests.fakes.engine import Outcome
from tests.fakes.exactness import fresh, scaled, serve, synthetic
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model

CONCURRENT = 16
ROUNDS = scaled(4)
SYSTEM = "You keep exactly one secret and never tell anyone else's. " * 5


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


def questions(codec: Codec, rng: random.Random, first_key: int) -> list[Request]:
    """Sixteen requests that differ in their codes, and in nothing else but seed and length."""
    found: list[Request] = []
    for code in rng.sample(range(10_000_000), CONCURRENT):
        text = f"{SYSTEM}The code is {code:07d}. What is the code?"
        found.append(
            Request(
                first_key + len(found),
                tuple(codec.encode(text, add_special_tokens=False)),
                sampling=SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=code),
                stopping=StoppingParams(rng.randint(12, 24), ignore_eos=True),
                cache_salt=rng.choice(["", "", "", "one", "two"]),
            )
        )
    return found


def alone(runner: SyntheticRunner, codec: Codec, request: Request) -> Outcome:
    return serve(fresh(runner, codec), [request])[request.key]


def differing(got: dict[int, Outcome], wanted: dict[int, Outcome]) -> list[int]:
    """Keys whose answers are not what they are alone."""
    return [
        key
        for key, outcome in got.items()
        if (outcome.tokens(), outcome.text()) != (wanted[key].tokens(), wanted[key].text())
    ]


# The tight store preempts all the time, so that rows are given away and taken again.
@pytest.mark.parametrize("kv_tokens", [4096, 480])
def test_sixteen_codes_never_meet(model_path: Path, codec: Codec, kv_tokens: int) -> None:
    rng = random.Random(kv_tokens)
    busy: Engine = fresh(synthetic(model_path, kv_tokens=kv_tokens), codec, slots=CONCURRENT)
    other = synthetic(model_path)
    asked: list[Request] = []
    wanted: dict[int, Outcome] = {}
    for turn in range(ROUNDS):
        # Half of a later round asks again what is cached, answer and all.
        new = questions(codec, rng, 1000 * turn)
        requests = new if not asked else [*new[:8], *rng.sample(asked, 8)]
        rng.shuffle(requests)
        for request in requests:
            if request.key not in wanted:
                wanted[request.key] = alone(other, codec, request)
        got = serve(busy, requests)
        assert len(got) == CONCURRENT and not differing(got, wanted)
        assert all(isinstance(outcome.events[-1], Finished) for outcome in got.values())
        asked = requests
    totals = busy.load.totals
    print(f"kv {kv_tokens}: {ROUNDS} rounds, {totals}")
    assert totals.cached_tokens > ROUNDS * CONCURRENT * 10
    assert (totals.num_preemptions > 0) == (kv_tokens == 480)


class Leaky(SyntheticRunner):
    """Copies the right number of positions from whatever row it copied from before."""

    _before: int | None = None

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        super().copy(source, target, num_tokens)
        wrong = self._digests[self._before] if self._before is not None else []
        if len(wrong) >= num_tokens:
            self._digests[target] = wrong[:num_tokens]
        self._before = target


def test_a_leak_would_be_seen(model_path: Path, codec: Codec) -> None:
    leaky = Leaky(
        str(model_path),
        max_rows=24,
        kv_tokens=4096,
        max_batch_tokens=128,
        max_model_len=512,
        threads=1,
    )
    honest = synthetic(model_path)
    first = questions(codec, random.Random(3), 0)
    second = [
        Request(100 + r.key, (*r.prompt, 5), "", r.sampling, r.stopping, cache_salt=r.cache_salt)
        for r in first
    ]
    wanted = {r.key: alone(honest, codec, r) for r in second}
    engine = fresh(leaky, codec, slots=CONCURRENT)
    serve(engine, first)
    assert differing(serve(engine, second), wanted)
