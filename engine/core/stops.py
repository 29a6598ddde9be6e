"""When a choice ends, and how much of its text may be shown before that is known.

Per token, the first hit wins: the min_tokens gate (no check at all), end of sequence, stop ids, stop strings
in the order of the list, the context, max_tokens.

A stop string is looked for in the new characters and as many before them as it is long; so one that was
completed while the gate was closed counts only when it ends right at the first token that is checked. A stop
string that spells a special token (`<|im_end|>`) while special tokens are left out of the text is matched
against the token itself, in its place in the list; there is no text of it to keep, whatever
include_stop_str_in_output says.

Held back is only what can still become (the start of) a stop string, so the joined deltas equal the text that
an unstreamed answer has, and never show part of a stop string that is then cut away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.types import FinishReason, StoppingParams


class Text(Protocol):
    """Token ids in, text out, never half a character: a stream of one choice (`tokenizer_svc.text_stream`)."""

    def push(self, token_id: int, /) -> str:
        """The characters that the token completes."""
        ...

    def peek_text(self, token_id: int, /) -> str:
        """What `push` would return; changes nothing."""
        ...

    def flush(self) -> str:
        """The end: bytes that never became a character, as U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class StopRules:
    """A request's stopping parameters with the model's own ends merged in."""

    params: StoppingParams
    max_tokens: int
    """Tokens of the choice at most; the context is already taken into account."""
    eos_id: int | None
    """The token that ends without a cause; None when end-of-sequence tokens are ordinary."""
    stop_ids: frozenset[int]
    special_ids: Mapping[str, int]
    """Stop strings that stand for a special token which has no text."""

    @classmethod
    def of(
        cls,
        params: StoppingParams,
        *,
        eos_ids: Sequence[int],
        special_tokens: Mapping[str, int],
        skip_special_tokens: bool,
        room: int,
    ) -> StopRules:
        """`eos_ids`: the tokenizer's own first, then the model's others. `room`: tokens the context holds."""
        extra = frozenset() if params.ignore_eos else frozenset(eos_ids[1:])
        named = {s: special_tokens[s] for s in params.stop if s in special_tokens}
        return cls(
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_id=eos_ids[0] if eos_ids and not params.ignore_eos else None,
            stop_ids=frozenset(params.stop_token_ids) | extra,
            special_ids=named if skip_special_tokens else {},
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a token did: text that may be shown now, and the end if it is one."""

    text: str
    reason: FinishReason | None = None
    cause: int | str | None = None


class Stopper:
    """The text of one choice, and its end."""

    def __init__(self, rules: StopRules, text: Text) -> None:
        self.stream = text
        self._rules = rules
        self._params = rules.params
        self._num_tokens = 0
        self._tail = ""
        """The end of the text: what is held back, and what a stop string could reach back into."""
        self._num_held = 0
        self._starts = [_Start(s) for s in self._params.stop]
        self._longest = max(map(len, self._params.stop), default=0)

    def push(self, token: int) -> Verdict:
        """Take the next token. Not called again after an end."""
        rules, params = self._rules, self._params
        self._num_tokens += 1
        is_checked = self._num_tokens >= params.min_tokens
        if is_checked and (token == rules.eos_id or token in rules.stop_ids):
            shown = self.stream.push(token) if params.include_stop_str_in_output else ""
            cause = None if token == rules.eos_id else token
            return Verdict(self._rest(shown), FinishReason.STOP, cause)
        new = self.stream.push(token)
        if is_checked and params.stop and (hit := self._find(token, new)) is not None:
            string, text = hit
            return Verdict(text, FinishReason.STOP, string)
        if is_checked and self._num_tokens >= rules.max_tokens:
            return Verdict(self._rest(new), FinishReason.LENGTH)
        return Verdict(self._show(new) if params.stop else new)

    def end(self) -> Verdict:
        """End for want of room, without a further token."""
        return Verdict(self._rest(""), FinishReason.LENGTH)

    def _rest(self, new: str) -> str:
        held = self._tail[len(self._tail) - self._num_held :]
        return held + new + self.stream.flush()

    def _find(self, token: int, new: str) -> tuple[str, str] | None:
        """The stop string that the token completed, and the text that is left to show."""
        text = self._tail + new
        shown = len(self._tail) - self._num_held
        for string in self._params.stop:
            if self._rules.special_ids.get(string) == token:
                return string, text[shown:] + self.stream.flush()
            if not new:
                continue
            at = text.find(string, max(0, len(self._tail) - len(string)))
            if at >= 0:
                cut = at + len(string) if self._params.include_stop_str_in_output else at
                return string, text[shown:cut]
        return None

    def _show(self, new: str) -> str:
        text = self._tail + new
        shown = len(self._tail) - self._num_held
        hold = 0
        if not self._params.include_stop_str_in_output:
            for start in self._starts:
                hold = max(hold, start.advance(new))
            if self._params.hold_back_longest_stop:
                hold = max(hold, min(self._longest - 1, len(text)))
        # What was shown stays shown.
        until = max(shown, len(text) - hold)
        kept = max(hold, self._longest)
        self._num_held = len(text) - until
        self._tail = text[max(0, len(text) - kept) :]
        return text[shown:until]


class _Start:
    """How much of a string's beginning the text ends with (Knuth, Morris and Pratt's automaton).

    The whole string counts too: it is met while the min_tokens gate is closed, and the next token may
    still be told to cut it.
    """

    def __init__(self, string: str) -> None:
        self._string = string
        self._length = 0
        self._fallback = [0] * len(string)
        for i in range(1, len(string)):
            self._fallback[i] = self._step(self._fallback[i - 1], string[i])

    def advance(self, text: str) -> int:
        """Take more text; returns the length."""
        for character in text:
            self._length = self._step(self._length, character)
        return self._length

    def _step(self, length: int, character: str) -> int:
        while True:
            if length < len(self._string) and self._string[length] == character:
                return length + 1
            if length == 0:
                return 0
            length = self._fallback[length - 1]
