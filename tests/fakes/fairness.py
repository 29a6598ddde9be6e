"""Random traffic of a few tenants through the core alone.

After every event the served work of each pair of tenants is compared: the widest difference that arose while
both had something waiting, against the stated bound.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import combinations

from scheduler.core import ORDERS, POLICIES, Record, Scheduler
from scheduler.core.ledger import INPUT_WEIGHT, OUTPUT_WEIGHT
from scheduler.core.types import (
    Action,
    Dispatch,
    Limits,
    Model,
    Report,
    Request,
    WorkerSpec,
    WorkerState,
)

QUANTUM = 200


@dataclass
class _Span:
    """A stretch of time in which both tenants of a pair had something waiting."""

    low: float
    high: float


@dataclass
class Traffic:
    """One core, its workers stepping together. `tick` is one engine step everywhere."""

    order: str
    seed: int
    num_workers: int = 2
    slots: int = 3
    longest_prompt: int = 80
    longest_output: int = 40
    now: float = 0.0
    widest: float = 0.0
    most_resident: int = 0
    """Most tokens that the requests in flight on workers could come to hold at once."""
    left: dict[str, int] = field(default_factory=dict)
    running: dict[str, Record] = field(default_factory=dict)
    spans: dict[tuple[str, str], _Span] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = Scheduler(
            Limits(window_slack=1, quantum=QUANTUM, max_queued_requests=10_000, lease_s=1e9),
            POLICIES["expected_wait"].make(),
            random.Random(self.seed),
            order=ORDERS[self.order],
        )
        self.number = 0
        model = Model("m", max_model_len=10_000, vocab_size=10)
        for n in range(self.num_workers):
            worker, _ = self.core.worker_registered(
                0.0, WorkerSpec(f"w{n}", "i", model, self.slots)
            )
            self.core.worker_linked(0.0, worker)
            self.core.worker_reported(0.0, worker, Report(WorkerState.READY, 0, True))

    @property
    def bound(self) -> float:
        """Of the difference in served work over any time in which two tenants both wait."""
        unit = max(INPUT_WEIGHT * self.longest_prompt, OUTPUT_WEIGHT * self.most_resident)
        if self.order == "vtc":
            return 2 * unit
        return 2 * (
            QUANTUM + INPUT_WEIGHT * self.longest_prompt + OUTPUT_WEIGHT * self.most_resident
        )

    def submit(self, tenant: str, prompt: int, output: int, prefix: int = 0) -> None:
        """A request; `prefix` names whole blocks that it shares with others."""
        self.number += 1
        request_id = f"r{self.number}"
        self.left[request_id] = output
        digests = tuple(prefix * 1000 + n for n in range(prompt // 64)) if prefix else ()
        request = Request(
            request_id, "m", prompt, prompt + 1, tenant=tenant, prefix_digests=digests
        )
        self._carry_out(self.core.submit(self.now, request))
        self.check()

    def tick(self) -> None:
        """Every request in flight gets a token; those that have all of theirs end."""
        self.now += 0.01
        for request_id, record in list(self.running.items()):
            known = record.choices.get(0)
            assert record.relay(0, len(known.token_ids) if known else 0, [1])
            self.core.request_showed_token(self.now, record)
            self.left[request_id] -= 1
            if not self.left[request_id]:
                del self.running[request_id]
                self._carry_out(self.core.request_finished(self.now, record))
            self.check()
        self._carry_out(self.core.tick(self.now))
        self.check()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                self.running[action.record.request.request_id] = action.record
        resident = sum(
            r.request.num_prompt_tokens + r.num_relayed + self.left[i]
            for i, r in self.running.items()
        )
        self.most_resident = max(self.most_resident, resident)

    def check(self) -> None:
        """After every event: nobody that waits was served more than the bound beyond another that waits."""
        ledger = self.core.ledgers.of("m")
        waiting = {
            r.request.tenant: ledger.account(r.request.tenant).work
            for r in self.core.queue.waiting("m")
        }
        self.spans = {
            pair: span
            for pair, span in self.spans.items()
            if pair[0] in waiting and pair[1] in waiting
        }
        for one, other in combinations(sorted(waiting), 2):
            difference = waiting[one] - waiting[other]
            span = self.spans.setdefault((one, other), _Span(difference, difference))
            span.low, span.high = min(span.low, difference), max(span.high, difference)
            self.widest = max(self.widest, span.high - span.low)
            assert span.high - span.low <= self.bound, (one, other, span, self.bound)


def random_trace(order: str, seed: int, events: int = 40) -> Traffic:
    """Traffic of a random kind: few or many tenants, floods, sharing or not."""
    rng = random.Random(seed)
    traffic = Traffic(
        order,
        seed,
        num_workers=rng.randint(1, 3),
        slots=rng.randint(1, 4),
        longest_prompt=rng.choice([10, 80, 300]),
        longest_output=rng.choice([3, 20, 60]),
    )
    tenants = [f"t{n}" for n in range(rng.randint(2, 5))]
    flood = rng.choice([1, 1, 10, 50])
    for _ in range(events):
        for _ in range(rng.randint(0, 3)):
            tenant = rng.choice(tenants + tenants[:1] * (flood - 1))
            traffic.submit(
                tenant,
                rng.randint(1, traffic.longest_prompt),
                rng.randint(1, traffic.longest_output),
                rng.randint(0, 3),
            )
        for _ in range(rng.randint(0, 3)):
            traffic.tick()
    return traffic
