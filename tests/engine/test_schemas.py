"""Random schemas: whatever path a mask allows ends in JSON that the schema's own validator accepts.

The tokens are chosen at random among the allowed ones, so nothing but the constraint gives them a form.
CANDOR_TEST_SCALE multiplies the number of schemas; 6 is the full size (300).
"""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from numpy.typing import NDArray

from candor import errors
from engine.core.guided import Grammars
from engine.core.types import Constraint
from tests.fakes.exactness import scaled
from tokenizer_svc.codec import Codec, open_codec
from tokenizer_svc.text_stream import TextStream

pytestmark = pytest.mark.model

SCHEMAS = scaled(50)
FREE_TOKENS, MOST_TOKENS = 30, 600
"""From the first on, tokens that close something are taken; nothing may need more than the second."""
NAMES = ("name", "größe", "日本", "a b", 'quo"te', "back\\slash", "new\nline", "😀", "$id_", "")
WORDS = ("red", "ünï", "日本語", "a\tb", 'say "hi"', "😀😀", "", "\\", "/path")
PATTERNS = (
    "^[a-z]{2,5}$",
    "^(0|[1-9][0-9]{0,3})-[A-F]+$",
    "^[äöü]{1,3}$",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^\+?[0-9 ]{3,8}$",
    "^(ja|nein|日本)$",
)


class SchemaMaker:
    """Seeded schemas of a bounded depth."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def document(self) -> dict[str, Any]:
        """A whole schema: an object, an array, or one that refers to itself."""
        kind = self._rng.choice(("object", "object", "array", "recursive", "any_of"))
        made: dict[str, Any] = getattr(self, f"_{kind}")(3)
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}

    def _value(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "pattern", "enum", "const", "integer", "number", "plain"]
        if depth > 0:
            kinds += ["object", "array", "any_of"] * 2
        made: dict[str, Any] = getattr(self, f"_{self._rng.choice(kinds)}")(depth)
        return made

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(1, 4))
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._value(depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
        }
        extra = rng.random()
        if extra < 0.6:
            made["additionalProperties"] = False
        elif extra < 0.8:
            made["additionalProperties"] = self._value(0)
        return made

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        made: dict[str, Any] = {"type": "array", "items": self._value(depth - 1)}
        if rng.random() < 0.3:
            made["prefixItems"] = [self._value(depth - 1) for _ in range(rng.randint(1, 2))]
        made["minItems"] = rng.randint(0, 2)
        made["maxItems"] = made["minItems"] + rng.randint(0, 3)
        return made

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth - 1) for _ in range(self._rng.randint(2, 3))]}

    def _recursive(self, depth: int) -> dict[str, Any]:
        node = {
            "type": "object",
            "properties": {
                "value": self._value(0),
                "kinder": {"type": "array", "items": {"$ref": "#/$defs/n%C3%B6de"}, "maxItems": 2},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n%C3%B6de"}]},
            },
            "required": ["value", self._rng.choice(("kinder", "next"))],
            "additionalProperties": False,
        }
        return {"$defs": {"nöde": node}, **self._rng.choice(({"$ref": "#/$defs/n%C3%B6de"}, node))}

    def _string(self, depth: int) -> dict[str, Any]:
        least = self._rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._rng.randint(0, 9)}

    def _pattern(self, depth: int) -> dict[str, Any]:
        return {"type": "string", "pattern": self._rng.choice(PATTERNS)}

    def _enum(self, depth: int) -> dict[str, Any]:
        mixed = [*WORDS, 0, -7, 2.5, True, None]
        return {"enum": self._rng.sample(mixed, self._rng.randint(1, 5))}

    def _const(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return {"const": rng.choice([*WORDS, 42, False, [1, "ü"], {"k": None, "日": [2]}])}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._rng.randint(-1000, 1000)
        made: dict[str, Any] = {"type": "integer"}
        made[self._rng.choice(("minimum", "exclusiveMinimum"))] = low
        made[self._rng.choice(("maximum", "exclusiveMaximum"))] = low + self._rng.randint(2, 500)
        return made

    def _number(self, depth: int) -> dict[str, Any]:
        low = self._rng.randint(-2000, 2000) / 16
        return {"type": "number", "minimum": low, "maximum": low + self._rng.randint(1, 900) / 8}

    def _plain(self, depth: int) -> dict[str, Any]:
        return {"type": self._rng.choice(("boolean", "null", ["boolean", "null"]))}


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module")
def grammars(codec: Codec) -> Grammars:
    return Grammars(codec, codec.vocab_size)


class Closing:
    """How much a token does towards the end of a JSON text, within a string and outside."""

    def __init__(self, codec: Codec) -> None:
        pieces = [bytes(piece) for piece in codec.pieces]
        self._within = np.array([int(piece[:1] == b'"') for piece in pieces])
        self._outside = np.array([self._rank(piece) for piece in pieces])

    @staticmethod
    def _rank(piece: bytes) -> int:
        if piece and set(piece) <= set(b"]}"):
            return 3 + len(piece)
        if piece in (b",", b":"):
            return 2
        return 0 if set(piece) & set(b" [{") else 1  # what opens comes last

    def choose(self, mask: NDArray[np.bool_], rng: random.Random, text: str | None) -> int:
        """Any allowed token; behind a text, the one that does most to close it."""
        allowed = np.flatnonzero(mask)
        assert len(allowed), "nothing is allowed"
        if text is not None:
            is_within = re.sub(r"\\.", "", text).count('"') % 2 == 1
            ranks = (self._within if is_within else self._outside)[allowed]
            allowed = allowed[ranks == ranks.max()]
        return int(allowed[rng.randrange(len(allowed))])


def generated(
    grammars: Grammars,
    codec: Codec,
    closing: Closing,
    schema: dict[str, Any],
    seed: int,
    spent: list[float],
) -> str:
    """A text that the schema's mask allows; adds the seconds of each mask."""
    matcher = grammars.compile(Constraint("json_schema", json.dumps(schema)))
    rng, stream, text = random.Random(seed), TextStream(codec, True), ""
    for num_taken in range(MOST_TOKENS):
        started = time.thread_time()
        mask = matcher.mask()
        spent.append(time.thread_time() - started)
        end = codec.eos_ids[0]
        is_late = num_taken >= FREE_TOKENS
        token = closing.choose(mask, rng, text if is_late else None)
        if mask[end] and is_late:
            token = end
        if matcher.accept(token):
            return text + stream.flush()
        text += stream.push(token)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens of {json.dumps(schema)}: {text!r}")


def test_every_schema_is_obeyed(codec: Codec, grammars: Grammars) -> None:
    closing = Closing(codec)
    spent: list[float] = []
    sizes: list[int] = []
    for seed in range(SCHEMAS):
        schema = SchemaMaker(seed).document()
        Draft202012Validator.check_schema(schema)
        text = generated(grammars, codec, closing, schema, seed, spent)
        found = list(Draft202012Validator(schema).iter_errors(json.loads(text)))
        assert not found, f"seed {seed}: {text!r} breaks {json.dumps(schema)}: {found[0].message}"
        sizes.append(len(text))
    p50, p99 = np.percentile(spent, [50, 99]) * 1000
    print(
        f"{SCHEMAS} schemas, {len(spent)} masks, p50 {p50:.3f} ms, p99 {p99:.3f} ms, "
        f"texts of {min(sizes)} to {max(sizes)} characters"
    )
    assert max(sizes) > 100, "nothing of substance was written"


@pytest.mark.parametrize(
    "extra",
    [
        {"uniqueItems": True, "type": "array"},
        {"contains": {"const": 1}, "type": "array"},
        {"minContains": 2, "type": "array"},
        {"unevaluatedItems": False, "type": "array"},
        {"propertyNames": {"maxLength": 3}, "type": "object"},
        {"minProperties": 2, "type": "object", "properties": {"a": {}}},
        {"maxProperties": 1, "type": "object", "properties": {"a": {}, "b": {}}},
        {"dependentRequired": {"a": ["b"]}, "type": "object"},
        {"dependentSchemas": {"a": {"required": ["b"]}}, "type": "object"},
        {"unevaluatedProperties": False, "type": "object"},
        {"not": {"const": 3}, "type": "integer"},
        {"if": {"const": 1}, "then": {"maximum": 2}, "type": "integer"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "format": "no-such-format"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": r"(a)\1"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/elsewhere.json"},
        {"$dynamicRef": "#node"},
    ],
    ids=lambda extra: next(iter(extra)) if isinstance(extra, dict) else None,
)
@pytest.mark.parametrize("seed", range(2))
def test_what_cannot_be_enforced_is_refused_wherever_it_stands(
    grammars: Grammars, extra: dict[str, Any], seed: int
) -> None:
    inner = SchemaMaker(seed).document()
    for schema in (
        extra,
        {"type": "object", "properties": {"ok": inner, "x": {"items": extra}}, "required": ["ok"]},
        {"anyOf": [inner, {"type": "array", "prefixItems": [extra], "minItems": 1}]},
    ):
        if "$defs" in inner and schema is not extra:
            schema = {**schema, "$defs": inner["$defs"]}
        with pytest.raises(errors.InvalidArgument) as caught:
            grammars.compile(Constraint("json_schema", json.dumps(schema)))
        assert caught.value.field == "constraint.json_schema", caught.value
