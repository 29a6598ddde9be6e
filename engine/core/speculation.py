"""Drafts by looking back: what followed the last few tokens before is likely to follow them again.

Knows token ids, how often a request's drafts were right, and what a forward pass of so many tokens costs; not
how drafts are verified. Sampling has no hidden state, so a draft can only save time or waste it: the tokens
are the same with and without. Whether it saves time is a question of numbers. A drafted token is worth its
place when the step, with it, is expected to give more tokens per second than without:

    (tokens expected + chance that all drafts up to this one are right) / cost(n + 1)  >  expected / cost(n)

One sequence alone leaves most of a processor idle, so nearly any draft pays; a full batch has no idle part,
and then only near-certain ones do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

GRAM = 3
"""Tokens that must have stood together before. Two match by chance in any text, four start to miss copies."""
MOST = 8
"""Longest draft."""
_HOPE_RIGHT, _HOPE_TRIED = 1.5, 2.0
"""How a request begins: as if three of four drafts had been right."""
_KEEP = 0.95
"""What an earlier draft weighs after each later one, and after each step in which drafting did not pay: so a
request that was switched off is tried again some dozens of tokens later."""


class StepCosts:
    """Seconds of a forward pass by its number of tokens, interpolated between measured sizes."""

    def __init__(self, measured: Iterable[tuple[int, float]]) -> None:
        """`measured`: at least two sizes with their seconds. Beyond the largest it is a straight line."""
        sizes, seconds = (np.array(column) for column in zip(*sorted(measured), strict=True))
        assert len(sizes) > 1, "one size says nothing about another"
        # More tokens are never cheaper: what noise says otherwise is smoothed away.
        seconds = np.maximum.accumulate(seconds)
        self._table = np.interp(np.arange(sizes[-1] + 1), sizes, seconds).tolist()
        self._slope = float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))

    def __call__(self, num_tokens: int) -> float:
        """Seconds of a pass over so many tokens."""
        last = len(self._table) - 1
        if num_tokens <= last:
            return float(self._table[num_tokens])
        return float(self._table[last] + self._slope * (num_tokens - last))


class Acceptance:
    """How often a request's drafted tokens were right, with more weight on the last ones."""

    __slots__ = ("_right", "_tried", "num_accepted", "num_drafted")

    def __init__(self) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self._right = _HOPE_RIGHT
        self._tried = _HOPE_TRIED

    @property
    def chance(self) -> float:
        """Of one more token being right."""
        return self._right / self._tried

    def note(self, drafted: int, accepted: int, *, was_refused: bool) -> None:
        """Take a verified draft into account. `was_refused`: a token behind the accepted ones was wrong."""
        self.num_drafted += drafted
        self.num_accepted += accepted
        tried = accepted + was_refused
        keep = _KEEP**tried
        self._right = self._right * keep + accepted
        self._tried = self._tried * keep + tried

    def rest(self) -> None:
        """A step went by in which a draft was there and did not pay: go some way back to the beginning."""
        self._right += (1 - _KEEP) * (_HOPE_RIGHT - self._right)
        self._tried += (1 - _KEEP) * (_HOPE_TRIED - self._tried)


class Lookup:
    """Where each run of GRAM tokens of one sequence was followed by something, the last place of each."""

    __slots__ = ("_behind", "_num_seen")

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        self._num_seen = GRAM

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """What may come next. `token_ids` has grown since the last call, and is otherwise the same."""
        size = len(token_ids)
        for at in range(self._num_seen, size):
            self._behind[tuple(token_ids[at - GRAM : at])] = at
        self._num_seen = max(size, self._num_seen)
        at = self._behind.get(tuple(token_ids[-GRAM:]), size)
        draft: list[int] = []
        if at < size:
            # Behind the end the draft itself goes on: a text that repeats itself has a short period.
            for i in range(at, at + most):
                draft.append(token_ids[i] if i < size else draft[i - size])
        return draft


@dataclass(slots=True)
class Drafter:
    """One sequence's side of it."""

    lookup: Lookup
    acceptance: Acceptance
    """Shared by the choices of a request."""


class Speculator:
    """Drafts for the sequences of a step that decodes and does nothing else."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def drafts(
        self, asked: Sequence[tuple[Drafter, Sequence[int], int]], budget: int
    ) -> list[list[int]]:
        """A draft, maybe empty, for each of (drafter, token ids, most tokens); `budget` for all of them.

        Not all sequences of the step need to ask: then `asked` has an entry with no room for those.
        """
        num_tokens = len(asked)
        expected = float(num_tokens)
        found: list[list[int]] = []
        for drafter, token_ids, most in asked:
            draft = drafter.lookup.propose(token_ids, min(MOST, most, budget)) if most > 0 else []
            kept, chance = 0, 1.0
            while kept < len(draft):
                chance *= drafter.acceptance.chance
                gain = (expected + chance) * self._costs(num_tokens)
                if gain <= expected * self._costs(num_tokens + 1):
                    break
                kept, num_tokens, expected = kept + 1, num_tokens + 1, expected + chance
            if draft and not kept:
                drafter.acceptance.rest()
            budget -= kept
            found.append(draft[:kept])
        return found
