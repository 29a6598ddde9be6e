"""Many random requests, some given up on the way: no KV, seat or memory is lost, no ending is said twice.

CANDOR_TEST_SCALE multiplies the number of requests; 20 is the full size (20,000 tiny ones for memory).
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path

import pytest

from engine.core.engine import Engine
from engine.core.types import Delta, Failed, Finished, Request, SamplingParams, StoppingParams
from engine.runners.synthetic import SyntheticRunner
from tests.fakes.exactness import fresh, scaled, synthetic
from tokenizer_svc.codec import Codec, open_codec

pytestmark = pytest.mark.model

SLOTS = 8
CROWD = 24
"""Most requests that are under way at the same time."""


@pytest.fixture(scope="module")
def codec(model_path: Path) -> Codec:
    return open_codec(model_path)


class Crowd:
    """Random requests on one engine, and what became of each."""

    def __init__(self, runner: SyntheticRunner, codec: Codec, seed: int, longest: int) -> None:
        self.runner = runner
        self.engine: Engine = fresh(runner, codec, slots=SLOTS, token_budget=96)
        self.rng = random.Random(seed)
        self.longest = longest
        self.alive: dict[int, list[int]] = {}
        """Per request under way, how often each of its choices has ended."""
        self.num_made = self.num_aborted = self.num_finished = 0
        self._prefixes = [tuple(self.rng.choices(range(500, 900), k=48)) for _ in range(4)]

    def go(self, count: int) -> None:
        """So many requests from the first to the last event; idle at the end."""
        until = self.num_made + count
        while self.num_made < until or self.engine.has_work:
            room = min(CROWD - len(self.alive), until - self.num_made)
            for _ in range(self.rng.randint(0, room)):
                self._submit()
            self._step()
            if self.alive and self.rng.random() < 0.06:
                self._abort()
        assert not self.alive, "requests without an ending"

    def assert_idle(self) -> None:
        """Every book against every other, and against the runner's."""
        kv, load = self.engine.kv, self.engine.load
        kv.check()
        assert load.num_running == load.num_waiting == kv.num_used == load.kv_used_tokens == 0
        assert kv.num_free + kv.num_cached == kv.num_total == self.runner.kv_tokens
        assert self.runner.books.used == kv.num_resident == load.kv_cached_tokens

    def _submit(self) -> None:
        rng, key = self.rng, self.num_made
        self.num_made += 1
        n = rng.choice([1, 1, 1, 1, 2, 3])
        prefix = rng.choice(self._prefixes)[: rng.choice([0, 20, 48])]
        request = Request(
            key,
            (*prefix, *rng.choices(range(500, 900), k=rng.randint(1, 8))),
            sampling=SamplingParams(
                n=n, best_of=n, temperature=rng.choice([0.0, 1.0]), top_p=0.9, seed=key
            ),
            stopping=StoppingParams(rng.randint(1, self.longest), ignore_eos=rng.random() < 0.5),
            cache_salt=rng.choice(["", "", "", "a", f"salt {key}"]),
        )
        self.engine.submit(request)
        self.alive[key] = [0] * n

    def _step(self) -> None:
        for event in self.engine.step()[0]:
            assert event.key in self.alive, f"said about a request that is over: {event}"
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                assert self.alive[event.key][event.choice] == 0, "said behind a choice's end"
                self.alive[event.key][event.choice] += event.end is not None
            if isinstance(event, Finished):
                assert set(self.alive.pop(event.key)) == {1}
                self.num_finished += 1

    def _abort(self) -> None:
        key = self.rng.choice(list(self.alive))
        del self.alive[key]
        self.engine.abort(key)
        self.num_aborted += 1


def test_nothing_is_lost_among_aborts_and_preemptions(model_path: Path, codec: Codec) -> None:
    runner = synthetic(model_path, kv_tokens=288, max_model_len=128, max_rows=12)
    crowd = Crowd(runner, codec, seed=1, longest=60)
    for _ in range(5):
        crowd.go(scaled(30))
        crowd.assert_idle()
    totals = crowd.engine.load.totals
    print(f"{crowd.num_finished} finished, {crowd.num_aborted} aborted, {totals}")
    assert crowd.num_finished + crowd.num_aborted == crowd.num_made
    assert crowd.num_aborted > scaled(5) and totals.num_preemptions > scaled(5)
    assert totals.cached_tokens > crowd.num_made and totals.num_failed_steps == 0
    # Every seat can still be had at the same time.
    for key in range(SLOTS):
        crowd.engine.submit(Request(-1 - key, (7, key), stopping=StoppingParams(9)))
    crowd.engine.step()
    assert crowd.engine.load.num_running == SLOTS


def test_memory_stays_flat(model_path: Path, codec: Codec) -> None:
    crowd = Crowd(
        synthetic(model_path, kv_tokens=1024, max_model_len=128), codec, seed=2, longest=4
    )
    portion = scaled(1000) // 5
    crowd.go(portion)  # caches and pools take their size
    before_rss = resident_kib()
    tracemalloc.start()
    try:
        crowd.go(portion)
        before = held_bytes()
        for _ in range(3):
            crowd.go(portion)
            crowd.assert_idle()
        after = held_bytes()
    finally:
        tracemalloc.stop()
    after_rss = resident_kib()
    print(
        f"{crowd.num_made} requests: python {before / 1024:.0f} to {after / 1024:.0f} KiB, "
        f"resident {before_rss} to {after_rss} KiB; {crowd.engine.load.totals}"
    )
    # One request's prompt and answer alone are some KiB: a leak of one in ten would show.
    assert after - before < 64 * 1024
    assert crowd.num_finished + crowd.num_aborted == crowd.num_made


def held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def resident_kib() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])
