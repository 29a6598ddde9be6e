"""The index of cached prefixes, against the workers' own hashes and a plain model of what they hold."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.core.kv.slots import block_digests as engine_digests
from scheduler.core import POLICIES, Scheduler, Worker
from scheduler.core.prefixes import MAX_PROMPT_BLOCKS, PrefixIndex, block_digests
from scheduler.core.types import (
    Dispatch,
    Limits,
    Load,
    Model,
    Report,
    Request,
    WorkerSpec,
    WorkerState,
)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_prompts_are_hashed_as_the_workers_hash_them(ids: list[int]) -> None:
    assert list(block_digests(ids)) == engine_digests(ids)


def test_salts_share_nothing_and_long_prompts_are_cut() -> None:
    ids = range(64 * 3 + 5)
    plain, salted = block_digests(ids), block_digests(ids, "s")
    assert len(plain) == len(salted) == 3 and not set(plain) & set(salted)
    assert salted == block_digests(ids, "s") != block_digests(ids, "t")
    assert len(block_digests([1] * 64 * (MAX_PROMPT_BLOCKS + 9))) == MAX_PROMPT_BLOCKS


def touch(index: PrefixIndex, number: int, *digests: int, salted: bool = False) -> None:
    index.touch(number, digests, is_salted=salted, capacity=0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 6)), max_size=40))
def test_it_finds_what_a_plain_search_finds(touches: list[tuple[int, int, int]]) -> None:
    index = PrefixIndex(max_blocks=8)
    for number, family, length in touches:
        touch(index, number, *(family * 10 + n for n in range(length)))
        index.check()
        for wanted in range(6):
            chain = [wanted * 10 + n for n in range(7)]
            for mask in (1, 2, 5, -1):
                held = [bool(index.holders(chain, n + 1) & mask) for n in range(7)]
                leading = held.index(False) if False in held else 7
                assert not any(held[leading:])  # prefixes are closed
                assert index.longest(chain, mask) == leading


def test_a_worker_forgets_the_ends_of_the_oldest_prompts_first() -> None:
    index = PrefixIndex(max_blocks=4)
    touch(index, 0, 1, 2, 3)
    touch(index, 0, 7, 8)
    assert index.longest([1, 2, 3], 1) == 2
    index.touch(0, [7, 8], is_salted=False, capacity=2)
    assert index.longest([1, 2, 3], 1) == 0 and index.longest([7, 8], 1) == 2


def test_reports_correct_what_was_believed() -> None:
    index = PrefixIndex(max_blocks=100)
    touch(index, 0, 1, 2)
    touch(index, 0, 3, 4)
    touch(index, 0, 5, salted=True)
    touch(index, 0, 6)
    index.correct(0, [1, 9], running=[6])
    index.check()
    held = [d for d in range(1, 10) if index.longest([d], 1)]
    assert held == [1, 5, 6, 9]  # named, of a salt, just placed, news
    index.correct(0, list(range(1000, 1600)), running=[])
    assert index.longest([1], 1) == 1  # a list of that length proves no absence
    index.drop(0)
    assert index.num_blocks == 0


MODEL = Model("m", max_model_len=100_000, vocab_size=10)


def machine(policy: str = "expected_wait", workers: int = 3, **limits: Any) -> Scheduler:
    core = Scheduler(Limits(**limits), POLICIES[policy].make(), random.Random(3))
    for n in range(workers):
        attach(core, f"w{n}")
    return core


def attach(core: Scheduler, worker_id: str, *cached: int) -> Worker:
    worker, _ = core.worker_registered(0.0, WorkerSpec(worker_id, "i", MODEL, 8))
    core.worker_linked(0.0, worker)
    report(core, worker, *cached)
    return worker


def report(core: Scheduler, worker: Worker, *cached: int) -> None:
    load = Load(kv_total_tokens=64_000, prefill_rate=1000.0)
    said = Report(WorkerState.READY, 0, True, load, cached)
    core.worker_reported(0.0, worker, said)


def place(core: Scheduler, request_id: str, digests: tuple[int, ...], **fields: Any) -> str:
    tokens = 64 * len(digests) + 10
    actions = core.submit(
        0.0, Request(request_id, "m", tokens, tokens + 1, prefix_digests=digests, **fields)
    )
    (dispatch,) = [a for a in actions if isinstance(a, Dispatch)]
    return dispatch.worker.worker_id


def end(core: Scheduler, *ids: str) -> None:
    for request_id in ids:
        record = core.find(request_id)
        assert record is not None
        core.request_finished(1.0, record)


def test_a_prompt_goes_where_its_beginning_is_and_counts_as_short() -> None:
    core = machine()
    home = place(core, "a", (1, 2, 3))
    first = core.find("a")
    assert first is not None
    core.request_showed_token(0.0, first)
    assert place(core, "b", (1, 2, 9)) == home
    assert core.pool.workers[home].pending_prefill_tokens == 74
    assert place(core, "c", (7, 8, 9)) != home


def test_a_hot_prefix_spreads_when_its_worker_is_busy() -> None:
    core = machine()
    where = [place(core, f"r{n}", tuple(range(1, 5))) for n in range(18)]
    assert len(set(where)) == 3


def test_reports_move_placement_and_a_lost_worker_is_forgotten() -> None:
    core = machine()
    home = place(core, "a", (1, 2, 3))
    end(core, "a")
    other = next(i for i in core.pool.workers if i != home)
    report(core, core.pool.workers[home], 50)
    report(core, core.pool.workers[other], 1, 2, 3)
    assert place(core, "b", (1, 2, 3)) == other
    core.worker_lost(0.0, core.pool.workers[other], "x")
    assert core.placer.prefixes.longest([1, 2, 3], -1) == 3  # "b" went on elsewhere
    core.worker_lost(0.0, core.pool.workers[home], "x")
    core.placer.prefixes.check()


def test_hashing_keeps_prefixes_together_within_the_bound() -> None:
    core = machine("bounded_hash", workers=4)
    homes = {place(core, f"{p}", (p, p + 1, p + 2, p + 3)) for p in range(100, 1000, 200)}
    assert len(homes) > 1
    end(core, *(f"{p}" for p in range(100, 1000, 200)))
    hot = [place(core, f"h{n}", (1, 2, 3, 4)) for n in range(16)]
    seats = [w.seats_used for w in core.pool.workers.values()]
    assert max(seats) <= 5 and sum(seats) == 16  # 1.25 times the mean of four
    assert len(set(hot[:1])) == 1


def test_losing_a_card_moves_only_its_share_of_the_prefixes() -> None:
    def homes(core: Scheduler) -> dict[int, str]:
        found = {}
        for p in range(300):
            found[p] = place(core, f"p{p}", (10_000 + 97 * p,))
            end(core, f"p{p}")
        return found

    core = machine("bounded_hash", workers=5)
    before = homes(core)
    core.worker_lost(0.0, core.pool.workers["w4"], "x")
    after = homes(core)
    moved = {p for p in before if before[p] != after[p]}
    assert moved == {p for p, home in before.items() if home == "w4"}
    assert len(moved) < 300 / 5 * 1.6


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_many_free_workers_are_sampled_and_the_holder_is_among_them(policy: str) -> None:
    core = machine(policy, workers=200)
    home = place(core, "a", (1, 2, 3))
    end(core, "a")
    again = place(core, "b", (1, 2, 3))
    if policy == "expected_wait":
        assert again == home
