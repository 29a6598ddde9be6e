"""The workers: who is there, how much room each has, and until when it is believed to be alive.

Capacity is counted here, at dispatch, never taken from a report. Knows nothing about the queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from candor import errors
from scheduler.core.record import Record
from scheduler.core.types import Feature, Load, Model, Report, WorkerSpec, WorkerState


@dataclass(slots=True, eq=False)
class Worker:
    """One attached worker. `eq` is identity: a restarted worker is another one."""

    spec: WorkerSpec
    window: int
    """Most seats in use before it takes nothing more: its slots and a little slack."""
    lease_until: float
    number: int = 0
    """Small and unique among those that are here: its bit in masks of workers."""
    is_linked: bool = False
    is_draining: bool = False
    reported: WorkerState = WorkerState.STARTING
    lost_at: float | None = None
    last_step_seq: int = 0
    load: Load = field(default_factory=Load)
    assigned: dict[int, Record] = field(default_factory=dict)
    """Requests placed on it, by the handle of the attempt."""
    seats_used: int = 0
    pending_prefill_tokens: int = 0
    """Prompt (and replayed) tokens of requests placed on it that have not shown a token yet."""

    @property
    def worker_id(self) -> str:
        """Name of the seat."""
        return self.spec.worker_id

    @property
    def state(self) -> WorkerState:
        """What it is good for now."""
        if self.lost_at is not None:
            return WorkerState.LOST
        if self.is_draining or self.reported is WorkerState.DRAINING:
            return WorkerState.DRAINING
        is_ready = self.is_linked and self.reported is WorkerState.READY
        return WorkerState.READY if is_ready else WorkerState.STARTING

    @property
    def has_room(self) -> bool:
        """Whether it takes another request. One request with many choices may reach beyond the window."""
        return self.state is WorkerState.READY and self.seats_used < self.window

    @property
    def kv_share(self) -> float:
        """Part of its KV memory in use, as it last said."""
        total = self.load.kv_total_tokens
        return self.load.kv_used_tokens / total if total else 0.0

    def can(self, needs: frozenset[Feature]) -> bool:
        """Whether it has every feature."""
        return needs <= self.spec.features


@dataclass(frozen=True, slots=True)
class Serving:
    """Those that serve one model; kept until one of them changes, because admission asks every time."""

    workers: list[Worker]
    num_seats: int
    """Seats of the ready ones."""
    max_model_len: int
    """What any of them can hold."""


class Pool:
    """All workers by id, the lost ones included until they are forgotten."""

    def __init__(self, window_slack: int, lease_s: float, max_workers: int) -> None:
        self._slack = window_slack
        self._lease_s = lease_s
        self._max_workers = max_workers
        self.workers: dict[str, Worker] = {}
        self._numbers: list[int] = []
        """Given back; all others below the number of workers are in use."""
        self._known: dict[str, Model] = {}
        self._canonical: dict[str, str] = {}
        self._free: dict[str, dict[str, Worker]] = {}
        self._masks: dict[str, dict[frozenset[Feature], int]] = {}
        """Those with room once more, as masks of worker numbers by what they can do."""
        self._serving: dict[str, Serving] = {}

    # --- membership ---

    def check(self, spec: WorkerSpec) -> None:
        """Raise when the worker does not fit to those that serve (other than a former self)."""
        others = [
            w for w in self.workers.values() if w.lost_at is None and w.worker_id != spec.worker_id
        ]
        if len(others) >= self._max_workers:
            raise errors.ResourceExhausted(
                f"{len(others)} workers are attached, the limit is {self._max_workers}",
                reason="TOO_MANY_WORKERS",
            )
        mine = {spec.model.name, *spec.model.aliases}
        for other in others:
            model = other.spec.model
            shared = mine & {model.name, *model.aliases}
            if not shared:
                continue
            name = min(shared)
            if model.name != spec.model.name or model.kind is not spec.model.kind:
                raise errors.FailedPrecondition(
                    f"model name `{name}` already stands for `{model.name}` ({model.kind}) "
                    f"of worker {other.worker_id}",
                    reason="MODEL_NAME_TAKEN",
                )
            if model.fingerprint != spec.model.fingerprint:
                raise errors.FailedPrecondition(
                    f"worker {other.worker_id} serves `{name}` with tokenizer {model.fingerprint}, "
                    f"worker {spec.worker_id} comes with {spec.model.fingerprint}",
                    reason="TOKENIZER_MISMATCH",
                )

    def add(self, now: float, spec: WorkerSpec) -> Worker:
        """A worker that `check` let pass and whose former self is gone."""
        number = self._numbers.pop() if self._numbers else len(self.workers)
        worker = Worker(spec, spec.slots + self._slack, now + self._lease_s, number)
        self.workers[spec.worker_id] = worker
        self._index_models()
        self.changed(worker)
        return worker

    def forget(self, worker: Worker) -> None:
        """As if it had never been here."""
        if self.workers.get(worker.worker_id) is worker:
            del self.workers[worker.worker_id]
            self._numbers.append(worker.number)
            self._index_models()
        self.changed(worker)

    def lose(self, now: float, worker: Worker) -> list[Record]:
        """It is gone; returns what it held, in the order of arrival."""
        worker.lost_at = now
        held = sorted(worker.assigned.values(), key=lambda record: record.order)
        for record in held:
            record.worker, record.pending_tokens = None, 0
        worker.assigned.clear()
        worker.seats_used = worker.pending_prefill_tokens = 0
        self.changed(worker)
        return held

    def _index_models(self) -> None:
        """Names follow the workers; the order of first registration stays while a model is known."""
        serving: dict[str, Model] = {}
        for worker in self.workers.values():
            model = worker.spec.model
            if model.name not in serving or worker.lost_at is None:
                serving[model.name] = model
        known = {name: serving[name] for name in self._known if name in serving}
        self._known = known | {n: m for n, m in serving.items() if n not in known}
        self._canonical = {
            alias: name for name, model in self._known.items() for alias in model.aliases
        } | {name: name for name in self._known}

    # --- models ---

    def models(self) -> Iterable[Model]:
        """Known models in the order of their first registration."""
        return self._known.values()

    def find_model(self, name: str) -> Model | None:
        """By name or alias."""
        canonical = self._canonical.get(name)
        return None if canonical is None else self._known[canonical]

    def serving(self, model: str) -> Serving:
        """Workers that take requests for the model, now or as soon as they are ready."""
        known = self._serving.get(model)
        if known is None:
            workers = [
                w
                for w in self.workers.values()
                if w.spec.model.name == model
                and w.state in (WorkerState.STARTING, WorkerState.READY)
            ]
            known = self._serving[model] = Serving(
                workers,
                sum(w.window for w in workers if w.state is WorkerState.READY),
                min((w.spec.model.max_model_len for w in workers), default=0),
            )
        return known

    # --- capacity ---

    def free(self, model: str) -> Iterable[Worker]:
        """Workers of the model with room."""
        return self._free.get(model, {}).values()

    def masks(
        self, model: str, wanted: Iterable[frozenset[Feature]]
    ) -> dict[frozenset[Feature], int]:
        """Those needs that a worker with room can serve, with all such workers as a mask of their numbers."""
        free = self._masks.get(model, {})
        found: dict[frozenset[Feature], int] = {}
        for needs in wanted if free else ():
            mask = 0
            for features, numbers in free.items():
                if needs <= features:
                    mask |= numbers
            if mask:
                found[needs] = mask
        return found

    def changed(self, worker: Worker) -> None:
        """The worker's state is another; called after every change of it that is not made here."""
        self._serving.pop(worker.spec.model.name, None)
        self._recount(worker)

    def _recount(self, worker: Worker) -> None:
        model, features = worker.spec.model.name, worker.spec.features
        free, masks = self._free.setdefault(model, {}), self._masks.setdefault(model, {})
        if worker.has_room:
            free[worker.worker_id] = worker
            masks[features] = masks.get(features, 0) | 1 << worker.number
        elif free.get(worker.worker_id) is worker:
            del free[worker.worker_id]
            masks[features] &= ~(1 << worker.number)
            if not masks[features]:
                del masks[features]
        if not free:
            del self._free[model], self._masks[model]

    def assign(self, now: float, worker: Worker, record: Record) -> None:
        """Place the request on the worker under `record.handle`."""
        assert worker.has_room
        if not worker.assigned:
            # An idle worker's lease was renewed for being idle; from here on it has to make steps.
            worker.lease_until = now + self._lease_s
        worker.assigned[record.handle] = record
        worker.seats_used += record.seats
        record.pending_tokens = record.num_uncached
        worker.pending_prefill_tokens += record.pending_tokens
        record.worker = worker
        self._recount(worker)

    def release(self, record: Record) -> Worker:
        """Take the request off its worker."""
        worker = record.worker
        assert worker is not None
        self.prefilled(worker, record)
        del worker.assigned[record.handle]
        worker.seats_used -= record.seats
        record.worker = None
        self._recount(worker)
        return worker

    def prefilled(self, worker: Worker, record: Record) -> None:
        """The request's prompt no longer waits to be computed."""
        worker.pending_prefill_tokens -= record.pending_tokens
        record.pending_tokens = 0

    # --- leases ---

    def renew(self, now: float, worker: Worker, report: Report) -> None:
        """Take a report. Only progress renews: a new step, or having nothing to do.

        A worker that says it is idle while requests are placed on it makes no progress with them.
        """
        is_idle = report.is_idle and not worker.assigned
        if is_idle or report.last_step_seq != worker.last_step_seq:
            worker.lease_until = now + self._lease_s
        worker.last_step_seq = report.last_step_seq
        worker.reported = report.state
        worker.load = report.load or worker.load

    def stepped(self, now: float, worker: Worker, step_seq: int, load: Load | None) -> None:
        """A frame came: the worker made a step."""
        if step_seq != worker.last_step_seq:
            worker.lease_until = now + self._lease_s
            worker.last_step_seq = step_seq
        if load is not None:
            worker.load = load
