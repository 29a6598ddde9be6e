"""Constraints on a real vocabulary: what is allowed, where an end is, what is refused and how fast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from candor import errors
from engine.core.engine import Engine
from engine.core.guided import MAX_CONSTRAINT_CHARACTERS, Grammars, TokenMatcher
from engine.core.types import Constraint, Request, SamplingParams, StoppingParams
from engine.runners import open_runner
from tests.fakes.engine import Outcome, Ticks, drive
from tokenizer_svc.codec import Codec, open_codec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["ä", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module")
def grammars(codec: Codec) -> Grammars:
    return Grammars(codec, codec.vocab_size)


@pytest.fixture(scope="module")
def engine(model_path: Path, codec: Codec) -> Engine:
    """The synthetic model: words at random, so only the constraint makes sense of them."""
    runner = open_runner(
        "synthetic",
        str(model_path),
        max_rows=8,
        kv_tokens=4096,
        max_batch_tokens=128,
        max_model_len=1024,
        threads=1,
    )
    return Engine(runner, codec, slots=8, token_budget=128, mixed_budget=64, clock=Ticks())


def walk(matcher: TokenMatcher, codec: Codec, text: str) -> TokenMatcher:
    """Take a text token by token; every token must be allowed."""
    for token in codec.encode(text, add_special_tokens=False):
        assert matcher.mask()[token], f"{codec.piece(token)!r} is not allowed in {text!r}"
        matcher.accept(token)
    return matcher


def may_end(matcher: TokenMatcher, codec: Codec) -> bool:
    return bool(matcher.mask()[codec.eos_ids[0]])


def generate(
    engine: Engine, grammars: Grammars, constraint: Constraint, *, key: int = 1, **fields: Any
) -> Outcome:
    sampling = SamplingParams(**{"seed": key, "n": 1, "best_of": fields.get("n", 1), **fields})
    request = Request(
        key, (1, 2, 3), sampling=sampling, stopping=StoppingParams(400), constraint=constraint
    )
    engine.submit(request, grammars.compile(constraint))
    return drive(engine)[key]


def test_an_end_is_allowed_exactly_when_the_text_is_complete(
    codec: Codec, grammars: Grammars
) -> None:
    matcher = grammars.compile(Constraint("regex", "Once upon a time.*"))
    assert not may_end(walk(matcher, codec, "Once upon"), codec)
    assert may_end(walk(matcher, codec, " a time"), codec)
    # Allowed, not forced: the pattern can go on.
    assert matcher.mask().sum() > 1000


def test_a_choice_is_exactly_one_of_the_strings(codec: Codec, grammars: Grammars) -> None:
    choices = ("yes", "yes please", 'quo"te\n', "back\\slash", "ü/é", "a|b")
    compiled = grammars.compile(Constraint("choice", choices=choices))
    for choice in choices:
        assert may_end(walk(compiled.fork(), codec, choice), codec)
    assert not may_end(walk(compiled.fork(), codec, "yes pl"), codec)


@pytest.mark.parametrize("seed", range(6))
def test_a_schema_is_obeyed_by_a_model_that_knows_nothing(
    engine: Engine, grammars: Grammars, seed: int
) -> None:
    constraint = Constraint("json_schema", json.dumps(PERSON))
    got = generate(engine, grammars, constraint, key=seed + 1, temperature=1.5)
    assert got.reason()[0] == "stop"
    value = json.loads(got.text())
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 12 and 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"ä", "b"}


def test_any_object_has_bounded_white_space(codec: Codec, grammars: Grammars) -> None:
    matcher = grammars.compile(Constraint("json_object"))
    assert not matcher.fork().mask()[codec.encode('"', add_special_tokens=False)[0]]
    walk(matcher, codec, '{"a":' + " " * 20)
    assert not matcher.mask()[codec.encode(" ", add_special_tokens=False)[0]]
    assert may_end(
        walk(grammars.compile(Constraint("json_object")), codec, '[1, {"b": null}]'), codec
    )


def test_white_space_follows_its_pattern(codec: Codec, grammars: Grammars) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}})
    loose = grammars.compile(Constraint("json_schema", schema, whitespace_pattern=r"\n{0,3}"))
    assert may_end(walk(loose, codec, "[\n\n1]"), codec)
    tight = grammars.compile(Constraint("json_schema", schema))
    assert not walk(tight, codec, "[").mask()[codec.encode("\n", add_special_tokens=False)[0]]


def test_choices_of_a_request_have_constraints_of_their_own(
    engine: Engine, grammars: Grammars
) -> None:
    constraint = Constraint("regex", "[a-z]{3,9}(, [a-z]{3,9}){0,4}")
    first = generate(engine, grammars, constraint, n=4, temperature=2.0)
    again = generate(engine, grammars, constraint, n=4, temperature=2.0)
    texts = [first.text(c) for c in range(4)]
    assert all(first.reason(c)[0] == "stop" for c in range(4)) and len(set(texts)) > 1
    assert texts == [again.text(c) for c in range(4)]


def test_an_end_as_an_ordinary_token_still_ends_a_complete_constraint(
    engine: Engine, grammars: Grammars
) -> None:
    constraint = Constraint("choice", choices=("one", "two"))
    request = Request(
        1, (5,), stopping=StoppingParams(50, min_tokens=20, ignore_eos=True), constraint=constraint
    )
    engine.submit(request, grammars.compile(constraint))
    got = drive(engine)[1]
    assert got.text() in ("one", "two") and got.reason()[0] == "stop"


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        (Constraint("json_schema", '{"type": "object"'), "constraint.json_schema", "char 17"),
        (Constraint("json_schema", "[1]"), "constraint.json_schema", "object"),
        (Constraint("json_schema", '{"type": "nope"}'), "constraint.json_schema", "nope"),
        (Constraint("regex", "(unclosed"), "constraint.regex", "unclosed group"),
        (Constraint("grammar", "start: missing"), "constraint.grammar", "missing"),
        (Constraint("choice", choices=()), "constraint.choice", "needs strings"),
        (Constraint("choice", choices=("a", "")), "constraint.choice", "needs strings"),
        (
            Constraint("json_schema", '{"type": "object"}', whitespace_pattern="(("),
            "constraint.whitespace_pattern",
            "unclosed",
        ),
        (
            Constraint("json_schema", "1" * (MAX_CONSTRAINT_CHARACTERS + 1)),
            "constraint.json_schema",
            str(MAX_CONSTRAINT_CHARACTERS),
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_place(
    grammars: Grammars, constraint: Constraint, field: str, words: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        grammars.compile(constraint)
    assert caught.value.field == field and words in caught.value.message


@pytest.mark.parametrize("depth", [100, 125, 150, 199, 400])
def test_a_deep_schema_is_compiled_or_refused(grammars: Grammars, depth: int) -> None:
    text = '{"properties":{"a":' * (depth // 2) + "true" + "}}" * (depth // 2)
    try:
        assert grammars.compile(Constraint("json_schema", text)).mask().any()
    except errors.InvalidArgument as error:
        assert depth > 110
        assert error.field == "constraint.json_schema" and "cannot be read" in error.message
    else:
        assert depth < 150


def test_monsters_are_bounded(grammars: Grammars) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        schema = {"type": "object", "properties": {f"p{i}": schema for i in range(2)}}
        if len(json.dumps(schema)) > 200_000:
            break
    for constraint in (
        Constraint("json_schema", json.dumps(schema)),
        Constraint("regex", "((a{1,1000}){1,1000}){1,1000}"),
        Constraint("regex", "(" * 5000 + "a" + ")" * 5000),
    ):
        started = time.process_time()
        try:
            grammars.compile(constraint).mask()
        except errors.InvalidArgument as error:
            assert error.field is not None
        assert time.process_time() - started < 5.0


def test_a_mask_takes_less_than_a_millisecond(codec: Codec, grammars: Grammars) -> None:
    matcher = grammars.compile(Constraint("json_schema", json.dumps(PERSON)))
    spent = []
    for token in codec.encode(
        '{"name":"Ada Byron","age":36,"tags":["b"]}', add_special_tokens=False
    ):
        started = time.thread_time()
        matcher.mask()
        spent.append(time.thread_time() - started)
        matcher.accept(token)
    assert np.median(spent) < 0.001, sorted(spent)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("regex", "a?" * 9000), "has 18000 characters; at most 16384"),
        (Constraint("grammar", "start: A\nA: " + "a" * 40_000), "at most 32768"),
        (
            Constraint("json_schema", json.dumps({"anyOf": [{"pattern": "a?" * 5000}] * 2})),
            "patterns of 20000 characters; at most 16384",
        ),
    ],
    ids=["regex", "grammar", "patterns of a schema"],
)
def test_patterns_that_would_take_minutes_are_refused_by_their_length(
    grammars: Grammars, constraint: Constraint, words: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        grammars.compile(constraint)
