"""Random JSON schemas: nested, arrays, enums, constants, patterns, formats, unions, unicode, recursive refs.

Every schema has finite values, and states nothing that contradicts itself.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = (
    *("name", "id", "größe", "値", "emoji 🦊", "a b", 'qu"ote', "back\\slash", "слово", "x-y", "π"),
    *("tags", "children", "left", "right", "amount", "is_open", "when", "été", "line\nbreak"),
)
WORDS = ("red", "grün", "青", "a b", "", "👩‍🚀", 'sa"id', "tab\there", "ñandú", "null", "0")
PATTERNS = (
    *("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{2,4}$", "^(ja|nein|vielleicht)$", "^[äöüß]{1,5}$"),
    *("^#[0-9a-f]{6}$", "^\\d{4}-\\d{2}$", "^([a-c]{2} ){1,3}[xyz]$", "^[\\u4e00-\\u4fff]{1,4}$"),
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def random_schema(rng: random.Random) -> Schema:
    """One schema with an object, an array or a union at its root."""
    schema = _Maker(rng).root()
    if rng.random() < 0.1:
        schema["title"] = rng.choice(WORDS)
    return schema


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._recursive = [f"node{i}" for i in range(rng.choice([0, 0, 1, 2]))]

    def root(self) -> Schema:
        make = self._rng.choice(
            [self._object, self._object, self._object, self._array, self._union]
        )
        schema = make(3)
        if self._recursive:
            schema["$defs"] = {name: self._node(name) for name in self._recursive}
            schema.setdefault("properties", {})
            if "items" not in schema and "anyOf" not in schema:
                self._refer(schema)
        return schema

    def _refer(self, schema: Schema) -> None:
        name = self._rng.choice(self._recursive)
        schema["properties"]["root"] = {"$ref": f"#/$defs/{name}"}
        schema.setdefault("required", []).append("root")

    def _node(self, name: str) -> Schema:
        """A tree or a list that can end: the way back to itself is optional, empty or null."""
        back = {"$ref": f"#/$defs/{self._rng.choice([name, *self._recursive])}"}
        way: Schema = self._rng.choice(
            [
                back,
                {"type": "array", "items": back, "maxItems": 2},
                {"anyOf": [{"type": "null"}, back]},
            ]
        )
        return {
            "type": "object",
            "properties": {"value": self._leaf(), "next": way},
            "required": ["value"],
            "additionalProperties": False,
        }

    def _any(self, depth: int) -> Schema:
        if depth <= 0 or self._rng.random() < 0.4:
            if self._recursive and self._rng.random() < 0.3:
                return {"$ref": f"#/$defs/{self._rng.choice(self._recursive)}"}
            return self._leaf()
        return self._rng.choice([self._object, self._array, self._union])(depth)

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(0, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "additionalProperties": False,
        }
        if names:
            schema["required"] = self._rng.sample(names, self._rng.randint(0, len(names)))
        if not names and self._rng.random() < 0.5:
            schema["additionalProperties"] = self._leaf()
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._rng.randint(0, 2)
        schema: Schema = {"type": "array", "minItems": least, "maxItems": least + 2}
        if self._rng.random() < 0.2:
            schema["prefixItems"] = [self._leaf() for _ in range(self._rng.randint(1, 2))]
            schema["maxItems"] = max(schema["maxItems"], len(schema["prefixItems"]))
        schema["items"] = self._any(depth - 1)
        return schema

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._rng.randint(2, 3))]}

    def _leaf(self) -> Schema:
        return self._rng.choice(
            [self._string, self._pattern, self._number, self._enum, self._constant, self._plain]
        )()

    def _string(self) -> Schema:
        if self._rng.random() < 0.3:
            return {"type": "string", "format": self._rng.choice(FORMATS)}
        least = self._rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._rng.randint(0, 12)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._rng.choice(PATTERNS)}

    def _number(self) -> Schema:
        low = self._rng.randint(-1000, 1000)
        kind = self._rng.choice(["integer", "number"])
        bound = self._rng.choice(["maximum", "exclusiveMaximum"])
        return {"type": kind, "minimum": low, bound: low + self._rng.randint(2, 5000)}

    def _enum(self) -> Schema:
        return {"enum": self._rng.sample([*WORDS, 1, -2.5, True, None], self._rng.randint(1, 5))}

    def _constant(self) -> Schema:
        return {"const": self._rng.choice([*WORDS, 7, False, None, [1, "zwei"], {"k": "ü"}])}

    def _plain(self) -> Schema:
        return {"type": self._rng.choice(["boolean", "null", ["integer", "null"]])}
