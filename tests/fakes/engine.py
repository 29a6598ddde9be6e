"""A runner that says what it is told, a vocabulary of bytes, and a driver for engines without a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.core.engine import Engine
from engine.core.types import Delta, Event, Failed, Finished, PromptScored, Request, TokenScores
from engine.runners import StepInput
from engine.runners.kv_books import KvBooks
from tokenizer_svc.vocabulary import Vocabulary

EOS, EXTRA_EOS, MARKER = 256, 257, 258
VOCAB = 259
_SPECIAL = {EOS: b"</s>", EXTRA_EOS: b"<|end|>", MARKER: b"<|marker|>"}


class ByteCodec(Vocabulary):
    """Every byte is a token; three special tokens behind them."""

    def __init__(self) -> None:
        super().__init__(
            pieces=[bytes([i]) for i in range(256)] + list(_SPECIAL.values()),
            base_vocab_size=256,
            special_ids=frozenset(_SPECIAL),
            eos_ids=(EOS, EXTRA_EOS),
            bos_id=None,
            prefix_ids=(),
            suffix_ids=(),
            strips_leading_space=False,
            chat_template=None,
            fingerprint="bytes",
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Bytes as ids."""
        return list(text.encode())


Voice = Callable[[Sequence[int]], Sequence[float]]
"""The logits behind a row's tokens."""


def peak(token: int, height: float = 10.0) -> NDArray[np.float32]:
    """Logits with one clear favourite."""
    logits = np.linspace(0.0, -1.0, VOCAB, dtype=np.float32)
    logits[token] = height
    return logits


def says(
    answers: dict[bytes, Iterable[int]], otherwise: int = EOS
) -> Callable[..., NDArray[np.float32]]:
    """A voice that answers each prompt with a fixed run of tokens, then with `otherwise`."""
    known = {prompt: list(tokens) for prompt, tokens in answers.items()}

    def voice(token_ids: Sequence[int]) -> NDArray[np.float32]:
        for prompt, tokens in known.items():
            if list(token_ids[: len(prompt)]) == list(prompt):
                done = len(token_ids) - len(prompt)
                return peak(tokens[done] if done < len(tokens) else otherwise)
        return peak(otherwise)

    return voice


def noise(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits that depend on all of a row's tokens, and on nothing else."""
    seed = hash(tuple(token_ids)) & 0xFFFFFFFF
    logits = np.random.Generator(np.random.PCG64(seed)).standard_normal(VOCAB) * 3
    # Text stays text: bytes of plain letters, and now and then an end.
    logits[:97] -= 20
    logits[123:] -= 20
    return logits.astype(np.float32)


@dataclass
class ScriptedRunner:
    """Keeps real KV books, so a mistake of the engine's shows as an error or as another text."""

    voice: Callable[[Sequence[int]], NDArray[np.float32]] = noise
    name: str = "scripted"
    vocab_size: int = VOCAB
    max_model_len: int = 512
    max_rows: int = 16
    kv_tokens: int = 2048
    max_batch_tokens: int = 64
    is_batch_invariant: bool = True
    before_forward: Callable[[StepInput], None] | None = None
    num_forwards: int = 0
    computed: list[int] = field(default_factory=list)
    """Tokens of each forward pass."""

    def __post_init__(self) -> None:
        self.books = KvBooks(self.max_rows, self.kv_tokens, self.max_model_len)
        self.tokens: list[list[int]] = [[] for _ in range(self.max_rows)]

    def forward(self, step: StepInput) -> NDArray[np.float32]:
        """See the protocol."""
        if self.before_forward is not None:
            self.before_forward(step)
        runs = self.books.check(step, self.vocab_size, self.max_batch_tokens)
        self.num_forwards += 1
        self.computed.append(len(step.token_ids))
        out = []
        for token, row, wants in zip(
            step.token_ids.tolist(), step.rows.tolist(), step.wants_logits.tolist(), strict=True
        ):
            self.tokens[row].append(token)
            if wants:
                out.append(self.voice(self.tokens[row]))
        self.books.append(runs)
        return np.array(out, dtype=np.float32).reshape(len(out), self.vocab_size)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """See the protocol."""
        self.books.copy(source, target, num_tokens)
        self.tokens[target] = self.tokens[source][:num_tokens]

    def trim(self, row: int, num_tokens: int) -> None:
        """See the protocol."""
        self.books.trim(row, num_tokens)
        del self.tokens[row][num_tokens:]

    def close(self) -> None:
        """Nothing to release."""


class Ticks:
    """A clock that counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Outcome:
    """Everything that was said about one request."""

    events: list[Event] = field(default_factory=list)

    @property
    def deltas(self) -> list[Delta]:
        """All deltas."""
        return [e for e in self.events if isinstance(e, Delta)]

    def of(self, choice: int = 0) -> list[Delta]:
        """The deltas of one choice."""
        return [d for d in self.deltas if d.choice == choice]

    def text(self, choice: int = 0) -> str:
        """The joined text of a choice."""
        return "".join(d.text for d in self.of(choice))

    def tokens(self, choice: int = 0) -> list[int]:
        """The joined tokens of a choice, whose offsets must fit."""
        found: list[int] = []
        for delta in self.of(choice):
            assert delta.token_offset == len(found), "a hole or an overlap"
            found += delta.token_ids
        return found

    def scores(self, choice: int = 0) -> list[TokenScores]:
        """The joined scores of a choice."""
        return [s for d in self.of(choice) for s in d.scores]

    def reason(self, choice: int = 0) -> tuple[str, int | str | None]:
        """Why a choice ended; it must have ended once, with its last delta."""
        ends = [d.end for d in self.of(choice) if d.end is not None]
        assert len(ends) == 1 and self.of(choice)[-1].end is ends[0], ends
        return str(ends[0].reason), ends[0].cause

    @property
    def finished(self) -> Finished:
        """The last event, which must be the only ending."""
        endings = [e for e in self.events if isinstance(e, Finished | Failed)]
        assert len(endings) == 1 and self.events[-1] is endings[0], endings
        assert isinstance(endings[0], Finished), endings[0]
        return endings[0]

    @property
    def error(self) -> Exception:
        """Why it failed."""
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last.error

    @property
    def prompt_scores(self) -> tuple[TokenScores | None, ...]:
        """The scores of the prompt, which come once and before every delta."""
        found = [i for i, e in enumerate(self.events) if isinstance(e, PromptScored)]
        assert len(found) == 1, found
        assert not any(isinstance(e, Delta) for e in self.events[: found[0]])
        scored = self.events[found[0]]
        assert isinstance(scored, PromptScored)
        return scored.positions


def make_engine(
    runner: ScriptedRunner | None = None,
    *,
    slots: int = 4,
    token_budget: int = 64,
    mixed_budget: int = 32,
) -> Engine:
    """An engine over bytes."""
    return Engine(
        runner or ScriptedRunner(),
        ByteCodec(),
        slots=slots,
        token_budget=token_budget,
        mixed_budget=mixed_budget,
        clock=Ticks(),
    )


def run(engine: Engine, *requests: Request, max_steps: int = 5000) -> dict[int, Outcome]:
    """Submit, step until nothing is left to do, check the books."""
    for request in requests:
        engine.submit(request)
    return drive(engine, max_steps=max_steps)


def drive(engine: Engine, *, max_steps: int = 5000) -> dict[int, Outcome]:
    """Step until nothing is left to do; what was said, by request."""
    outcomes: dict[int, Outcome] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            engine.kv.check()
            assert engine.load.num_running == engine.load.num_waiting == 0
            assert engine.load.kv_used_tokens == 0, "a row was not given back"
            return outcomes
        for event in engine.step()[0]:
            outcomes.setdefault(event.key, Outcome()).events.append(event)
    raise AssertionError(f"still busy after {max_steps} steps: {engine.load}")
