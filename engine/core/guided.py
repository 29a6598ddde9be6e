"""Constraints: a schema, pattern, grammar or choice compiled by llguidance, at work as a mask on tokens.

The only module that knows llguidance. An end-of-sequence token is allowed exactly when the text so far is
complete, never forced while the pattern could go on. Compiling happens away from the step thread (it takes
milliseconds, seconds for monsters) and is bounded: by the length of the text here, by the compiler's own fuel
and grammar size inside it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from candor.errors import InvalidArgument
from engine.core.types import Constraint
from tokenizer_svc.codec import Codec

MAX_CONSTRAINT_CHARACTERS = 256 * 1024
MAX_PATTERN_CHARACTERS = 16 * 1024
"""Of a regular expression, alone or all of a schema's together: some that are longer take minutes and
gigabytes (16 KiB of the worst known: 1.3 s)."""
MAX_GRAMMAR_CHARACTERS = 32 * 1024
MAX_CHOICES = 4096
_KEPT = 128
"""Compiled constraints that are kept for the next request, least recently used first to go."""
_ENCODED_AT_ONCE = 1000
_LEXER_FUEL = 2_000_000
"""About 40 ms of building patterns."""
_GRAMMAR_SYMBOLS = 200_000

_SCHEMA_SPACE = "[ ]?"
"""White space between JSON tokens unless the request says otherwise. Without a bound, greedy decoding of
small models ends in endless new lines, all of them legal."""
_OBJECT_SPACE = r"[ \n\r\t]{0,20}"
_FIELDS = {
    "json_schema": "constraint.json_schema",
    "regex": "constraint.regex",
    "grammar": "constraint.grammar",
    "choice": "constraint.choice",
    "json_object": "constraint.json_object",
}


class TokenMatcher:
    """A compiled constraint at work on one sequence."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    def mask(self) -> NDArray[np.bool_]:
        """The tokens that may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        flags = np.unpackbits(bits, bitorder="little").view(np.bool_)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[: len(flags)] = flags[: self._vocab_size]
        self._raise_if_broken()
        return mask

    def accept(self, token: int) -> bool:
        """Take a token; whether it was an end, behind which the constraint allows nothing."""
        if not self._matcher.consume_token(token):
            self._raise_if_broken()
            raise InvalidArgument(f"the constraint forbids token {token} here", field="constraint")
        return token in self._eos_ids

    def fork(self) -> TokenMatcher:
        """An independent copy in the same state."""
        return TokenMatcher(self._matcher.deep_copy(), self._vocab_size, self._eos_ids)

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():
            why = _first_lines(self._matcher.get_error())
            raise InvalidArgument(f"the constraint cannot go on: {why}", field="constraint")


class Grammars:
    """Compiles constraints for one tokenizer. Called from any thread."""

    def __init__(self, codec: Codec, vocab_size: int) -> None:
        """`vocab_size`: length of a row of logits, which can exceed the tokenizer's own."""
        self._vocab_size = vocab_size
        # The tokenizer's own alone: the others stop a text too, but are reported as stop tokens.
        self._eos_ids = frozenset(codec.eos_ids[:1])
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(codec)),
            n_vocab=codec.vocab_size,
            eos_token=codec.eos_ids[0],
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint) -> TokenMatcher:
        """The constraint at its beginning. Raises InvalidArgument that says what is wrong and where."""
        with self._lock:
            matcher = self._compiled.get(constraint)
            if matcher is not None:
                self._compiled.move_to_end(constraint)
        if matcher is None:
            matcher = self._build(constraint)
            with self._lock:
                self._compiled[constraint] = matcher
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return TokenMatcher(matcher.deep_copy(), self._vocab_size, self._eos_ids)

    def _build(self, constraint: Constraint) -> LLMatcher:
        field = _FIELDS[constraint.kind]
        _check_size(constraint, field)
        limits = LLParserLimits(
            initial_lexer_fuel=_LEXER_FUEL, max_grammar_size=_GRAMMAR_SYMBOLS, verbose_errors=False
        )
        try:
            grammar = _grammar(constraint, field)
        except ValueError as error:  # llguidance reads no deeper than some 127 levels
            raise InvalidArgument(
                f"{field} cannot be read: {_first_lines(str(error))}",
                reason="BAD_CONSTRAINT",
                field=field,
            ) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            if constraint.whitespace_pattern is not None and not _is_regex(
                self._tokenizer, constraint.whitespace_pattern
            ):
                field = "constraint.whitespace_pattern"
            raise InvalidArgument(
                f"{field} cannot be compiled: {_first_lines(matcher.get_error())}",
                reason="BAD_CONSTRAINT",
                field=field,
            )
        # The first mask builds tables: seconds for some patterns, which must not be the step thread's.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidArgument(
                f"{field} allows nothing, or is too large to start: {_first_lines(matcher.get_error())}",
                reason="BAD_CONSTRAINT",
                field=field,
            )
        return matcher


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.eos_token_id = codec.eos_ids[0]
        self.bos_token_id = codec.bos_id
        self.tokens = [bytes(piece) for piece in codec.pieces]
        self.special_token_ids = sorted(codec.special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        # A hint about usual splits, no more; and some tokenizers recurse as deep as a run of letters is long.
        parts = [text[i : i + _ENCODED_AT_ONCE] for i in range(0, len(text), _ENCODED_AT_ONCE)]
        encode = self._codec.encode
        return [t for p in parts for t in encode(p, add_special_tokens=False, parse_special=False)]


def _check_size(constraint: Constraint, field: str) -> None:
    kind, length = constraint.kind, len(constraint.value)
    most = {"regex": MAX_PATTERN_CHARACTERS, "grammar": MAX_GRAMMAR_CHARACTERS}.get(kind)
    if most is not None and length > most:
        raise InvalidArgument(
            f"{field} has {length} characters; at most {most} are compiled",
            reason="CONSTRAINT_TOO_LARGE",
            field=field,
        )
    size = len(constraint.value) + sum(map(len, constraint.choices))
    size += len(constraint.whitespace_pattern or "")
    if size > MAX_CONSTRAINT_CHARACTERS or len(constraint.choices) > MAX_CHOICES:
        raise InvalidArgument(
            f"{field} has {size} characters and {len(constraint.choices)} choices; at most "
            f"{MAX_CONSTRAINT_CHARACTERS} and {MAX_CHOICES} are compiled",
            reason="CONSTRAINT_TOO_LARGE",
            field=field,
        )


def _grammar(constraint: Constraint, field: str) -> str:
    kind, value = constraint.kind, constraint.value
    if kind == "json_schema":
        schema = _parsed(value, field)
        _check_patterns(schema, field)
        return _from_schema(schema, constraint.whitespace_pattern or _SCHEMA_SPACE)
    if kind == "json_object":
        return _from_schema({"type": ["object", "array"]}, _OBJECT_SPACE)
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if kind == "grammar":
        return str(LLMatcher.grammar_from_lark(value))
    return str(LLMatcher.grammar_from_lark(f"start: {_alternatives(constraint.choices, field)}"))


def _check_patterns(schema: object, field: str) -> None:
    """Hold the regular expressions of a schema, all together, to the bound of one."""
    todo, total = [schema], 0
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            total += len(part["pattern"]) if isinstance(part.get("pattern"), str) else 0
            total += sum(map(len, part.get("patternProperties") or ()))
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    if total > MAX_PATTERN_CHARACTERS:
        raise InvalidArgument(
            f"{field} has patterns of {total} characters; at most {MAX_PATTERN_CHARACTERS} are compiled",
            reason="CONSTRAINT_TOO_LARGE",
            field=field,
        )


def _parsed(schema: str, field: str) -> object:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} is not JSON: {error}", field=field) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidArgument(f"{field} is not a JSON object", field=field)
    return parsed


def _from_schema(schema: object, space: str) -> str:
    text = json.dumps(schema)
    return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": space}))


def _alternatives(choices: Sequence[str], field: str) -> str:
    if not choices or "" in choices:
        raise InvalidArgument(f"{field} needs strings, none of them empty", field=field)
    # Lark's strings are written as JSON's are.
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))


def _is_regex(tokenizer: LLTokenizer, pattern: str) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern), tokenizer)


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:500]
