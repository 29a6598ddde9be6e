"""The engine on the default model: sense, batches, prefixes, constraints, text that is what its tokens say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.types import (
    Constraint,
    OutputOptions,
    Request,
    Resumed,
    SamplingParams,
    StoppingParams,
)
from engine.runners import open_runner
from tests.fakes.engine import Outcome, Ticks, drive
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module")
def engine(model_path: Path, codec: Codec) -> Iterator[Engine]:
    runner = open_runner(
        "llamacpp",
        str(model_path),
        max_rows=8,
        kv_tokens=2048,
        max_batch_tokens=128,
        max_model_len=1024,
        threads=2,
    )
    yield Engine(runner, codec, slots=4, token_budget=128, mixed_budget=32, clock=Ticks())
    runner.close()


def chat(codec: Codec, words: str) -> tuple[int, ...]:
    """A user's turn as the model's template writes it."""
    text = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(codec.encode(text, add_special_tokens=False))


def ask(codec: Codec, words: str, key: int = 1, *, max_tokens: int = 24, **fields: Any) -> Request:
    stopping = StoppingParams(max_tokens, stop=fields.pop("stop", ()))
    output = OutputOptions(logprobs=fields.pop("logprobs", None))
    resumed = fields.pop("resumed", ())
    sampling = SamplingParams(**{"temperature": 0.0, **fields})
    return Request(key, chat(codec, words), "", sampling, stopping, output, resumed=resumed)


def run(engine: Engine, *requests: Request) -> dict[int, Outcome]:
    for request in requests:
        engine.submit(request)
    return drive(engine)


def test_two_greedy_answers_in_one_batch_make_sense(engine: Engine, codec: Codec) -> None:
    got = run(
        engine,
        ask(codec, "What is the capital of France?", 1),
        ask(codec, "What color is the sky on a clear day?", 2),
    )
    assert "Paris" in got[1].text() and "blue" in got[2].text().lower()
    for outcome in got.values():
        assert outcome.text() == codec.decode(outcome.tokens(), skip_special_tokens=True)


def test_a_repeated_question_starts_from_the_cache_and_answers_the_same(
    engine: Engine, codec: Codec
) -> None:
    first = run(engine, ask(codec, "Name three rivers.", 1))[1]
    second = run(engine, ask(codec, "Name three rivers.", 2))[2]
    assert second.finished.num_cached_tokens == second.finished.num_prompt_tokens - 1
    assert second.text() == first.text()


def test_many_choices_of_one_prompt_follow_their_seed(engine: Engine, codec: Codec) -> None:
    asked = ask(codec, "Tell me a story.", n=3, best_of=3, temperature=1.0, seed=11, max_tokens=10)
    first = run(engine, asked)[1]
    assert len({first.text(c) for c in range(3)}) == 3
    for c in range(3):
        assert first.text(c) == codec.decode(first.tokens(c), skip_special_tokens=True)


def test_a_stop_string_is_cut_and_what_stands_before_it_is_the_unstopped_text(
    engine: Engine, codec: Codec
) -> None:
    # Twice, so that the runs that are compared both start from the cached prompt: llama.cpp's numbers
    # depend on how many tokens are computed together, and near-ties of two logits can fall the other way.
    words = "Describe a river in a few sentences."
    for key in (1, 2):
        got = run(engine, ask(codec, words, key, max_tokens=40))[key]
    free = got.text()
    word = free.split()[12]
    stopped = run(engine, ask(codec, words, 3, max_tokens=40, stop=(word,)))[3]
    assert stopped.reason() == ("stop", word)
    assert stopped.text() == free[: free.index(word)]


def test_an_answer_goes_on_where_it_was_cut(engine: Engine, codec: Codec) -> None:
    whole = run(engine, ask(codec, "What is the capital of France?", 1))[1]
    tokens = tuple(whole.tokens())
    rest = run(
        engine, ask(codec, "What is the capital of France?", 2, resumed=(Resumed(0, tokens[:4]),))
    )[2]
    assert [t for d in rest.deltas for t in d.token_ids] == list(tokens[4:])


def test_bytes_of_the_tokens_are_the_text(engine: Engine, codec: Codec) -> None:
    got = run(engine, ask(codec, "Answer using emoji only: a cat", 1, logprobs=3))[1]
    skipped = codec.special_ids
    data = b"".join(codec.piece(t) for t in got.tokens() if t not in skipped)
    assert data.decode(errors="replace") == got.text()
    for scores in got.scores():
        assert all(value <= 0 for value in scores.logprobs) and scores.ranks[0] == 1


def test_a_schema_is_obeyed(engine: Engine, codec: Codec) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["capital", "big"],
        "additionalProperties": False,
    }
    constraint = Constraint("json_schema", json.dumps(schema))
    grammars = Grammars(codec, codec.vocab_size)
    request = Request(
        1,
        chat(codec, "What is the capital of France? Answer in JSON."),
        sampling=SamplingParams(temperature=0),
        stopping=StoppingParams(60),
        constraint=constraint,
    )
    engine.submit(request, grammars.compile(constraint))
    got = drive(engine)[1]
    assert got.reason()[0] == "stop"
    assert json.loads(got.text())["capital"] in ("Paris", "Rome")
