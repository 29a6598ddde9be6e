"""The shell around the core: carries events in, actions out, and tokens from workers to clients.

Knows streams, handles and timers. Every decision is the core's; the relay itself costs a token one look-up,
one list append and one number set in place.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from candor import errors, rpc
from candor.v1 import engine_pb2, inference_pb2
from scheduler import translate
from scheduler.core import Record, Scheduler, Worker
from scheduler.core import types as core
from scheduler.links import WorkerLink
from scheduler.outbox import Outbox

log = logging.getLogger("scheduler")

Event: TypeAlias = inference_pb2.GenerateEvent
_SEED_BITS = 63


@dataclass(slots=True, eq=False)
class Call:
    """A generation request's way back: whose it is, under which number, and what the client has had."""

    request: inference_pb2.GenerateRequest
    outbox: Outbox
    handle: int
    cached_tokens: int = 0
    has_prompt_logprobs: bool = False


@dataclass(slots=True, eq=False)
class EmbedCall:
    """An embedding request: an answer somebody waits for, and the call to the worker while it runs."""

    request: inference_pb2.EmbedRequest
    answer: asyncio.Future[inference_pb2.EmbedResponse]
    task: asyncio.Task[None] | None = field(default=None)


class Dispatcher:
    """One scheduler's traffic. All methods run on one event loop."""

    def __init__(
        self,
        machine: Scheduler,
        rng: random.Random,
        *,
        client_buffer: int,
        worker_buffer: int,
        connect_timeout_s: float,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.core = machine
        self._rng = rng
        self._client_buffer = client_buffer
        self._worker_buffer = worker_buffer
        self._connect_timeout_s = connect_timeout_s
        self._unix_time = unix_time
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[WorkerLink, Worker] = {}
        self._outboxes: set[Outbox] = set()
        self._is_stopping = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def now(self) -> float:
        """Seconds of the clock that the core lives by."""
        return self._loop.time()

    # --- clients ---

    def open_outbox(self, hang_up: Callable[[errors.CandorError], None]) -> Outbox:
        """For one client stream; `close_outbox` ends it."""
        outbox = Outbox(self._client_buffer, hang_up)
        self._outboxes.add(outbox)
        return outbox

    def submit(self, outbox: Outbox, handle: int, request: inference_pb2.GenerateRequest) -> None:
        """Take in a request whose prompt is token ids and whose request_id is set, or raise why not."""
        self._check_open()
        now = self.now()
        call = Call(request, outbox, handle)
        wanted = translate.generation(request, now, self._unix_time(), call)
        if not request.sampling.HasField("seed"):
            # Drawn here and not by the worker: another worker must be able to go on with it.
            request.sampling.seed = self._rng.getrandbits(_SEED_BITS)
        actions = self.core.submit(now, wanted)
        record = self.core.find(wanted.request_id)
        assert record is not None
        request.model = record.model
        outbox.live[handle] = record
        self._apply(actions)

    def cancel(self, outbox: Outbox, handle: int) -> None:
        """The client's cancel; its ending says so. Nothing happens when the request has ended."""
        record = outbox.live.get(handle)
        if record is not None:
            self._say_failed(record, errors.Cancelled("the request was cancelled"))
            self._apply(self.core.cancel(self.now(), record))

    def close_outbox(self, outbox: Outbox) -> None:
        """The client is gone: everything of it is cancelled. Idempotent."""
        outbox.close()
        self._outboxes.discard(outbox)
        gone = list(outbox.live.values())
        outbox.live.clear()
        now = self.now()
        for record in gone:
            self._log_end(now, record, "CANCELLED")
        self._apply(self.core.cancel(now, *gone))

    async def embed(self, request: inference_pb2.EmbedRequest) -> inference_pb2.EmbedResponse:
        """Embed by a worker of the model; waits its turn like any request."""
        self._check_open()
        call = EmbedCall(request, self._loop.create_future())
        wanted = translate.embedding(request, call)
        actions = self.core.submit(self.now(), wanted)
        record = self.core.find(wanted.request_id)
        assert record is not None
        request.model = record.model
        self._apply(actions)
        try:
            return await call.answer
        finally:
            self._apply(self.core.cancel(self.now(), record))

    def _check_open(self) -> None:
        if self._is_stopping:
            raise errors.Unavailable("the scheduler is shutting down", reason="SHUTTING_DOWN")

    # --- workers ---

    def attach(self, info: engine_pb2.WorkerInfo) -> WorkerLink:
        """A worker registers; raises when it does not fit. `detach` ends it."""
        self._check_open()
        link = WorkerLink(
            info,
            self,
            connect_timeout_s=self._connect_timeout_s,
            command_limit=self._worker_buffer,
        )
        spec = translate.worker_spec(info, link)
        worker, actions = self.core.worker_registered(self.now(), spec)
        self._links[link] = worker
        log.info("worker attached", extra={"worker_id": info.worker_id, "address": info.address})
        self._apply(actions)
        link.open()
        return link

    def report(self, link: WorkerLink, pb: engine_pb2.Report) -> None:
        """A worker's report."""
        if pb.HasField("load"):
            link.load = pb.load
        if (worker := self._links.get(link)) is not None:
            self._apply(self.core.worker_reported(self.now(), worker, translate.report(pb)))

    def detach(self, link: WorkerLink) -> None:
        """The worker's Attach stream ended. Idempotent."""
        self.link_broken(link, "it left")

    def linked(self, link: WorkerLink) -> None:
        """See `LinkEvents`."""
        if (worker := self._links.get(link)) is not None:
            self._apply(self.core.worker_linked(self.now(), worker))

    def link_broken(self, link: WorkerLink, why: str) -> None:
        """See `LinkEvents`."""
        if (worker := self._links.get(link)) is not None:
            self._apply(self.core.worker_lost(self.now(), worker, why))

    def drain_worker(self, worker_id: str) -> int:
        """Start to drain; returns how many requests the worker still has."""
        num_running, actions = self.core.drain_worker(self.now(), worker_id)
        self._apply(actions)
        return num_running

    # --- the relay ---

    def frame_arrived(self, link: WorkerLink, frame: engine_pb2.RunResponse) -> None:
        """See `LinkEvents`. This runs for every token: keep it short."""
        worker = self._links.get(link)
        if worker is None:
            return
        now = self.now()
        load = None
        if frame.HasField("load"):
            link.load = frame.load
            load = translate.load(frame.load)
        self.core.worker_stepped(now, worker, frame.step_seq, load)
        assigned = worker.assigned
        touched: set[Outbox] = set()
        for event in frame.events:
            record = assigned.get(event.handle)
            if record is None:
                continue  # cancelled while the worker was computing
            if event.HasField("delta"):
                delta = event.delta
                if not record.relay(delta.choice, delta.token_offset, delta.token_ids):
                    what = f"choice {delta.choice} went on at token {delta.token_offset}"
                    self._apply(self.core.request_garbled(now, record, what))
                    continue
                if record.pending_tokens:
                    self.core.request_showed_token(now, record)
                if delta.HasField("end"):
                    end = delta.end
                    logprob = end.cumulative_logprob if end.HasField("cumulative_logprob") else None
                    record.end_choice(delta.choice, logprob)
            elif not self._relay_rare(now, record, event):
                continue
            call = record.request.payload
            assert isinstance(call, Call)
            event.handle = call.handle
            call.outbox.events.append(event)
            touched.add(call.outbox)
        for outbox in touched:
            self.flush(outbox)

    def _relay_rare(self, now: float, record: Record, event: Event) -> bool:
        """What comes once or twice per request. False: nothing of it goes to the client as it is."""
        call = record.request.payload
        assert isinstance(call, Call)
        kind = event.WhichOneof("event")
        if kind == "started":
            return self._started(record, call, event)
        if kind == "prompt_logprobs":
            is_news, call.has_prompt_logprobs = not call.has_prompt_logprobs, True
            return is_news
        if kind == "finished":
            self._complete_timings(now, record, event.finished)
            self._say(record, event)
            del call.outbox.live[call.handle]
            self._log_end(now, record, "finished")
            self._apply(self.core.request_finished(now, record))
        elif kind == "failed":
            self._apply(self.core.request_failed(now, record, rpc.from_status(event.failed)))
        return False

    def _started(self, record: Record, call: Call, event: Event) -> bool:
        worker = record.worker
        assert worker is not None
        started = event.started
        cached = started.num_cached_tokens if started.HasField("num_cached_tokens") else None
        if not self.core.request_started(record, cached):
            assert record.moved_from is not None
            moved = inference_pb2.Moved(
                from_worker_id=record.moved_from,
                to_worker_id=worker.worker_id,
                num_replayed_tokens=record.request.num_prompt_tokens + record.num_relayed,
            )
            self._say(record, Event(moved=moved))
            return False
        started.worker_id = worker.worker_id
        started.queue_us = _us(record.waited_s)
        call.cached_tokens = started.num_cached_tokens
        if not started.HasField("num_prompt_tokens"):
            started.num_prompt_tokens = record.request.num_prompt_tokens
        if not started.HasField("sampling"):
            started.sampling.CopyFrom(call.request.sampling)
        if not started.HasField("stopping"):
            started.stopping.CopyFrom(call.request.stopping)
        return True

    def _complete_timings(
        self, now: float, record: Record, finished: inference_pb2.Finished
    ) -> None:
        finished.timings.queue_us = _us(record.waited_s)
        finished.timings.total_us = _us(now - record.submitted_at)

    # --- actions ---

    def _apply(self, actions: Iterable[core.Action]) -> None:
        for action in actions:
            match action:
                case core.Dispatch(record, worker, handle):
                    self._dispatch(record, worker, handle)
                case core.CancelOnWorker(record, worker, handle):
                    call = record.request.payload
                    if isinstance(call, Call):
                        _link(worker).cancel(handle)
                    elif isinstance(call, EmbedCall) and call.task is not None:
                        call.task.cancel()
                case core.Fail(record, error):
                    self._say_failed(record, error)
                case core.Complete(record):
                    self._say_finished(record)
                case core.NotifyQueued(record, position, eta_s):
                    eta_ms = None if eta_s is None else round(1000 * eta_s)
                    queued = inference_pb2.Queued(position=position, eta_ms=eta_ms)
                    self._say(record, Event(queued=queued))
                case core.TellDrain(worker):
                    log.info("worker drains", extra={"worker_id": worker.worker_id})
                    _link(worker).drain()
                case core.DropWorker(worker, why):
                    log.warning("worker gone", extra={"worker_id": worker.worker_id, "why": why})
                    link = _link(worker)
                    del self._links[link]
                    link.close(why)
        self._arm()

    def _dispatch(self, record: Record, worker: Worker, handle: int) -> None:
        call, link = record.request.payload, _link(worker)
        if isinstance(call, EmbedCall):
            call.task = asyncio.create_task(self._embed_on(link, record, handle, call))
            return
        assert isinstance(call, Call)
        if record.choices:
            translate.set_progress(call.request, record)
        link.submit(handle, call.request)

    async def _embed_on(
        self, link: WorkerLink, record: Record, handle: int, call: EmbedCall
    ) -> None:
        """One attempt. Its end counts only while the record is still on this very attempt."""
        try:
            answer = await link.embed(call.request)
        except grpc.aio.AioRpcError as failure:
            if record.handle == handle and record.worker is not None:
                error = rpc.from_rpc_error(failure)
                self._apply(self.core.request_failed(self.now(), record, error))
            return
        if record.handle == handle and record.worker is not None:
            if not call.answer.done():
                call.answer.set_result(answer)
            self._apply(self.core.request_finished(self.now(), record))

    def _say(self, record: Record, event: Event) -> None:
        call = record.request.payload
        if isinstance(call, Call):
            event.handle = call.handle
            call.outbox.events.append(event)
            self.flush(call.outbox)

    def _say_failed(self, record: Record, error: errors.CandorError) -> None:
        call = record.request.payload
        if isinstance(call, EmbedCall):
            if not call.answer.done():
                call.answer.set_exception(error)
            return
        assert isinstance(call, Call)
        if call.outbox.live.pop(call.handle, None) is not None:
            self._say(record, Event(failed=rpc.to_status(error)))
            self._log_end(self.now(), record, error.reason)

    def _say_finished(self, record: Record) -> None:
        """Closing words in place of those that a dead worker kept to itself."""
        call = record.request.payload
        assert isinstance(call, Call)
        finished = inference_pb2.Finished(
            usage=inference_pb2.Usage(
                prompt_tokens=record.request.num_prompt_tokens,
                completion_tokens=record.num_relayed,
                cached_tokens=call.cached_tokens,
            )
        )
        now = self.now()
        self._complete_timings(now, record, finished)
        del call.outbox.live[call.handle]
        self._say(record, Event(finished=finished))
        self._log_end(now, record, "finished")

    def flush(self, outbox: Outbox) -> None:
        """Have what waits for the client sent; cut it off when that is too much."""
        if not outbox.flush():
            # Not from here: the caller may be in the middle of this client's events.
            self._loop.call_soon(self._cut_off, outbox)

    def _cut_off(self, outbox: Outbox) -> None:
        if not outbox.is_cut_off:
            log.warning("client cut off", extra={"requests": len(outbox.live)})
            self.close_outbox(outbox)
            outbox.cut_off(
                errors.ResourceExhausted(
                    f"the client did not read its events; more than {self._client_buffer} wait",
                    reason="SLOW_CLIENT",
                )
            )

    def _log_end(self, now: float, record: Record, outcome: str) -> None:
        log.info(
            "request ended",
            extra={
                "request_id": record.request.request_id,
                "model": record.model,
                "tenant": record.request.tenant,
                "outcome": outcome,
                "prompt_tokens": record.request.num_prompt_tokens,
                "generated_tokens": record.num_relayed,
                "queue_ms": round(1000 * record.waited_s, 1),
                "total_ms": round(1000 * (now - record.submitted_at), 1),
            },
        )

    # --- time and end ---

    def _arm(self) -> None:
        """Have the core looked after when it next wants to, and watch for the last request to end."""
        if self.core.num_in_flight:
            self._is_idle.clear()
        else:
            self._is_idle.set()
        at = self.core.next_at()
        if at is None:
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self.core.tick(self.now()))

    async def stop(self, grace_s: float) -> None:
        """Refuse what is new, let what runs finish for `grace_s` seconds, then end everything."""
        self._is_stopping = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("grace is over", extra={"requests": self.core.num_in_flight})
        self._apply(self.core.close(self.now()))
        for outbox in list(self._outboxes):
            outbox.close()
        links = list(self._links.items())
        for _, worker in links:
            self._apply(self.core.worker_lost(self.now(), worker, "the scheduler shuts down"))
        for link, _ in links:
            await link.wait_closed()
        if self._timer is not None:
            self._timer.cancel()


def _link(worker: Worker) -> WorkerLink:
    link = worker.spec.payload
    assert isinstance(link, WorkerLink)
    return link


def _us(seconds: float) -> int:
    return round(1_000_000 * seconds)
