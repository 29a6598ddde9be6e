"""A modelled card: what a step takes, what it computes, what stays cached. Knows no scheduler.

Step time = a + b × prefill tokens + c × decoding sequences; decodes first, then prefill in chunks up to a token
budget, as the engine does it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from scheduler.core.prefixes import BLOCK_TOKENS

_DECAY = 0.9
"""Of the measured prefill rate, per step with prefill."""


@dataclass(frozen=True, slots=True)
class CardModel:
    """How fast and how large a card is."""

    step_s: float = 0.010
    prefill_s: float = 0.0001
    """Per prefill token of a step."""
    decode_s: float = 0.00005
    """Per decoding sequence of a step."""
    token_budget: int = 512
    slots: int = 32
    kv_tokens: int = 65_536
    slowness: float = 1.0
    """Factor on every time."""


@dataclass(slots=True, eq=False)
class CardSequence:
    """One request on a card."""

    handle: int
    prompt_tokens: int
    output_tokens: int
    digests: tuple[int, ...]
    prompt_left: int = 0
    output_left: int = 0
    cached_tokens: int = 0
    was_seen: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the step under way computes."""

    duration_s: float
    decoding: list[CardSequence]
    prefill: list[tuple[CardSequence, int]]


@dataclass(slots=True, eq=False)
class Card:
    """State of one card between steps."""

    model: CardModel
    waiting: deque[CardSequence] = field(default_factory=deque)
    running: list[CardSequence] = field(default_factory=list)
    busy_s: float = 0.0
    num_steps: int = 0
    computed_tokens: int = 0
    _cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _kv_used: int = 0
    _rate_tokens: float = 0.0
    _rate_s: float = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.running or self.waiting)

    @property
    def kv_used(self) -> int:
        """Tokens that running sequences hold or will hold."""
        return self._kv_used

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second over the lately computed prompts, as a worker measures it."""
        return self._rate_tokens / self._rate_s if self._rate_s else None

    def digests(self, limit: int) -> tuple[int, ...]:
        """What is cached, the most recent first."""
        return tuple(d for d, _ in zip(reversed(self._cache), range(limit), strict=False))

    def cancel(self, handle: int) -> None:
        """Drop a sequence from wherever it is."""
        for sequence in self.running:
            if sequence.handle == handle:
                self._free(sequence)
                return
        self.waiting = deque(s for s in self.waiting if s.handle != handle)

    def plan(self) -> StepPlan:
        """Begin a step: decodes, then prompts under way, then new ones while budget is left."""
        decoding = [s for s in self.running if not s.prompt_left]
        left = self.model.token_budget - len(decoding)
        prefill: list[tuple[CardSequence, int]] = []
        for sequence in self.running:
            if sequence.prompt_left and left > 0:
                size = min(sequence.prompt_left, left)
                prefill.append((sequence, size))
                left -= size
        while left > 0 and (new := self._admit()) is not None:
            size = min(new.prompt_left, left)
            prefill.append((new, size))
            left -= size
        num_tokens = sum(size for _, size in prefill)
        m = self.model
        duration = m.step_s + m.prefill_s * num_tokens + m.decode_s * len(decoding)
        return StepPlan(duration * m.slowness, decoding, prefill)

    def finish(self, plan: StepPlan) -> list[CardSequence]:
        """The step is over; returns the sequences that have a new token. Those without output left are gone."""
        self.busy_s += plan.duration_s
        self.num_steps += 1
        num_tokens = 0
        grown = [s for s in plan.decoding if s.output_left]
        for sequence, size in plan.prefill:
            num_tokens += size
            if not sequence.output_left:
                continue  # cancelled while the step ran
            sequence.prompt_left -= size
            self._remember(sequence)
            if not sequence.prompt_left:
                grown.append(sequence)
        if num_tokens:
            self.computed_tokens += num_tokens
            self._rate_tokens = _DECAY * self._rate_tokens + num_tokens
            self._rate_s = _DECAY * self._rate_s + plan.duration_s
        for sequence in grown:
            sequence.output_left -= 1
            if not sequence.output_left:
                self._free(sequence)
        return grown

    def _admit(self) -> CardSequence | None:
        """The next one gets a slot, if slot and memory are there; it starts behind what is cached now."""
        if not self.waiting or len(self.running) >= self.model.slots:
            return None
        sequence = self.waiting[0]
        size = sequence.prompt_tokens + sequence.output_tokens
        if self.running and self._kv_used + size > self.model.kv_tokens:
            return None
        self.waiting.popleft()
        self._kv_used += size
        self.running.append(sequence)
        depth = 0
        for digest in sequence.digests:
            if digest not in self._cache:
                break
            depth += 1
        sequence.cached_tokens = min(depth * BLOCK_TOKENS, sequence.prompt_tokens - 1)
        sequence.prompt_left = sequence.prompt_tokens - sequence.cached_tokens
        sequence.output_left = sequence.output_tokens
        return sequence

    def _remember(self, sequence: CardSequence) -> None:
        computed = (sequence.prompt_tokens - sequence.prompt_left) // BLOCK_TOKENS
        for digest in reversed(sequence.digests[:computed]):
            self._cache[digest] = None
            self._cache.move_to_end(digest)
        while len(self._cache) > self.model.kv_tokens // BLOCK_TOKENS:
            self._cache.popitem(last=False)

    def _free(self, sequence: CardSequence) -> None:
        sequence.output_left = 0
        self.running.remove(sequence)
        self._kv_used -= sequence.prompt_tokens + sequence.output_tokens
