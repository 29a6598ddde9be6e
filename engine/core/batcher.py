"""Who is computed in the next step: decodes first, then prefill chunks up to the token budget.

    running   first come first; each has a row. Sequences with one token to go decode, the others prefill.
    waiting   in order of arrival; preempted ones at the head. One gets a row when a seat, some budget and
              the KV for its whole known length are there.

A sequence that shares a prefix with one that is being prefilled waits until that part is computed, and then
starts from it: so the choices of a request fork after one prefill, and cold requests with one system prompt
compute it once. When decodes find no KV, cached prefixes go first, then the newest running sequence is
preempted: its row is given up and it is computed again later (exactly, as sampling has no hidden state). The
oldest is never preempted for another, and alone it fits (checked at submit), so it always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.core.beam import Child
from engine.core.kv import Kv
from engine.core.kv.tree import common_length
from engine.core.sequence import Sequence
from engine.core.speculation import Speculator
from engine.core.types import PlanItem, StepPlan

_LEAST_SHARED = 16
"""Tokens of shared prefix that are worth waiting for."""
_SCORED_CHUNK = 64
"""Prompt tokens per step whose logits are all wanted: a row of logits is the size of the vocabulary."""
_LOOK_AHEAD = 64
"""Waiting sequences that are looked at per step, when those at the head wait for a prefix."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """A prefix that another sequence is computing."""

    leader: Sequence
    num_tokens: int


class Batcher:
    """The running and the waiting sequences of one runner."""

    def __init__(
        self,
        kv: Kv,
        *,
        max_running: int,
        token_budget: int,
        mixed_budget: int,
        speculator: Speculator | None = None,
    ) -> None:
        """`token_budget`: most tokens of a step; `mixed_budget`: the same while anyone decodes.

        `speculator`: drafts for steps that only decode; None: no drafts.
        """
        self._speculator = speculator
        self._kv = kv
        self._max_running = max_running
        self._token_budget = token_budget
        self._mixed_budget = min(token_budget, max(mixed_budget, max_running + 1))
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._expected: dict[Sequence, _Expected] = {}
        self._wanted = 0
        """Tokens that the plan in the making has so far."""

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the line."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it is. `keep`: what it has computed stays cached."""
        self._expected.pop(sequence, None)
        if sequence.row is not None:
            self.running.remove(sequence)
            self._kv.release(sequence.row, keep=keep)
            sequence.row = None
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def branch(self, beams: Iterable[Sequence], children: Iterable[Child]) -> None:
        """Replace a request's beams by the next ones, each in its parent's row or in a copy of it.

        A child that gets no row is next in line; the part it shares with the others is still there then.
        """
        children = list(children)
        parents = {child.parent for child in children}
        for beam in beams:
            if beam not in parents:
                self.remove(beam, keep=False)
        rows: dict[Sequence, int | None] = {}
        for child in children:
            parent, sequence = child.parent, child.sequence
            if parent not in rows:
                rows[parent] = parent.row
                if parent.row is not None:
                    self._hand_over(parent, sequence)
                    continue
                self.remove(parent)
            source = rows[parent]
            row = self._kv.fork(source) if source is not None else None
            if row is None:
                self.waiting.appendleft(sequence)
            else:
                sequence.row, sequence.num_computed = row, parent.num_computed
                self.running.append(sequence)

    def _hand_over(self, old: Sequence, new: Sequence) -> None:
        new.row, new.num_computed = old.row, old.num_computed
        old.row = None
        self.running[self.running.index(old)] = new

    def plan(self) -> StepPlan:
        """What the next forward pass computes. Room in the KV store is reserved for all of it."""
        while True:
            items = self._fill()
            # Several long prompts can fill the store half-way each; then the newest makes room.
            if items or not self.running or not self.preempt_newest():
                return StepPlan(tuple(self._with_drafts(items)))

    def _fill(self) -> list[PlanItem]:
        self._wanted = 0
        items = self._decodes()
        budget = (self._mixed_budget if items else self._token_budget) - len(items)
        for sequence in self.running:
            if len(sequence.token_ids) - sequence.num_computed > 1 and budget > 0:
                item = self._chunk(sequence, budget)
                if item is not None:
                    budget -= item.num_tokens
                    items.append(item)
        return items + self._admit(budget)

    def preempt_newest(self) -> bool:
        """Give up the row of the newest running sequence, unless it is the only one."""
        if len(self.running) < 2:
            return False
        self._preempt(self.running[-1])
        return True

    def _with_drafts(self, items: list[PlanItem]) -> list[PlanItem]:
        """The same with drafts, if all of them decode: a prompt that is waiting comes first."""
        if self._speculator is None or not all(
            item.is_last and item.num_known == 1 for item in items
        ):
            return items
        asked = [(i.sequence.drafter, i.sequence.token_ids, i.sequence.draft_room) for i in items]
        spare = self._mixed_budget - len(items)
        drafts = self._speculator.drafts(asked, min(spare, self._kv.room() - self._wanted))
        wanted = self._wanted + sum(map(len, drafts))
        # Cached prefixes may go for it, running sequences not.
        if wanted == self._wanted or not self._kv.reserve(wanted):
            return items
        self._wanted = wanted
        return [replace(i, drafts=tuple(d)) for i, d in zip(items, drafts, strict=True)]

    # --- steps of a plan ---

    def _decodes(self) -> list[PlanItem]:
        items: list[PlanItem] = []
        # Preemption takes from the end of the list, so the oldest are served first.
        for sequence in list(self.running):
            if sequence.row is None or len(sequence.token_ids) - sequence.num_computed != 1:
                continue
            if len(items) == self._token_budget:
                break
            while not self._kv.reserve(self._wanted + 1):
                if not self._preempt_for(sequence):
                    break
            else:
                self._wanted += 1
                items.append(PlanItem(sequence, sequence.num_computed, 1, sequence.scores_prompt))
        return [item for item in items if item.sequence.row is not None]

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Make the newest running sequence wait; False when that is this one itself."""
        newest = self.running[-1]
        self._preempt(newest)
        return newest is not sequence

    def _chunk(self, sequence: Sequence, budget: int) -> PlanItem | None:
        left = len(sequence.token_ids) - sequence.num_computed
        if sequence.scores_prompt:
            budget = min(budget, _SCORED_CHUNK)
        count = min(left, budget, self._kv.room() - self._wanted)
        if count <= 0 or not self._kv.reserve(self._wanted + count):
            return None
        self._wanted += count
        return PlanItem(sequence, sequence.num_computed, count, sequence.scores_prompt)

    def _admit(self, budget: int) -> list[PlanItem]:
        items: list[PlanItem] = []
        for sequence in list(self.waiting)[:_LOOK_AHEAD]:
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            if self._waits_for_prefix(sequence):
                continue
            item = self._seat(sequence, budget)
            if item is None:
                break
            budget -= item.num_tokens
            items.append(item)
        return items

    def _seat(self, sequence: Sequence, budget: int) -> PlanItem | None:
        ids, salt = sequence.token_ids, sequence.state.request.cache_salt
        limit = 0 if sequence.scores_prompt else len(ids) - 1
        shared = min(self._kv.match(ids, salt), limit)
        owed = sum(len(s.token_ids) - s.num_computed for s in self.running)
        if self.running and len(ids) - shared + owed > self._kv.room():
            return None
        seat = self._kv.acquire(ids, salt, limit)
        if seat is None:
            return None
        self.waiting.remove(sequence)
        self._expected.pop(sequence, None)
        self.running.append(sequence)
        sequence.row, sequence.num_computed = seat.row, seat.num_cached
        item = self._chunk(sequence, budget)
        if item is None:
            self._preempt(sequence)
        return item

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute a longer prefix than any that is there."""
        if sequence.scores_prompt:
            return False
        expected = self._expected.get(sequence)
        if expected is None:
            expected = self._find_leader(sequence)
            if expected is None:
                return False
            self._expected[sequence] = expected
        leader = expected.leader
        if leader.row is not None and leader.num_computed < expected.num_tokens:
            return True
        del self._expected[sequence]
        # Its leader got there, or gave up; another one may be on the way to an even longer prefix.
        return leader.row is None and self._waits_for_prefix(sequence)

    def _find_leader(self, sequence: Sequence) -> _Expected | None:
        ids, salt = sequence.token_ids, sequence.state.request.cache_salt
        limit = len(ids) - 1
        have = min(self._kv.match(ids, salt), limit)
        best: _Expected | None = None
        for other in self.running:
            if other.state.request.cache_salt != salt or other.num_computed >= limit:
                continue
            if len(other.token_ids) - other.num_computed < 2:
                continue
            shared = min(common_length(other.token_ids, ids, 0), limit)
            least = max(have + _LEAST_SHARED, best.num_tokens + 1 if best else 0)
            is_sibling = other.state is sequence.state
            if shared > other.num_computed and (shared >= least or (is_sibling and shared > have)):
                best = _Expected(other, shared)
        return best

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.row is not None, "only a running sequence can be preempted"
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._kv.release(sequence.row, keep=True)
        sequence.row, sequence.num_computed = None, 0
        self.waiting.appendleft(sequence)
