"""Sixteen secrets at a time behind one shared prefix: nobody ever hears another's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.engine import Engine
from engine.core.types import Request, SamplingParams, StoppingParams
from engine.runners import Runner, open_runner
from tests.fakes.engine import Outcome, drive
from tests.fakes.proofs import new_engine, size
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model

SYSTEM = "<|im_start|>system\nYou repeat codes exactly.<|im_end|>\n<|im_start|>user\n"
ASKED = "My code is {0}. Say the code.<|im_end|>\n<|im_start|>assistant\nYour code is {1}"
CONCURRENT = 16


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module", params=["native", "llamacpp"])
def runner(request: pytest.FixtureRequest, model_path: Path) -> Iterator[Runner]:
    made = open_runner(
        request.param,
        str(model_path),
        max_rows=2 * CONCURRENT,
        kv_tokens=2048,
        max_batch_tokens=128,
        max_model_len=128,
        threads=2,
    )
    yield made
    made.close()


def ask(key: int, code: str, codec: Codec) -> Request:
    text = SYSTEM + ASKED.format(code, code[:2])
    return Request(
        key,
        tuple(codec.encode(text, add_special_tokens=False)),
        sampling=SamplingParams(temperature=0.0 if key % 2 else 0.3, seed=key),
        stopping=StoppingParams(6),
    )


def test_no_answer_shows_the_code_of_another(runner: Runner, codec: Codec) -> None:
    rng = random.Random(3)
    engine = new_engine(runner, codec, slots=CONCURRENT)
    rounds = size(2, 20)
    num_right = 0
    for _ in range(rounds):
        # Digits are tokens of their own, so that prompts part in the middle of their codes.
        codes = [f"{number:06d}" for number in rng.sample(range(10**6), CONCURRENT)]
        got = one_round(engine, codes, codec)
        for key, code in enumerate(codes):
            said = code[:2] + got[key].text()
            others = {other for other in codes if other != code and other in said}
            assert not others, f"asked for {code}, heard {said!r}"
            num_right += code in said
    cached = engine.totals.cached_tokens
    print(f"{num_right} of {rounds * CONCURRENT} codes said; {cached} prompt tokens cached")
    # The test could not fail if nobody said codes, or if nothing was shared.
    assert num_right > 0.5 * rounds * CONCURRENT
    assert cached > 10 * (CONCURRENT - 1) * rounds


def one_round(engine: Engine, codes: list[str], codec: Codec) -> dict[int, Outcome]:
    for key, code in enumerate(codes):
        engine.submit(ask(key, code, codec))
    return drive(engine)
