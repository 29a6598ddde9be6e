"""What a dialect declares about each field, and what is made from the declarations.

A field is declared once, where its request model defines it: name, type and default are the model's own,
the `Rule` in its annotation adds range, status, the rule in a sentence, and the proof. So what is parsed,
what `GET /v1/compat` says and what the reference page says cannot disagree. Knows no dialect.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

Status = Literal["honoured", "accepted", "refused"]
"""honoured: it changes the outcome; accepted: legal, checked, and without effect by the rule of the dialect;
refused: any value is a 400 that names it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The part of a field's declaration that its type cannot say."""

    says: str
    """What the field does, in a sentence."""
    proof: tuple[str, ...]
    """Ids of vectors, or names of tests, that fail when the rule is broken."""
    range: str = ""
    """Values the type allows but the rules do not, said positively; empty: whatever the type allows."""
    status: Status = "honoured"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One field of one endpoint, whole."""

    name: str
    type: str
    default: Any
    """`REQUIRED` where there is none."""
    rule: Rule

    def as_json(self) -> dict[str, Any]:
        """As `GET /v1/compat` shows it."""
        default = {"required": True} if self.default is REQUIRED else {"default": self.default}
        return {
            "name": self.name,
            "status": self.rule.status,
            "type": self.type,
            **default,
            "range": self.rule.range or None,
            "rule": self.rule.says,
            "proof": list(self.rule.proof),
        }


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A request body of a dialect: its models (more than one where a body has several forms)."""

    path: str
    models: tuple[type[BaseModel], ...]
    unknown: Rule
    """What becomes of fields that are not declared."""
    known_unknowns: tuple[str, ...] = ()
    """Undeclared fields that clients of other servers send, listed because people look for them."""
    parts: tuple[Declaration, ...] = ()
    """Keys of nested objects that are no models: `outer.inner`, declared beside them."""

    def declarations(self) -> list[Declaration]:
        """Every declared field, nested ones as `outer.inner`, in the order of the models."""
        found: dict[str, Declaration] = {}
        for model in self.models:
            for declaration in _declarations(model, ""):
                found.setdefault(declaration.name, declaration)
                inner = f"{declaration.name}."
                found |= {part.name: part for part in self.parts if part.name.startswith(inner)}
        return list(found.values())


def compat(name: str, endpoints: Sequence[Endpoint], decisions: Sequence[str]) -> dict[str, Any]:
    """The whole dialect as JSON: every field of every endpoint with status, rule and proof."""
    return {
        "dialect": name,
        "decisions": list(decisions),
        "endpoints": {
            endpoint.path: {
                "fields": [d.as_json() for d in endpoint.declarations()],
                "unknown_fields": {
                    "status": endpoint.unknown.status,
                    "rule": endpoint.unknown.says,
                    "proof": list(endpoint.unknown.proof),
                    "examples": list(endpoint.known_unknowns),
                },
            }
            for endpoint in endpoints
        },
    }


def _declarations(model: type[BaseModel], prefix: str) -> Iterable[Declaration]:
    for name, info in model.model_fields.items():
        rules = [item for item in info.metadata if isinstance(item, Rule)]
        if len(rules) != 1:
            raise TypeError(f"{model.__name__}.{name} needs exactly one Rule, has {len(rules)}")
        yield Declaration(prefix + name, type_text(info.annotation), _default(info), rules[0])
        for inner in _models_in(info.annotation):
            yield from _declarations(inner, f"{prefix}{name}.")


def _default(info: FieldInfo) -> Any:
    return REQUIRED if info.is_required() else info.get_default(call_default_factory=True)


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


_WORDS: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    Any: "any JSON",
}


def type_text(annotation: Any) -> str:
    """A type in the words of JSON."""
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, types.UnionType):
        texts = dict.fromkeys(type_text(a) for a in arguments)
        return " or ".join(texts)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        inner = type_text(arguments[1])
        return "object" if arguments[1] is Any else f"object of {inner}"
    if is_typeddict(annotation) or (
        isinstance(annotation, type) and issubclass(annotation, BaseModel)
    ):
        return "object"
    raise TypeError(f"no word for {annotation!r}")
