"""Random lives: whatever requests do and suffer, no KV position, no row and no memory is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.types import (
    Constraint,
    Failed,
    Finished,
    OutputOptions,
    Request,
    SamplingParams,
    StoppingParams,
)
from engine.runners.synthetic import SyntheticRunner
from tests.fakes.proofs import new_engine, size, synthetic
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model
PAGE = 4096


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


@pytest.fixture(scope="module")
def grammars(codec: Codec) -> Grammars:
    return Grammars(codec, codec.vocab_size)


@dataclass
class Life:
    """Keeps an engine busy with random requests, some of which are given up."""

    engine: Engine
    grammars: Grammars
    rng: random.Random
    longest: int = 40
    num_finished: int = 0
    num_cancelled: int = 0
    next_key: int = 0

    def __post_init__(self) -> None:
        self.alive: set[int] = set()
        self.stems = [tuple(self.rng.choices(range(100, 900), k=60)) for _ in range(5)]

    def submit(self) -> None:
        rng = self.rng
        self.next_key += 1
        stem = rng.choice(self.stems)
        n = rng.choice([1, 1, 1, 1, 2, 3])
        request = Request(
            self.next_key,
            (
                *stem[: rng.randint(1, len(stem))],
                *rng.choices(range(100, 900), k=rng.randint(0, 9)),
            ),
            sampling=SamplingParams(
                n=n,
                best_of=n,
                temperature=rng.choice([0.0, 0.0, 0.0, 1.0]),
                presence_penalty=rng.choice([0, 0, 1.0]),
                seed=self.next_key,
                # Repeats itself, so that there is something to draft.
                logit_bias=rng.choice([(), (), (), ((500, 22.0), (501, 21.0))]),
            ),
            stopping=StoppingParams(rng.randint(1, self.longest), ignore_eos=rng.random() < 0.5),
            output=OutputOptions(prompt_logprobs=0 if rng.random() < 0.03 else None),
            constraint=Constraint("regex", "[a-z ]{3,60}") if rng.random() < 0.05 else None,
            cache_salt=rng.choice(["", "", "", "salt"]),
        )
        matcher = self.grammars.compile(request.constraint) if request.constraint else None
        self.engine.submit(request, matcher)
        self.alive.add(self.next_key)

    def step(self) -> None:
        for event in self.engine.step()[0]:
            assert event.key in self.alive, "something was said about a request that is gone"
            assert not isinstance(event, Failed), event
            if isinstance(event, Finished):
                self.num_finished += 1
                self.alive.remove(event.key)

    def cancel(self) -> None:
        if self.alive:
            key = self.rng.choice(sorted(self.alive))
            self.alive.remove(key)
            self.engine.abort(key)
            self.num_cancelled += 1

    def live(self, num_requests: int) -> None:
        """Busy for so many requests, then idle."""
        for _ in range(num_requests):
            self.submit()
            while len(self.alive) > self.rng.randint(1, 20):
                self.step()
                if self.rng.random() < 0.06:
                    self.cancel()
        while self.engine.has_work:
            self.step()
        assert not self.alive

    def assert_idle_books(self) -> None:
        """Every count against every other, the runner's own included."""
        kv, load = self.engine.kv, self.engine.load
        kv.check()
        assert (load.num_running, load.num_waiting, load.kv_used_tokens) == (0, 0, 0)
        assert kv.num_free + kv.num_cached == kv.num_total
        runner = self.engine._runner
        assert isinstance(runner, SyntheticRunner)
        assert runner.books.used == kv.num_cached


def test_books_are_exact_whenever_the_engine_is_idle(
    model_path: Path, codec: Codec, grammars: Grammars
) -> None:
    runner = synthetic(model_path, kv_tokens=320, max_model_len=256)
    life = Life(new_engine(runner, codec), grammars, random.Random(1))
    wanted = size(500, 1000)
    for _ in range(wanted // 25):
        life.live(25)
        life.assert_idle_books()
    totals = life.engine.load.totals
    assert life.num_finished + life.num_cancelled == wanted
    assert life.num_cancelled > wanted // 50 and totals.num_preemptions > wanted // 50
    assert totals.cached_tokens > 5 * wanted and totals.accepted_tokens > 0
    print(f"{life.num_finished} finished, {life.num_cancelled} cancelled, {totals}")
    # Every row can still be had: as many requests as there are slots run at the same time.
    for _ in range(8):
        life.engine.submit(Request(life.next_key + 1, (1, 2, 3), stopping=StoppingParams(9)))
        life.next_key += 1
    life.engine.step()
    life.engine.step()
    assert life.engine.load.num_running == 8


def test_memory_does_not_grow_with_the_requests_served(
    model_path: Path, codec: Codec, grammars: Grammars
) -> None:
    runner = synthetic(model_path, kv_tokens=2048, max_model_len=256)
    life = Life(new_engine(runner, codec), grammars, random.Random(2), longest=12)
    # The runner's room for logits grows to the largest step there can be: have that one now.
    scored = OutputOptions(prompt_logprobs=0)
    for key in (-1, -2, -3):
        life.engine.submit(
            Request(key, tuple(range(200)), output=scored, stopping=StoppingParams(0))
        )
        life.alive.add(key)
    wanted = size(3000, 20_000)
    life.live(wanted // 5)
    sampled = [resident_mib()]
    for _ in range(8):
        life.live(wanted // 10)
        life.assert_idle_books()
        sampled.append(resident_mib())
    print(life.engine.load.totals)
    print("resident MiB:", *(f"{mib:.1f}" for mib in sampled))
    assert max(sampled[5:]) < max(sampled[:4]) + 2.0, sampled


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20
