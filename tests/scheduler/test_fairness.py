"""Order between tenants: bounds that hold after every event, and what each policy prefers."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler.core import ORDERS, POLICIES, Scheduler
from scheduler.core.ledger import Ledger
from scheduler.core.types import Dispatch, Limits, Model, Report, Request, WorkerSpec, WorkerState
from tests.fakes.fairness import Traffic, random_trace

EVENTS = st.lists(
    st.tuples(st.sampled_from("aaab"), st.integers(1, 80), st.integers(1, 40), st.integers(0, 2))
    | st.integers(1, 30),
    max_size=60,
)


@pytest.mark.parametrize("order", ["vtc", "deficit_prefix"])
@settings(max_examples=60, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 3))
def test_served_work_of_waiting_tenants_stays_within_the_bound(
    order: str, events: list[Any], seed: int
) -> None:
    traffic = Traffic(order, seed)
    for event in events:
        if isinstance(event, int):
            for _ in range(event):
                traffic.tick()
        else:
            traffic.submit(*event)


@pytest.mark.parametrize("order", ["vtc", "deficit_prefix"])
def test_random_traces_stay_within_the_bound(order: str) -> None:
    widest = [(t.widest, t.bound) for t in (random_trace(order, seed) for seed in range(60))]
    # The bound says something: some trace comes near it.
    assert max(wide / bound for wide, bound in widest) > 0.1


def test_first_come_first_served_breaks_the_bound() -> None:
    traffic = Traffic("fcfs", 0)
    traffic.order = "vtc"  # whose bound is the yardstick
    with pytest.raises(AssertionError):
        for _ in range(200):
            traffic.submit("flood", 80, 20)
        for n in range(2000):
            if n % 100 == 0:
                traffic.submit("polite", 80, 20)
            traffic.tick()


class World:
    """One worker with one seat; `order` is the sequence in which requests got it."""

    def __init__(self, order: str, **limits: Any) -> None:
        limits.setdefault("window_slack", 0)
        self.core = Scheduler(
            Limits(**limits),
            POLICIES["expected_wait"].make(),
            random.Random(1),
            order=ORDERS[order],
        )
        model = Model("m", max_model_len=100_000, vocab_size=10)
        self.worker, _ = self.core.worker_registered(0.0, WorkerSpec("w", "i", model, 1))
        self.core.worker_linked(0.0, self.worker)
        self.core.worker_reported(0.0, self.worker, Report(WorkerState.READY, 0, True))
        self.now = 0.0

    def submit(self, request_id: str, tokens: int = 10, **fields: Any) -> None:
        self.core.submit(self.now, Request(request_id, "m", tokens, tokens + 1, **fields))

    def run(self, seconds: float = 0.0, output: int = 0) -> list[str]:
        """Finish one after the other; what ran, in order."""
        ran = []
        while self.worker.assigned:
            (record,) = self.worker.assigned.values()
            ran.append(record.request.request_id)
            if output:
                record.relay(0, 0, [1] * output)
            self.now += seconds
            actions = self.core.tick(self.now)
            if record.worker is not None:
                actions += self.core.request_finished(self.now, record)
            assert sum(isinstance(a, Dispatch) for a in actions) <= 1
        return ran


def test_vtc_serves_whoever_was_served_least() -> None:
    world = World("vtc")
    for n in range(4):
        world.submit(f"a{n}", tenant="a")
    world.submit("b0", tenant="b", tokens=25)
    world.submit("b1", tenant="b")
    # a has 10 for a0 and b starts level; then a1 20, b0 35, a2 30, a3 40, and b1 is last.
    assert world.run() == ["a0", "a1", "b0", "a2", "a3", "b1"]


def test_output_is_charged_double_and_cached_input_not_at_all() -> None:
    world = World("vtc")
    world.submit("x", tokens=200, tenant="a", prefix_digests=(1, 2, 3))
    world.run(output=5)
    account = world.core.ledgers.of("m").account("a")
    assert (account.input_tokens, account.work) == (200, 210)
    world.submit("y", tokens=200, tenant="a", prefix_digests=(1, 2, 9))
    assert account.input_tokens == 272
    record = world.core.find("y")
    assert record is not None
    world.core.request_started(record, 100)  # the worker found less than was believed: 28 more
    assert account.input_tokens == 300
    account.correct(-50)
    account.charge(60)
    assert account.input_tokens == 310


def test_a_tenant_with_twice_the_weight_gets_twice_the_work() -> None:
    ledger = Ledger(10, 100.0, lambda tenant: 2.0 if tenant == "b" else 1.0)
    for tenant in ("a", "b"):
        ledger.queued(ledger.account(tenant))
    for tenant in ("a", "b"):
        ledger.account(tenant).charge(100)
    assert (ledger.account("a").counter, ledger.account("b").counter) == (100, 50)


def test_idleness_earns_nothing() -> None:
    world = World("vtc")
    world.submit("b", tenant="b")
    for n in range(10):
        world.submit(f"a{n}", tenant="a")
    for _ in range(8):
        (record,) = world.worker.assigned.values()
        world.core.request_finished(0.0, record)
    for n in range(4):
        world.submit(f"c{n}", tenant="c")  # new: starts level with a, not at zero
    assert world.run()[1:4] == ["a8", "c0", "a9"]


def test_deficit_prefers_the_longest_cached_prefix_within_a_round() -> None:
    world = World("deficit_prefix", quantum=1000)
    world.submit("warm", tokens=200, tenant="a", prefix_digests=(1, 2, 3))
    world.submit("cold", tokens=200, tenant="a", prefix_digests=(7, 8, 9))
    world.submit("half", tokens=200, tenant="b", prefix_digests=(1, 2, 8))
    world.submit("whole", tokens=200, tenant="b", prefix_digests=(1, 2, 3))
    assert world.run() == ["warm", "whole", "half", "cold"]


def test_a_spent_deficit_ends_the_preference() -> None:
    world = World("deficit_prefix", quantum=150)
    world.submit("warm", tokens=200, tenant="a", prefix_digests=(1, 2, 3))
    for n in range(3):
        world.submit(f"a{n}", tokens=200, tenant="a", prefix_digests=(1, 2, 3))
    world.submit("b0", tokens=200, tenant="b")
    assert world.run()[1] == "b0"  # a has had its round


@pytest.mark.parametrize("order", ["vtc", "deficit_prefix"])
def test_the_earliest_deadline_first_inside_a_tenant(order: str) -> None:
    world = World(order)
    world.submit("running")
    world.submit("none")
    world.submit("late", deadline_at=90.0)
    world.submit("soon", first_token_by=50.0, deadline_at=95.0)
    assert world.run() == ["running", "soon", "late", "none"]


def test_a_deadline_buys_no_more_than_the_share() -> None:
    world = World("deficit_prefix", quantum=15, lease_s=1e6)
    for n in range(4):
        world.submit(f"a{n}", tenant="a", deadline_at=100.0)
    world.submit("b0", tenant="b")
    world.now = 60.0  # all of a's are pressing
    assert world.run()[:3] == ["a0", "a1", "b0"]


def test_what_is_pressing_comes_before_what_is_cached() -> None:
    world = World("deficit_prefix", quantum=10_000)
    world.submit("warm", tokens=200, prefix_digests=(1, 2, 3))
    world.submit("pressing", tokens=200, tenant="b", first_token_by=10.0)
    world.submit("cached", tokens=200, prefix_digests=(1, 2, 3))
    assert world.run(seconds=6.0) == ["warm", "pressing", "cached"]


def test_whoever_waits_long_enough_comes_first_and_moves_up() -> None:
    world = World("deficit_prefix", quantum=10_000, age_s=5.0, lease_s=1e6)
    world.submit("warm", tokens=200, prefix_digests=(1, 2, 3))
    world.submit("cold", tokens=200, prefix_digests=(9,))
    world.submit("background", tokens=200, prefix_digests=(9,), priority=5)
    for n in range(6):
        world.submit(f"hot{n}", tokens=200, prefix_digests=(1, 2, 3))
    # From 5 s on all are old: one pick in four is the oldest, the others still look at prefixes.
    assert world.run(seconds=3.0) == [
        "warm", "hot0", "cold", "hot1", "hot2", "hot3", "background", "hot4", "hot5",
    ]  # fmt: skip


def test_a_flood_of_priorities_cannot_hold_up_the_last_class() -> None:
    world = World("vtc", age_s=2.0, lease_s=1e6, max_queued_requests=10_000)
    world.submit("running")
    world.submit("last", priority=3)
    ran: list[str] = []
    for n in range(40):
        for priority in (0, 1, 2):
            world.submit(f"p{priority}.{n}", priority=priority)
        (record,) = world.worker.assigned.values()
        ran.append(record.request.request_id)
        world.now += 1.0
        world.core.tick(world.now)
        world.core.request_finished(world.now, record)
    assert "last" in ran


def test_positions_assume_that_tenants_take_turns() -> None:
    world = World("vtc")
    world.submit("running")
    for n in range(10):
        world.submit(f"a{n}", tenant="a")
    world.submit("b0", tenant="b")
    world.submit("b1", tenant="b")
    positions = {}
    for request_id in ("a0", "a9", "b0", "b1"):
        record = world.core.find(request_id)
        assert record is not None
        positions[request_id] = world.core.queue.position(record)
    assert positions == {"a0": 2, "a9": 12, "b0": 2, "b1": 4}


def test_idle_accounts_are_bounded() -> None:
    world = World("vtc", max_tenants=3)
    for n in range(20):
        world.submit(f"r{n}", tenant=f"t{n}")
        world.run()
    assert world.core.ledgers.of("m").num_accounts == 3
