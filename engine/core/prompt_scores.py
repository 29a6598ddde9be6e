"""Log probabilities of a prompt, collected while it is computed chunk by chunk.

Knows that the logits at a position score the token behind it, and that the first token has no score.
"""

from __future__ import annotations

from dataclasses import replace

from engine.core.sampler import Rules, prompt_scores
from engine.core.stops import Text
from engine.core.types import Logits, TokenScores


class PromptScores:
    """One entry per prompt token. A chunk that is computed again (preemption) replaces what it found."""

    def __init__(self, prompt: tuple[int, ...], rules: Rules, num_alternatives: int) -> None:
        self._prompt = prompt
        self._rules = rules
        self._num_alternatives = num_alternatives
        self._entries: list[TokenScores | None] = [None] * len(prompt)

    def add(self, start: int, logits: Logits) -> bool:
        """Take the logits of the positions from `start` on; whether the prompt is scored to its end now."""
        for i, row in enumerate(logits, start=start + 1):
            if i < len(self._prompt):
                token = self._prompt[i]
                self._entries[i] = prompt_scores(row, token, self._rules, self._num_alternatives)
        return start + len(logits) >= len(self._prompt)

    def with_texts(self, text: Text) -> tuple[TokenScores | None, ...]:
        """The entries, each candidate with the text that it adds behind the prompt before it."""
        done: list[TokenScores | None] = []
        for token, entry in zip(self._prompt, self._entries, strict=True):
            if entry is not None:
                entry = replace(entry, texts=tuple(text.peek_text(t) for t in entry.token_ids))
            done.append(entry)
            text.push(token)
        return tuple(done)
