"""Plans made by hand: what is in a step, and in which order."""

from __future__ import annotations

from engine.core.batcher import Batcher
from engine.core.intake import Intake
from engine.core.kv.slots import SlotKv
from engine.core.sequence import Sequence
from engine.core.types import PlanItem, Request, StepPlan
from engine.core.validate import Limits
from tests.fakes.engine import VOCAB, ByteCodec


class Nowhere:
    """Rows that only exist in the books."""

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Nothing to copy."""

    def trim(self, row: int, num_tokens: int) -> None:
        """Nothing to forget."""


class World:
    """A batcher and sequences that grow when the test says so."""

    def __init__(
        self, *, slots: int = 4, budget: int = 20, mixed: int = 10, kv: int = 200, rows: int = 8
    ) -> None:
        self.kv = SlotKv(Nowhere(), num_rows=rows, num_tokens=kv)
        self.batcher = Batcher(self.kv, max_running=slots, token_budget=budget, mixed_budget=mixed)
        limits = Limits(VOCAB, 200, kv, slots, 10, 10)
        self._intake = Intake(ByteCodec(), limits)
        self._num_requests = 0

    def add(self, prompt: bytes, *, salt: str = "") -> Sequence:
        self._num_requests += 1
        request = Request(self._num_requests, tuple(prompt), cache_salt=salt)
        state = self._intake.open(request, None, 0.0)
        ((sequence, _),) = self._intake.choices(state)
        self.batcher.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Plan, and do what the plan says; whoever is up to date gets a token."""
        plan = self.batcher.plan()
        for item in plan.items:
            sequence = item.sequence
            assert sequence.row is not None
            is_last = item.is_last
            self.kv.extend(
                sequence.row, sequence.token_ids[item.start : item.start + item.num_tokens]
            )
            sequence.num_computed += item.num_tokens
            if is_last:
                sequence.token_ids.append(65)
        self.kv.check()
        return plan


def runs(sequence: Sequence) -> bool:
    """Whether it has a row."""
    return sequence.row is not None


def shape(plan: StepPlan) -> list[tuple[Sequence, int]]:
    """Who computes how many tokens, in batch order."""
    return [(item.sequence, item.num_tokens) for item in plan.items]


def test_decodes_come_before_prefill_and_the_budget_shrinks_for_them() -> None:
    world = World()
    first, second = world.add(b"a" * 4), world.add(b"b" * 50)
    assert shape(world.step()) == [(first, 4), (second, 16)]
    assert shape(world.step()) == [(first, 1), (second, 9)]
    assert shape(world.step()) == [(first, 1), (second, 9)]


def test_first_come_first_served_up_to_the_seats() -> None:
    world = World(slots=2)
    a, b, c = (world.add(bytes([97 + i]) * 3) for i in range(3))
    assert shape(world.step()) == [(a, 3), (b, 3)]
    world.batcher.remove(a)
    assert shape(world.step()) == [(b, 1), (c, 3)]


def test_every_position_of_a_plan_has_room() -> None:
    world = World(kv=24, slots=2)
    old, new = world.add(b"a" * 10), world.add(b"b" * 10)
    for _ in range(3):
        world.step()
    assert runs(new)
    world.step()
    assert not runs(new) and world.batcher.waiting[0] is new, "the newest makes room"
    assert world.batcher.num_preemptions == 1 and runs(old)


def test_a_preempted_sequence_comes_back_first_and_whole() -> None:
    world = World(kv=24, slots=2)
    old, new = world.add(b"a" * 10), world.add(b"b" * 10)
    later = world.add(b"c" * 3)
    while runs(new):
        world.step()
    known = len(new.token_ids)
    world.batcher.remove(old)
    plan = world.step()
    again = next(item for item in plan.items if item.sequence is new)
    assert again.start + again.num_tokens == known
    assert plan.items[0].sequence is new and runs(later)


def test_a_shared_prefix_is_waited_for_but_others_pass() -> None:
    world = World(budget=30, slots=4)
    leader = world.add(b"s" * 50)
    follower = world.add(b"s" * 50 + b"x")
    stranger = world.add(b"z" * 5)
    world.step()
    assert not runs(follower) and leader.num_computed == 30
    assert shape(world.step()) == [(leader, 20), (stranger, 5)]
    plan = world.step()
    mine = [item for item in plan.items if item.sequence is follower]
    assert [(i.start, i.num_tokens) for i in mine] == [(50, 1)]


def test_a_follower_does_not_wait_for_a_leader_that_left() -> None:
    world = World(budget=30)
    leader, follower = world.add(b"s" * 50), world.add(b"s" * 50 + b"x")
    world.step()
    world.batcher.remove(leader)
    (item,) = world.step().items
    assert isinstance(item, PlanItem) and item.sequence is follower and item.start == 30


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert World().step().items == ()
