"""The KV books: prefixes found and shared, room taken back, and every sum right whatever happens."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.kv.slots import DIGEST_BLOCK, SlotKv, block_digests
from engine.runners.kv_books import KvBooks


class Store:
    """A runner's rows: what tokens each really holds, and a second set of books."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.books = KvBooks(rows, tokens, 10_000)
        self.rows: list[list[int]] = [[] for _ in range(rows)]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.books.copy(source, target, num_tokens)
        self.rows[target] = self.rows[source][:num_tokens]

    def trim(self, row: int, num_tokens: int) -> None:
        self.books.trim(row, num_tokens)
        del self.rows[row][num_tokens:]

    def compute(self, kv: SlotKv, row: int, tokens: list[int]) -> None:
        """What a forward pass does."""
        import numpy as np

        from engine.runners import StepInput

        size = len(self.rows[row])
        step = StepInput(
            np.array(tokens, np.int32),
            np.arange(size, size + len(tokens), dtype=np.int32),
            np.full(len(tokens), row, np.int32),
            np.zeros(len(tokens), np.bool_),
        )
        self.books.append(self.books.check(step, 1000, 1000))
        self.rows[row] += tokens
        kv.extend(row, tokens)


def world(rows: int = 4, tokens: int = 100) -> tuple[SlotKv, Store]:
    store = Store(rows, tokens)
    return SlotKv(store, num_rows=rows, num_tokens=tokens), store


def begin(kv: SlotKv, store: Store, tokens: list[int], salt: str = "") -> tuple[int, int]:
    """Seat a prompt and compute what is missing; (row, cached tokens)."""
    seat = kv.acquire(tokens, salt, len(tokens) - 1)
    assert seat is not None
    rest = tokens[seat.num_cached :]
    assert kv.reserve(len(rest))
    store.compute(kv, seat.row, rest)
    kv.check()
    return seat.row, seat.num_cached


def test_a_finished_prompt_is_reused_in_place() -> None:
    kv, store = world()
    row, _ = begin(kv, store, [1, 2, 3, 4])
    kv.release(row, keep=True)
    assert begin(kv, store, [1, 2, 3, 4, 5]) == (row, 4)
    assert (kv.num_used, kv.num_cached, kv.num_free) == (5, 0, 95)


def test_one_token_is_always_left_to_compute() -> None:
    kv, store = world()
    row, _ = begin(kv, store, [1, 2, 3])
    kv.release(row, keep=True)
    assert begin(kv, store, [1, 2, 3])[1] == 2


def test_a_running_prefix_is_shared_and_counted_once() -> None:
    kv, store = world()
    first, _ = begin(kv, store, [1, 2, 3, 4])
    second, cached = begin(kv, store, [1, 2, 9])
    assert cached == 2 and second != first
    assert kv.num_used == store.books.used == 5
    kv.release(first, keep=False)
    kv.check()
    assert kv.num_used == store.books.used == 3
    assert store.rows[second] == [1, 2, 9]


def test_a_fork_shares_everything_until_it_differs() -> None:
    kv, store = world()
    first, _ = begin(kv, store, [1, 2, 3])
    second = kv.fork(first)
    assert second is not None and kv.num_used == 3
    store.compute(kv, first, [4])
    store.compute(kv, second, [5])
    kv.check()
    assert kv.num_used == store.books.used == 5


def test_salts_never_meet() -> None:
    kv, store = world()
    begin(kv, store, [1, 2, 3, 4], salt="a")
    assert begin(kv, store, [1, 2, 3, 4], salt="b")[1] == 0
    assert begin(kv, store, [1, 2, 3, 4])[1] == 0
    assert begin(kv, store, [1, 2, 3, 4], salt="a")[1] == 3


def test_the_oldest_cached_row_makes_room_first() -> None:
    kv, store = world(rows=3, tokens=100)
    for start in (10, 20, 30):
        row, _ = begin(kv, store, [start, start + 1, start + 2])
        kv.release(row, keep=True)
    assert kv.match([10, 11, 12], "") == 3
    begin(kv, store, [10, 11, 12, 13])
    begin(kv, store, [40, 41])
    assert kv.match([20, 21, 22], "") == 0 and kv.match([30, 31, 32], "") == 3


def test_room_is_taken_from_the_end_of_a_long_cached_row() -> None:
    kv, store = world(rows=3, tokens=300)
    row, _ = begin(kv, store, list(range(250)))
    kv.release(row, keep=True)
    begin(kv, store, [900 + i for i in range(60)])
    assert 0 < kv.match(list(range(250)), "") < 250
    kv.check()


def test_running_rows_are_never_evicted() -> None:
    kv, store = world(rows=2, tokens=10)
    begin(kv, store, [1, 2, 3, 4, 5, 6])
    assert kv.room() == 4 and not kv.reserve(5) and kv.reserve(4)
    begin(kv, store, [7, 8])
    assert kv.acquire([9], "", 0) is None


def test_digests_name_prefixes_by_whole_blocks() -> None:
    kv, store = world(rows=4, tokens=1000)
    prompt = [i % 7 for i in range(2 * DIGEST_BLOCK + 5)]
    begin(kv, store, prompt)
    begin(kv, store, [*prompt[: DIGEST_BLOCK + 1], *range(100, 200)])
    begin(kv, store, list(range(200, 400)), salt="private")
    found = kv.digests(100)
    assert set(block_digests(prompt)) <= set(found) and len(found) == len(set(found)) == 3
    assert block_digests(prompt)[0] != block_digests(prompt)[1]
    assert len(kv.digests(2)) == 2
    changed = [*prompt]
    changed[0] += 1
    assert not set(block_digests(changed)) & set(found)


class AnyUse(RuleBasedStateMachine):
    """Random seats, forks, growth and releases over few tokens, so that prefixes meet all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.store = world(rows=5, tokens=60)
        self.running: dict[int, list[int]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), salt=st.sampled_from(["", "s"])
    )
    def seat(self, tokens: list[int], salt: str) -> None:
        seat = self.kv.acquire(tokens, salt, len(tokens) - 1)
        if seat is None:
            assert len(self.running) == 5
            return
        assert self.store.rows[seat.row] == tokens[: seat.num_cached], "another's tokens"
        assert seat.num_cached < len(tokens)
        self.running[seat.row] = tokens[: seat.num_cached]
        self._grow(seat.row, tokens[seat.num_cached :])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def grow(self, data: Any, tokens: list[int]) -> None:
        self._grow(data.draw(st.sampled_from(sorted(self.running))), tokens)

    def _grow(self, row: int, tokens: list[int]) -> None:
        if self.kv.reserve(len(tokens)):
            self.store.compute(self.kv, row, tokens)
            self.running[row] = self.running[row] + tokens
        else:
            assert self.kv.num_cached == 0 and self.kv.num_free < len(tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)))
        target = self.kv.fork(row)
        if target is not None:
            self.running[target] = list(self.running[row])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: Any, keep: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[row]
        self.kv.release(row, keep=keep)

    @invariant()
    def books_agree(self) -> None:
        self.kv.check()
        assert self.kv.num_resident == self.store.books.used
        for row, tokens in self.running.items():
            assert self.store.rows[row] == tokens


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
