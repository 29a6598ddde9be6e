"""The core by hand: events in, actions out."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from candor import errors
from scheduler.core import POLICIES, Record, Scheduler, Worker
from scheduler.core.types import (
    Action,
    CancelOnWorker,
    Complete,
    Dispatch,
    DropWorker,
    Fail,
    Feature,
    Limits,
    Load,
    Model,
    ModelKind,
    NotifyQueued,
    Report,
    Request,
    Resumed,
    TellDrain,
    WorkerSpec,
    WorkerState,
)

MODEL = Model("m", ("alias",), max_model_len=100, fingerprint="f", vocab_size=1000)
RESUME = frozenset({Feature.RESUME})


def machine(policy: str = "expected_wait", **limits: Any) -> Scheduler:
    return Scheduler(Limits(**limits), POLICIES[policy].make(), random.Random(1))


def attach(
    core: Scheduler,
    worker_id: str = "w1",
    *,
    now: float = 0.0,
    slots: int = 1,
    model: Model = MODEL,
    features: frozenset[Feature] = frozenset(),
    load: Load | None = None,
) -> Worker:
    """A worker that is ready; whatever it was given at once is in `assigned`."""
    spec = WorkerSpec(worker_id, "i", model, slots, features)
    worker, _ = core.worker_registered(now, spec)
    core.worker_linked(now, worker)
    core.worker_reported(now, worker, ready(load=load))
    return worker


def ready(step: int = 0, *, idle: bool = True, load: Load | None = None) -> Report:
    return Report(WorkerState.READY, step, idle, load)


def ask(request_id: str = "r", tokens: int = 3, **fields: Any) -> Request:
    fields.setdefault("context_tokens", tokens + 1)
    return Request(request_id, fields.pop("model", "m"), tokens, **fields)


def submit(core: Scheduler, *ids: str, now: float = 0.0, **fields: Any) -> list[Action]:
    return [action for i in ids for action in core.submit(now, ask(i, **fields))]


def placed(actions: Iterable[Action]) -> list[tuple[str, str]]:
    return [
        (a.record.request.request_id, a.worker.worker_id)
        for a in actions
        if isinstance(a, Dispatch)
    ]


def record(core: Scheduler, request_id: str) -> Record:
    found = core.find(request_id)
    assert found is not None
    return found


def failures(actions: Iterable[Action]) -> dict[str, errors.CandorError]:
    return {a.record.request.request_id: a.error for a in actions if isinstance(a, Fail)}


# --- window and order ---


def test_a_worker_holds_its_slots_and_the_slack_no_more() -> None:
    core = machine(window_slack=2)
    attach(core, slots=2)
    assert len(placed(submit(core, *"abcdef"))) == 4
    assert core.queue.num_requests == 2 and core.queue.num_tokens == 6


def test_first_come_first_served_within_a_priority_lower_first() -> None:
    core = machine(window_slack=0)
    attach(core)
    submit(core, "running")
    submit(core, "late", "later", priority=1)
    submit(core, "normal", "next")
    submit(core, "urgent", priority=-1)
    order = []
    current = "running"
    while core.num_in_flight:
        actions = core.request_finished(1.0, record(core, current))
        order += [request_id for request_id, _ in placed(actions)]
        current = order[-1]
    assert order == ["urgent", "normal", "next", "late", "later"]


def test_positions_count_those_ahead_over_all_lines_of_the_model() -> None:
    core = machine(window_slack=0)
    attach(core, features=frozenset({Feature.SEED}))
    submit(core, "running")
    submit(core, "a")
    submit(core, "b", needs=frozenset({(Feature.SEED, "seed")}))
    submit(core, "c")
    submit(core, "first", priority=-5)
    positions = {i: core.queue.position(record(core, i)) for i in ("first", "a", "b", "c")}
    assert positions == {"first": 1, "a": 2, "b": 3, "c": 4}
    core.cancel(0.0, record(core, "a"))
    assert core.queue.position(record(core, "c")) == 3


def test_a_waiting_line_moves_past_what_nobody_free_can_do() -> None:
    core = machine(window_slack=0)
    attach(core, "able", features=frozenset({Feature.CONSTRAINT}))
    needs = frozenset({(Feature.CONSTRAINT, "constraint")})
    submit(core, "g1", "g2", needs=needs)
    submit(core, "p1")
    plain = attach(core, "plain", slots=2)
    assert [r.request.request_id for r in plain.assigned.values()] == ["p1"]
    assert placed(submit(core, "p2")) == [("p2", "plain")]


def test_a_request_with_many_choices_takes_their_seats() -> None:
    core = machine(window_slack=0)
    worker = attach(core, slots=4)
    assert len(placed(submit(core, "a", "b", num_sequences=3))) == 2
    assert worker.seats_used == 6
    assert placed(submit(core, "c")) == []


def test_cancelling_all_of_a_client_places_none_of_it() -> None:
    core = machine(window_slack=0)
    attach(core)
    submit(core, "a", "b", "c")
    actions = core.cancel(0.0, *(record(core, i) for i in "abc"))
    assert [type(a) for a in actions] == [CancelOnWorker]
    assert core.num_in_flight == 0 and core.stats.cancelled == 3


def test_cancelling_twice_is_cancelling_once() -> None:
    core = machine()
    attach(core)
    submit(core, "a")
    gone = record(core, "a")
    assert core.cancel(0.0, gone) and core.cancel(0.0, gone) == []
    assert core.stats.cancelled == 1


# --- admission ---


def test_nobody_there_is_503_and_an_unknown_name_404() -> None:
    core = machine()
    with pytest.raises(errors.Unavailable, match="no worker is attached") as nobody:
        core.submit(0.0, ask())
    assert nobody.value.reason == "NO_CAPACITY"
    attach(core)
    with pytest.raises(errors.NotFound, match=r"^The model `x` does not exist\.$"):
        core.submit(0.0, ask(model="x"))
    assert placed(core.submit(0.0, ask(model="alias"))) == [("r", "w1")]
    assert record(core, "r").model == "m"


def test_queue_bounds_count_requests_and_tokens() -> None:
    core = machine(window_slack=0, max_queued_requests=2)
    attach(core)
    submit(core, "running", "a", "b")
    with pytest.raises(errors.ResourceExhausted, match="2 requests wait, the limit is 2"):
        core.submit(0.0, ask("c"))
    core = machine(window_slack=0, max_queued_tokens=10)
    attach(core)
    submit(core, "running")
    submit(core, "huge", tokens=50)  # alone in the queue it is let in
    with pytest.raises(errors.ResourceExhausted, match="51 prompt tokens would wait"):
        core.submit(0.0, ask("c", tokens=1))


def test_an_empty_queue_bound_still_serves_what_runs_at_once() -> None:
    core = machine(window_slack=0, max_queued_requests=0)
    attach(core)
    assert placed(submit(core, "a")) == [("a", "w1")]
    with pytest.raises(errors.ResourceExhausted):
        core.submit(0.0, ask("b"))


def test_retry_after_follows_the_measured_drain_rate() -> None:
    core = machine(window_slack=0, max_queued_requests=20)
    attach(core, slots=2)
    submit(core, "a", "b")
    submit(core, *(f"q{i}" for i in range(20)))
    with pytest.raises(errors.ResourceExhausted) as unmeasured:
        core.submit(0.0, ask("x"))
    assert unmeasured.value.retry_after_s == 1.0
    core.request_finished(4.0, record(core, "a"))  # 4 seat-seconds: two seats finish one in 2 s
    core.submit(4.0, ask("x"))
    with pytest.raises(errors.ResourceExhausted) as measured:
        core.submit(4.0, ask("y"))
    assert measured.value.retry_after_s == pytest.approx(4.0)  # a tenth of 20 drains in 2 × 2 s


def test_deadlines_that_cannot_be_met_are_refused() -> None:
    core = machine(window_slack=0)
    attach(core)
    with pytest.raises(errors.DeadlineExceeded) as past:
        core.submit(10.0, ask(deadline_at=9.0))
    assert past.value.reason == "DEADLINE_INFEASIBLE"
    submit(core, "a", "b")
    core.request_finished(5.0, record(core, "a"))  # one seat: 5 s each
    with pytest.raises(errors.ResourceExhausted) as wait:
        core.submit(5.0, ask("c", first_token_by=6.0))
    assert wait.value.reason == "DEADLINE_INFEASIBLE" and wait.value.field == "ttft_budget_ms"
    assert wait.value.retry_after_s == pytest.approx(4.0)


def test_an_embedding_model_does_not_generate() -> None:
    core = machine()
    attach(core, model=Model("e", kind=ModelKind.EMBEDDING, max_model_len=9, vocab_size=9))
    with pytest.raises(errors.InvalidArgument, match="embedding"):
        core.submit(0.0, ask(model="e"))


def test_the_field_that_no_worker_supports_is_named() -> None:
    core = machine()
    attach(core, features=frozenset({Feature.SEED}))
    needs = frozenset({(Feature.SEED, "seed"), (Feature.BEAM_SEARCH, "use_beam_search")})
    with pytest.raises(errors.Unimplemented) as refused:
        core.submit(0.0, ask(needs=needs))
    assert refused.value.field == "use_beam_search"


def test_counters_add_up_over_every_kind_of_ending() -> None:
    core = machine(window_slack=0)
    attach(core)
    submit(core, "done", "gone", "late")
    with pytest.raises(errors.AlreadyExists):
        core.submit(0.0, ask("done"))
    core.cancel(0.0, record(core, "gone"))
    core.request_finished(1.0, record(core, "done"))
    core.request_failed(1.0, record(core, "late"), errors.Internal("x"))
    s = core.stats
    assert (s.submitted, s.finished, s.failed, s.cancelled, s.refused) == (4, 1, 1, 1, 1)


# --- waiting ---


def test_waiting_is_announced_after_a_while_and_when_the_position_changes() -> None:
    core = machine(window_slack=0, notify_after_s=0.25, notify_every_s=1.0)
    attach(core)
    submit(core, "a", "b", "c")
    assert core.next_at() == pytest.approx(0.25)
    told = [a for a in core.tick(0.25) if isinstance(a, NotifyQueued)]
    assert sorted((a.record.request.request_id, a.position, a.eta_s) for a in told) == [
        ("b", 1, None),
        ("c", 2, None),
    ]
    assert core.tick(1.25) == []  # nothing moved
    core.request_finished(2.0, record(core, "a"))
    assert core.tick(2.0) == []  # not yet: at most one in a second
    told = [a for a in core.tick(2.25) if isinstance(a, NotifyQueued)]
    assert [a.position for a in told] == [1] and told[0].eta_s == pytest.approx(2.0)


def test_deadlines_end_requests_wherever_they_are() -> None:
    core = machine(window_slack=0)
    attach(core)
    core.submit(0.0, ask("runs", deadline_at=5.0))
    core.submit(0.0, ask("waits", deadline_at=6.0))
    core.submit(0.0, ask("next"))
    actions = core.tick(6.0)
    assert set(failures(actions)) == {"runs", "waits"}
    assert all(isinstance(e, errors.DeadlineExceeded) for e in failures(actions).values())
    assert any(isinstance(a, CancelOnWorker) for a in actions)
    assert core.find("next") is not None and core.num_in_flight == 1


def test_a_first_token_in_time_satisfies_its_budget() -> None:
    core = machine()
    worker = attach(core)
    core.submit(0.0, ask("quick", first_token_by=1.0))
    core.submit(0.0, ask("slow", first_token_by=1.0))
    quick = record(core, "quick")
    assert quick.relay(0, 0, [5])
    core.request_showed_token(0.5, quick)
    assert failures(core.tick(1.0)).keys() == {"slow"}
    assert list(worker.assigned.values()) == [quick]


def test_nobody_waits_forever() -> None:
    core = machine(window_slack=0, max_wait_s=100.0, lease_s=1000.0)
    attach(core)
    submit(core, "a", "b")
    error = failures(core.tick(100.0))["b"]
    assert isinstance(error, errors.ResourceExhausted) and error.reason == "QUEUE_TTL"


def test_a_tick_always_leaves_the_next_one_in_the_future() -> None:
    core = machine(max_wait_s=5.0, worker_wait_s=10.0)
    worker = attach(core)
    submit(core, "a")
    core.worker_lost(0.0, worker, "x")
    core.worker_registered(4.0, WorkerSpec("w1", "again", MODEL, 1))
    core.worker_lost(4.5, core.pool.workers["w1"], "x")
    assert set(failures(core.tick(5.0))) == {"a"}  # its wait is over, though not that for a worker
    soonest = core.next_at()
    assert soonest is not None and soonest > 5.0


def test_nothing_is_sent_to_a_worker_that_is_given_up_in_the_same_moment() -> None:
    core = machine(lease_s=10.0)
    attach(core, "w1")
    attach(core, "w2")
    submit(core, "a", "b")
    assert not placed(core.tick(10.0))
    assert [r.phase for r in (record(core, "a"), record(core, "b"))] == ["queued", "queued"]


# --- workers ---


def test_only_progress_renews_a_lease() -> None:
    core = machine(lease_s=10.0)
    worker = attach(core)
    core.worker_reported(5.0, worker, ready())
    assert core.tick(14.9) == [] and worker.state is WorkerState.READY  # idle counts
    core.worker_reported(14.9, worker, ready())
    submit(core, "a", now=15.0)
    core.worker_stepped(20.0, worker, 1, None)
    core.worker_reported(28.0, worker, ready(1, idle=False))  # the same step again
    core.worker_reported(29.0, worker, ready(1, idle=True))  # idle with a request placed on it
    actions = core.tick(30.0)
    assert [type(a) for a in actions[:1]] == [DropWorker]
    assert core.pool.workers["w1"].lost_at == 30.0


def test_a_worker_gets_a_whole_lease_for_its_first_step() -> None:
    core = machine(lease_s=10.0)
    worker = attach(core)
    submit(core, "a", now=9.0)
    assert core.tick(18.9) == [] and worker.state is WorkerState.READY


def test_a_starting_worker_gets_nothing_and_requests_wait_for_it() -> None:
    core = machine()
    worker, _ = core.worker_registered(0.0, WorkerSpec("w", "i", MODEL, 1))
    assert submit(core, "a") == []
    assert core.worker_linked(0.0, worker) == []
    assert worker.state is WorkerState.STARTING
    assert placed(core.worker_reported(0.0, worker, ready())) == [("a", "w")]


def test_a_draining_worker_gets_nothing_new() -> None:
    core = machine()
    worker = attach(core)
    submit(core, "a")
    assert core.drain_worker(0.0, "w1") == (1, [TellDrain(worker)])
    with pytest.raises(errors.Unavailable) as refused:
        core.submit(0.0, ask("b"))
    assert refused.value.reason == "NO_CAPACITY"
    core.request_finished(1.0, record(core, "a"))
    core.worker_lost(2.0, worker, "it left")
    assert core.pool.workers == {} and list(core.pool.models()) == []


def test_a_lost_worker_is_listed_for_a_while() -> None:
    core = machine(lost_memory_s=60.0)
    worker = attach(core)
    core.worker_lost(0.0, worker, "x")
    assert core.worker_lost(1.0, worker, "again") == []
    assert core.pool.workers["w1"].state is WorkerState.LOST
    core.tick(60.0)
    assert core.pool.workers == {}


def test_models_keep_the_order_of_their_first_registration() -> None:
    core = machine()
    attach(core, "w1", model=Model("z", max_model_len=9, vocab_size=9))
    attach(core, "w2", model=Model("a", max_model_len=9, vocab_size=9))
    attach(core, "w3", model=Model("z", max_model_len=9, vocab_size=9))
    core.worker_lost(0.0, core.pool.workers["w1"], "x")
    core.tick(1000.0)
    attach(core, "w3", now=1000.0, model=Model("z", max_model_len=9, vocab_size=9))
    assert [m.name for m in core.pool.models()] == ["a", "z"]


def test_the_shortest_context_of_a_models_workers_counts() -> None:
    core = machine()
    attach(core, "w1")
    attach(core, "w2", model=Model("m", max_model_len=50, fingerprint="f", vocab_size=1000))
    with pytest.raises(errors.InvalidArgument, match="the context length is 50"):
        core.submit(0.0, ask(tokens=50))


# --- losing workers ---


def lose_mid_stream(core: Scheduler, worker: Worker, request_id: str = "a") -> list[Action]:
    """The request has shown two tokens, then its worker dies."""
    running = record(core, request_id)
    core.request_started(running)
    offset = len(running.choices[0].token_ids) if running.choices else 0
    assert running.relay(0, offset, [7, 8])
    core.request_showed_token(1.0, running)
    return core.worker_lost(1.0, worker, "its stream broke")


def test_a_request_with_tokens_fails_clearly_when_nobody_can_resume() -> None:
    core = machine()
    worker = attach(core)
    attach(core, "w2")
    submit(core, "a")
    worker = next(w for w in core.pool.workers.values() if w.assigned)
    error = failures(lose_mid_stream(core, worker))["a"]
    assert isinstance(error, errors.Unavailable) and error.reason == "WORKER_LOST"
    assert f"worker {worker.worker_id} was lost (its stream broke) after 2 tokens" in error.message


def test_a_request_goes_on_where_resuming_is_possible() -> None:
    core = machine()
    worker = attach(core, features=RESUME)
    submit(core, "a")
    old_handle = record(core, "a").handle
    attach(core, "plain")
    attach(core, "able", features=RESUME)
    actions = lose_mid_stream(core, worker)
    assert placed(actions) == [("a", "able")]
    moved = record(core, "a")
    assert moved.handle != old_handle and moved.moved_from == "w1"
    assert moved.choices[0].token_ids == [7, 8]
    assert not moved.relay(0, 1, [8]) and moved.relay(0, 2, [9])


def test_those_that_lost_their_worker_come_before_those_that_never_had_one() -> None:
    core = machine(window_slack=0)
    worker = attach(core, features=RESUME)
    submit(core, "a", "b")
    lose_mid_stream(core, worker)
    able = attach(core, "w2", now=2.0, features=RESUME)
    assert [r.request.request_id for r in able.assigned.values()] == ["a"]


def test_a_request_that_loses_two_workers_is_given_up() -> None:
    core = machine()
    first = attach(core, "w1", features=RESUME)
    submit(core, "a")
    second = attach(core, "w2", features=RESUME)
    attach(core, "w3")
    lose_mid_stream(core, first)
    error = failures(lose_mid_stream(core, second))["a"]
    assert error.reason == "POISON_GUARD" and "after 4 tokens" in error.message


def test_without_another_worker_it_waits_and_then_fails() -> None:
    core = machine(worker_wait_s=10.0)
    worker = attach(core, features=RESUME)
    submit(core, "a")
    assert failures(lose_mid_stream(core, worker)) == {}
    core.tick(10.9)
    assert core.find("a") is not None
    error = failures(core.tick(11.0))["a"]
    assert isinstance(error, errors.Unavailable) and "no other took over" in error.message


def test_a_worker_in_time_rescues_those_that_wait_for_one() -> None:
    core = machine(worker_wait_s=10.0, lease_s=100.0)
    worker = attach(core)
    submit(core, "a")
    core.worker_lost(1.0, worker, "x")
    spec = WorkerSpec("w1", "again", MODEL, 1)
    again, _ = core.worker_registered(10.0, spec)  # starting counts as being there
    assert failures(core.tick(12.0)) == {}
    core.worker_linked(30.0, again)
    assert placed(core.worker_reported(30.0, again, ready())) == [("a", "w1")]


def test_a_request_that_said_everything_but_goodbye_is_complete() -> None:
    core = machine()
    worker = attach(core)
    submit(core, "a")
    running = record(core, "a")
    running.relay(0, 0, [1])
    running.end_choice(0, None)
    actions = core.worker_lost(1.0, worker, "x")
    assert [a.record for a in actions if isinstance(a, Complete)] == [running]
    assert core.stats.finished == 1


def test_a_worker_that_lets_go_before_the_first_token_is_replaced_once() -> None:
    core = machine(window_slack=0)
    attach(core)
    submit(core, "a")
    unwilling = errors.Unavailable("draining", reason="DRAINING")
    assert placed(core.request_failed(0.0, record(core, "a"), unwilling)) == [("a", "w1")]
    assert failures(core.request_failed(0.0, record(core, "a"), unwilling)) == {"a": unwilling}


def test_a_client_may_bring_the_beginning_itself() -> None:
    core = machine()
    attach(core, features=RESUME)
    needs = frozenset({(Feature.RESUME, "resume")})
    core.submit(0.0, ask(needs=needs, resumed=(Resumed(0, (1, 2)),)))
    assert record(core, "r").relay(0, 2, [3]) and record(core, "r").num_relayed == 3


def test_tokens_out_of_order_or_behind_the_end_are_not_relayed() -> None:
    core = machine()
    attach(core)
    submit(core, "a")
    running = record(core, "a")
    assert running.relay(0, 0, [1, 2])
    assert not running.relay(0, 1, [2]) and not running.relay(0, 3, [4])
    assert not running.relay(1, 0, [1])  # a choice nobody asked for
    assert running.relay(0, 2, [])
    running.end_choice(0, -1.0)
    assert not running.relay(0, 2, [3])


# --- placement ---


def loads(core: Scheduler) -> dict[str, int]:
    return {w.worker_id: len(w.assigned) for w in core.pool.workers.values()}


@pytest.mark.parametrize("policy", ["expected_wait", "least_requests", "round_robin"])
def test_equal_workers_get_equal_shares(policy: str) -> None:
    core = machine(policy)
    for worker_id in ("w1", "w2", "w3"):
        attach(core, worker_id, slots=4)
    submit(core, *(f"r{i}" for i in range(12)))
    assert loads(core) == {"w1": 4, "w2": 4, "w3": 4}


def test_expected_wait_counts_tokens_and_the_cards_own_rate() -> None:
    core = machine()
    attach(core, "slow", slots=8, load=Load(prefill_rate=100.0))
    attach(core, "fast", slots=8, load=Load(prefill_rate=1000.0))
    submit(core, "a", "b", "c", tokens=90)
    assert loads(core) == {"slow": 0, "fast": 3}


def test_expected_wait_sees_prompts_that_are_not_computed_yet() -> None:
    core = machine()
    first, second = (attach(core, i, slots=8, load=Load(prefill_rate=100.0)) for i in "xy")
    submit(core, "long", tokens=90)
    busy = first if first.assigned else second
    submit(core, "a", "b", tokens=10)
    assert len(busy.assigned) == 1
    core.request_showed_token(1.0, record(core, "long"))
    assert busy.pending_prefill_tokens == 0


def test_two_choices_and_round_robin_stay_within_the_room() -> None:
    for policy in ("two_choices", "round_robin"):
        core = machine(policy, window_slack=0)
        attach(core, "w1", slots=1)
        attach(core, "w2", slots=3)
        submit(core, *"abcdef")
        assert loads(core) == {"w1": 1, "w2": 3}


def test_a_session_returns_to_its_worker_when_that_costs_nothing() -> None:
    core = machine(max_sessions=1)
    for i in range(8):
        attach(core, f"w{i}", slots=2)
    homes = set()
    for turn in range(6):
        ((_, home),) = placed(submit(core, f"t{turn}", session_id="s"))
        homes.add(home)
        core.request_finished(1.0, record(core, f"t{turn}"))
    assert len(homes) == 1
    (home,) = homes
    submit(core, "other")
    core.cancel(1.0, record(core, "other"))
    busy = core.pool.workers[home]
    submit(core, "t6", "t7", session_id="s", now=2.0)
    assert len(busy.assigned) == 1  # the second turn at the same time goes where there is room
