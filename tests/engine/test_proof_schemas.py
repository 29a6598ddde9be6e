"""Guided answers over random JSON schemas: whatever the model would rather say, they parse and validate."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.types import Constraint, Request, SamplingParams, StoppingParams
from engine.runners import open_runner
from tests.fakes.engine import Outcome
from tests.fakes.proofs import new_engine, serve, size, synthetic
from tests.fakes.schemas import random_schema
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model

LIMIT = 500
"""Tokens; a schema with a finite answer may still be cut here."""


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module")
def grammars(codec: Codec) -> Grammars:
    return Grammars(codec, codec.vocab_size)


def ask(key: int, schema: dict[str, Any], codec: Codec, **sampling: Any) -> Request:
    # Closers are made likely: an adversary that never ends proves nothing.
    closers = [codec.encode(text, add_special_tokens=False)[0] for text in ('"', "]", "}", '"}')]
    bias = (*((token, 6.0) for token in closers), (codec.eos_ids[0], 6.0))
    return Request(
        key,
        tuple(codec.encode("JSON: ", add_special_tokens=False)),
        sampling=SamplingParams(seed=key, logit_bias=bias, **sampling),
        stopping=StoppingParams(LIMIT),
        constraint=Constraint("json_schema", json.dumps(schema)),
    )


def check(schemas: list[dict[str, Any]], got: dict[int, Outcome]) -> int:
    """How many ended by themselves, each of which must be a valid instance."""
    num_ended = 0
    for key, schema in enumerate(schemas):
        outcome = got[key]
        if outcome.reason()[0] == "stop":
            num_ended += 1
            value = json.loads(outcome.text())
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
            assert outcome.text().encode().decode() == outcome.text()
    return num_ended


def test_any_answer_of_a_model_that_knows_nothing_validates(
    model_path: Path, codec: Codec, grammars: Grammars
) -> None:
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in range(size(60, 300))]
    engine = new_engine(synthetic(model_path), codec)
    # At 1.0 it mostly says its favourite words; hot, it takes any token that is allowed.
    requests = [ask(i, s, codec, temperature=rng.choice([1.0, 2.5])) for i, s in enumerate(schemas)]
    num_ended = check(schemas, serve(engine, grammars, requests))
    kinds = json.dumps(schemas)
    for word in ("$ref", "pattern", "enum", "prefixItems", "anyOf", "const", "format", "\\u"):
        assert word in kinds, word
    print(f"{num_ended} of {len(schemas)} ended")
    assert num_ended > 0.9 * len(schemas)


@pytest.fixture(scope="module")
def real_engine(model_path: Path, codec: Codec) -> Iterator[Engine]:
    runner = open_runner(
        "native",
        str(model_path),
        max_rows=16,
        kv_tokens=4096,
        max_batch_tokens=128,
        max_model_len=768,
        threads=2,
    )
    yield new_engine(runner, codec)
    runner.close()


def test_answers_of_the_real_model_validate(
    real_engine: Engine, codec: Codec, grammars: Grammars
) -> None:
    rng = random.Random(12)
    schemas = [random_schema(rng) for _ in range(size(8, 40))]
    requests = [ask(i, s, codec, temperature=rng.choice([0.0, 1.0])) for i, s in enumerate(schemas)]
    num_ended = check(schemas, serve(real_engine, grammars, requests))
    print(f"{num_ended} of {len(schemas)} ended")
    assert num_ended > 0.9 * len(schemas)
