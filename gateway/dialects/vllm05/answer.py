"""The one path from events to what a client sees, streamed or not.

An `Assembly` turns the events of a request into pieces, one per generated token and choice, in the order
and under the index in which the client gets them. The stream renders each piece as a chunk, the plain
response joins them: so the two cannot differ. Ranking (best_of, beam search) happens here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from candor import errors
from gateway.events import (
    ChoiceEnd,
    Delta,
    Finished,
    PromptLogprobs,
    Tagged,
    TokenLogprobs,
)
from gateway.spec import GenerationSpec

WIRE_REASONS = ("stop", "length")
"""The finish reasons that exist on the wire; whatever else ends a choice is an error."""


@dataclass(slots=True)
class PromptFacts:
    """What rendering may need to know about one prompt."""

    num_tokens: int
    text: str = ""
    """What an echo shows; empty without one."""
    token_ids: Sequence[int] = ()
    first_token: str = ""
    """Text of the first token alone, for echoed logprobs."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Arrives with the events."""


@dataclass(slots=True, eq=False)
class Choice:
    """One answer as the client sees it."""

    index: int
    prompt: PromptFacts
    num_tokens: int = 0
    """Generated tokens so far; discarded best_of candidates are never counted."""
    num_chars: int = 0
    """Characters already sent, where the renderer keeps count."""
    end: ChoiceEnd | None = None


class Piece(NamedTuple):
    """One token of one choice, or the text left over at its end (then without logprobs)."""

    choice: Choice
    text: str
    logprobs: TokenLogprobs | None
    num_tokens: int
    """Tokens of the choice up to and with this piece."""
    end: ChoiceEnd | None


class Assembly:
    """Pieces from events, for all prompts of one request."""

    def __init__(self, spec: GenerationSpec, prompts: Sequence[PromptFacts]) -> None:
        self.prompts = prompts
        self._spec = spec
        n = spec.n
        self.choices = [
            Choice(i * n + j, prompt) for i, prompt in enumerate(prompts) for j in range(n)
        ]
        self.is_ranked = spec.use_beam_search or spec.best_of > n
        """Whether the winners are known only when every candidate has ended."""
        self._held: list[dict[int, list[Delta]]] = [{} for _ in prompts]

    def feed(self, tagged: Tagged) -> Iterable[Piece]:
        """The pieces that may be shown now. Raises a CandorError when a choice has failed."""
        event = tagged.event
        if type(event) is Delta:
            if event.end is not None and event.end.finish_reason not in WIRE_REASONS:
                raise errors.Internal(f"generation ended with {event.end.finish_reason}")
            if self.is_ranked:
                self._held[tagged.prompt].setdefault(event.choice, []).append(event)
                return ()
            return _pieces(self.choices[tagged.prompt * self._spec.n + event.choice], event)
        if type(event) is PromptLogprobs:
            self.prompts[tagged.prompt].logprobs = event.positions
        elif type(event) is Finished:
            return self._conclude(tagged.prompt)
        return ()

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(p.num_tokens for p in self.prompts)

    @property
    def num_completion_tokens(self) -> int:
        """Over the choices that are returned."""
        return sum(c.num_tokens for c in self.choices)

    def _conclude(self, prompt: int) -> Iterator[Piece]:
        n = self._spec.n
        mine = self.choices[prompt * n : (prompt + 1) * n]
        if self.is_ranked:
            held = self._held[prompt]
            best = sorted(held, key=lambda i: (-self._score(prompt, held[i]), i))
            for choice, index in zip(mine, best, strict=False):
                for delta in held[index]:
                    yield from _pieces(choice, delta)
            held.clear()
        if any(c.end is None for c in mine):
            raise errors.Internal("generation stopped without a finish reason")

    def _score(self, prompt: int, deltas: Sequence[Delta]) -> float:
        end = deltas[-1].end
        if end is None:
            return -math.inf
        if not self._spec.use_beam_search:
            return end.cumulative_logprob
        # The length counts the prompt, but not the end-of-sequence token that a beam may carry.
        ended_by_eos = end.finish_reason == "stop" and end.stop_reason is None
        length = self.prompts[prompt].num_tokens + sum(len(d.token_ids) for d in deltas)
        length = max(length - ended_by_eos, 1)
        return float(end.cumulative_logprob / length**self._spec.length_penalty)


def _pieces(choice: Choice, delta: Delta) -> Sequence[Piece]:
    if choice.end is not None:
        return ()  # a finished choice says nothing more
    choice.end = delta.end
    count = len(delta.token_ids)
    if count <= 1:
        choice.num_tokens += count
        entry = delta.logprobs[0] if delta.logprobs else None
        return (Piece(choice, delta.text, entry, choice.num_tokens, delta.end),)
    # A joined delta becomes one piece per token. Where the tokens' own texts are known and are what was
    # added, each goes with its token (offsets count on it); otherwise all of the text goes with the last.
    texts = [entry.texts[0] for entry in delta.logprobs]
    if "".join(texts) != delta.text or len(texts) != count:
        texts = [""] * (count - 1) + [delta.text]
    pieces = []
    for i, text in enumerate(texts):
        choice.num_tokens += 1
        is_last = i == count - 1
        pieces.append(
            Piece(
                choice,
                text,
                delta.logprobs[i] if delta.logprobs else None,
                choice.num_tokens,
                delta.end if is_last else None,
            )
        )
    return pieces
