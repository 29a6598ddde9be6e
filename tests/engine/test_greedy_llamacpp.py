"""Greedy answers of the engine on llama.cpp are llama.cpp's own, one sequence at a time.

The other side of the comparison is the shortest loop there is: the whole prompt in one pass, the most likely
token, again. llama.cpp's numbers depend slightly on how many tokens are computed together, so where its two
best logits are nearly equal either may be chosen; such an end of the comparison is counted and told.
CANDOR_TEST_SCALE multiplies the number of prompts; 4.2 is the full size (50).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from engine.core.types import Request, SamplingParams, StoppingParams
from engine.runners import StepInput
from engine.runners.llamacpp import LlamaCppRunner
from tests.fakes.exactness import fresh, scaled, serve
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model

NUM_TOKENS = 24
NEAR = 0.3
"""Logits closer than this may change places."""
TASKS = (
    "What is {}?",
    "Write one sentence about {}.",
    "List three facts about {}:",
    "Explain {} to a child, in simple words.",
    "Why do people care about {}? Think of history, of money and of daily life, and be brief.",
)
THINGS = (
    "rain",
    "the Roman Empire",
    "chess",
    "bread",
    "gravity",
    "a violin",
    "trains in Japan",
    "the number π",
    "volcanoes",
    "sleep",
)
PROMPTS = [task.format(thing) for thing in THINGS for task in TASKS][: scaled(12)]


class Choice(NamedTuple):
    """A token, and what was nearly chosen in its place."""

    token: int
    second: int
    distance: float


def open_llamacpp(model_path: Path) -> LlamaCppRunner:
    return LlamaCppRunner(
        str(model_path),
        max_rows=4,
        kv_tokens=1024,
        max_batch_tokens=256,
        max_model_len=512,
        threads=1,  # two wait for each other where the machine has other things to do
    )


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module")
def served(model_path: Path) -> Iterator[LlamaCppRunner]:
    runner = open_llamacpp(model_path)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[LlamaCppRunner]:
    runner = open_llamacpp(model_path)
    yield runner
    runner.close()


def greedy(runner: LlamaCppRunner, prompt: list[int], eos_ids: tuple[int, ...]) -> list[Choice]:
    """The most likely tokens behind a prompt, up to an end of sequence."""
    runner.trim(0, 0)
    found: list[Choice] = []
    known, start = prompt, 0
    while True:
        size = len(known)
        wants = np.zeros(size, np.bool_)
        wants[-1] = True
        positions = np.arange(start, start + size, dtype=np.int32)
        step = StepInput(np.array(known, np.int32), positions, np.zeros(size, np.int32), wants)
        logits = runner.forward(step)[0]
        second, first = np.argsort(logits, kind="stable")[-2:].tolist()
        found.append(Choice(first, second, float(logits[first] - logits[second])))
        if len(found) == NUM_TOKENS or first in eos_ids:
            return found
        known, start = [first], start + size


def test_greedy_text_is_llamacpps_own(
    served: LlamaCppRunner, plain: LlamaCppRunner, codec: Codec
) -> None:
    engine = fresh(served, codec, slots=1, token_budget=256)
    num_equal = num_compared = 0
    excused: list[str] = []
    for key, words in enumerate(PROMPTS):
        text = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
        prompt = codec.encode(text, add_special_tokens=False)
        request = Request(
            key,
            tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(NUM_TOKENS),
        )
        got = serve(engine, [request])[key].tokens()
        wanted = greedy(plain, prompt, tuple(codec.eos_ids))
        parted = [i for i, choice in enumerate(wanted) if got[i : i + 1] != [choice.token]]
        if not parted:
            assert len(got) == len(wanted), words
            num_equal += 1
            num_compared += len(got)
            continue
        at = parted[0]
        where = f"{words!r} parts at {at} by {wanted[at].distance:.3f}"
        assert got[at : at + 1] == [wanted[at].second] and wanted[at].distance < NEAR, where
        num_compared += at
        excused.append(where)
    print(f"{len(PROMPTS)} prompts: {num_equal} equal, {num_compared} tokens; near ties: {excused}")
    assert num_equal >= 0.7 * len(PROMPTS), excused
