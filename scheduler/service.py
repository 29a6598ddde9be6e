"""The gRPC doors: SchedulerService for clients, RegistryService for workers.

Protobuf in, dispatcher calls, protobuf out. Knows nothing about order or placement.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

from candor import errors, rpc, telemetry
from candor.v1 import engine_pb2, engine_pb2_grpc, inference_pb2, scheduler_pb2, scheduler_pb2_grpc
from scheduler import translate
from scheduler.clients import TokenizerClient
from scheduler.core import admission
from scheduler.core.types import ModelKind
from scheduler.dispatcher import Dispatcher
from scheduler.links import WorkerLink
from scheduler.outbox import Outbox

log = logging.getLogger("scheduler.service")

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_FAREWELL_S = 0.1
"""For a status to be handed to the transport."""


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The door for gateways and other callers."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: TokenizerClient,
        *,
        max_encoding: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._max_encoding = max_encoding
        self._num_encoding = 0

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.GenerateResponse]:
        """One request, one stream."""
        outbox = self._dispatcher.open_outbox(_hanging_up(context))
        try:
            if not request.request_id:
                request.request_id = telemetry.request_id.get()
            await self.encode(request)
            self._dispatcher.submit(outbox, 0, request)
            while events := await outbox.take():
                for event in events:
                    if event.HasField("failed"):
                        raise rpc.from_status(event.failed)
                    event.ClearField("handle")
                    yield scheduler_pb2.GenerateResponse(event=event)
                    if event.HasField("finished"):
                        return
        finally:
            self._dispatcher.close_outbox(outbox)

    async def Connect(
        self, request_iterator: AsyncIterator[scheduler_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.ConnectResponse]:
        """Many requests on one stream."""
        outbox = self._dispatcher.open_outbox(_hanging_up(context))
        session = _Session(self, self._dispatcher, outbox)
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            while events := await outbox.take():
                yield scheduler_pb2.ConnectResponse(events=events)
                session.close_when_done()
        finally:
            reader.cancel()
            session.cancel_encoding()
            self._dispatcher.close_outbox(outbox)

    async def Embed(
        self, request: scheduler_pb2.SchedulerServiceEmbedRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceEmbedResponse:
        """Relayed to an embedding worker."""
        embed = request.request
        if not embed.request_id:
            embed.request_id = uuid.uuid4().hex
        answer = await self._dispatcher.embed(embed)
        return scheduler_pb2.SchedulerServiceEmbedResponse(response=answer)

    async def ListModels(
        self, request: scheduler_pb2.ListModelsRequest, context: Context
    ) -> scheduler_pb2.ListModelsResponse:
        """Models that workers serve, or served a moment ago."""
        infos = {link.info.model.name: link.info.model for link in self._links()}
        names = [model.name for model in self._dispatcher.core.pool.models()]
        return scheduler_pb2.ListModelsResponse(models=[infos[name] for name in names])

    async def ListWorkers(
        self, request: scheduler_pb2.ListWorkersRequest, context: Context
    ) -> scheduler_pb2.ListWorkersResponse:
        """Every worker, the lately lost ones too."""
        return scheduler_pb2.ListWorkersResponse(workers=self._statuses())

    async def GetStats(
        self, request: scheduler_pb2.GetStatsRequest, context: Context
    ) -> scheduler_pb2.GetStatsResponse:
        """Gauges and totals."""
        core = self._dispatcher.core
        return scheduler_pb2.GetStatsResponse(
            num_queued=core.queue.num_requests,
            num_queued_tokens=core.queue.num_tokens,
            num_running=core.num_in_flight - core.queue.num_requests,
            max_queued=core.limits.max_queued_requests,
            workers=self._statuses(),
            num_submitted=core.stats.submitted,
            num_finished=core.stats.finished,
            num_failed=core.stats.failed,
            num_cancelled=core.stats.cancelled,
            num_refused=core.stats.refused,
        )

    async def DrainWorker(
        self, request: scheduler_pb2.DrainWorkerRequest, context: Context
    ) -> scheduler_pb2.DrainWorkerResponse:
        """Nothing new for that worker."""
        num_running = self._dispatcher.drain_worker(request.worker_id)
        return scheduler_pb2.DrainWorkerResponse(num_running=num_running)

    def _links(self) -> list[WorkerLink]:
        payloads = [w.spec.payload for w in self._dispatcher.core.pool.workers.values()]
        return [link for link in payloads if isinstance(link, WorkerLink)]

    def _statuses(self) -> list[scheduler_pb2.WorkerStatus]:
        now = self._dispatcher.now()
        workers = self._dispatcher.core.pool.workers.values()
        return [
            translate.worker_status(now, worker, link.info, link.load)
            for worker, link in zip(workers, self._links(), strict=True)
        ]

    async def encode(self, request: inference_pb2.GenerateRequest) -> None:
        """Give the request token ids, whatever its prompt came as, and an id."""
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        kind = request.prompt.WhichOneof("kind")
        if kind is None:
            raise errors.InvalidArgument("the request has no prompt", field="prompt")
        if kind == "token_ids":
            return
        pool = self._dispatcher.core.pool
        model = admission.check_model(pool, request.model, ModelKind.GENERATIVE)
        if self._num_encoding >= self._max_encoding:
            raise errors.ResourceExhausted(
                f"{self._num_encoding} prompts are at the tokenizer, the limit is {self._max_encoding}",
                retry_after_s=1.0,
            )
        self._num_encoding += 1
        try:
            ids, fingerprint = await self._tokenizer.encode(model.name, request.prompt)
        finally:
            self._num_encoding -= 1
        request.prompt.token_ids.ids[:] = ids
        request.tokenizer_fingerprint = fingerprint


def _hanging_up(context: Context) -> Callable[[errors.CandorError], None]:
    """How to end the present stream although its sender waits for a client that does not read.

    The status lines up behind the unread events, so that the client sees it when it reads after all; then
    the sender is cancelled, so that nothing here waits with it.
    """
    sender = asyncio.current_task()
    assert sender is not None

    async def hang_up(error: errors.CandorError) -> None:
        farewell = asyncio.ensure_future(rpc.abort(context, error))
        await asyncio.wait([farewell], timeout=_FAREWELL_S)
        sender.cancel()
        # It ends by the error it raises, or with the connection.
        await asyncio.wait([farewell])
        farewell.exception()

    pending: set[asyncio.Task[None]] = set()

    def start(error: errors.CandorError) -> None:
        task = asyncio.create_task(hang_up(error))
        pending.add(task)
        task.add_done_callback(pending.discard)

    return start


class _Session:
    """The commands of one Connect stream, and the prompts of it that are at the tokenizer."""

    def __init__(self, service: SchedulerService, dispatcher: Dispatcher, outbox: Outbox) -> None:
        self._service = service
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._encoding: dict[int, asyncio.Task[None]] = {}
        self._is_half_closed = False

    async def read(self, commands: AsyncIterator[scheduler_pb2.ConnectRequest]) -> None:
        """Until the client has said everything; what it submitted goes on."""
        try:
            async for request in commands:
                for command in request.commands:
                    self._obey(command)
        except errors.CandorError as error:
            self._outbox.close(error)
        except Exception:
            log.exception("connect stream: reading failed")
            self._outbox.close(errors.Internal("internal error"))
        self._is_half_closed = True
        self.close_when_done()

    def close_when_done(self) -> None:
        """End the stream when nothing more can come."""
        outbox = self._outbox
        if self._is_half_closed and not (outbox.live or outbox.events or self._encoding):
            outbox.close()

    def cancel_encoding(self) -> None:
        """The client is gone."""
        for task in self._encoding.values():
            task.cancel()

    def _obey(self, command: scheduler_pb2.ClientCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "cancel":
            handle = command.cancel.handle
            if task := self._encoding.pop(handle, None):
                task.cancel()
                self._refuse(handle, errors.Cancelled("the request was cancelled"))
            else:
                self._dispatcher.cancel(self._outbox, handle)
        elif kind == "submit":
            self._submit(command.submit.handle, command.submit.request)
        else:
            raise errors.InvalidArgument("a command is neither submit nor cancel", field="commands")

    def _submit(self, handle: int, request: inference_pb2.GenerateRequest) -> None:
        if handle in self._outbox.live or handle in self._encoding:
            raise errors.InvalidArgument(f"handle {handle} is in use", field="handle")
        if request.prompt.WhichOneof("kind") == "token_ids":
            if not request.request_id:
                request.request_id = uuid.uuid4().hex
            try:
                self._dispatcher.submit(self._outbox, handle, request)
            except errors.CandorError as error:
                self._refuse(handle, error)
        else:
            self._encoding[handle] = asyncio.create_task(self._encode(handle, request))

    async def _encode(self, handle: int, request: inference_pb2.GenerateRequest) -> None:
        try:
            await self._service.encode(request)
            del self._encoding[handle]
            self._dispatcher.submit(self._outbox, handle, request)
        except errors.CandorError as error:
            self._encoding.pop(handle, None)
            self._refuse(handle, error)
        except Exception:
            self._encoding.pop(handle, None)
            log.exception("encoding failed", extra={"request_id": request.request_id})
            self._refuse(handle, errors.Internal("internal error"))

    def _refuse(self, handle: int, error: errors.CandorError) -> None:
        event = inference_pb2.GenerateEvent(handle=handle, failed=rpc.to_status(error))
        self._outbox.events.append(event)
        self._dispatcher.flush(self._outbox)


class RegistryService(engine_pb2_grpc.RegistryServiceServicer):
    """The door for workers."""

    def __init__(self, dispatcher: Dispatcher, *, lease_ms: int) -> None:
        self._dispatcher = dispatcher
        self._lease_ms = lease_ms

    async def Attach(
        self, request_iterator: AsyncIterator[engine_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """A worker's registration: lives as long as this stream and its lease."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("register"):
            raise errors.InvalidArgument("the first message must be register", field="register")
        link = self._dispatcher.attach(first.register)
        reader = asyncio.create_task(self._read(request_iterator, link))
        try:
            accepted = engine_pb2.Accepted(lease_ms=self._lease_ms)
            yield engine_pb2.AttachResponse(accepted=accepted)
            async for response in link.responses():
                yield response
        finally:
            reader.cancel()
            self._dispatcher.detach(link)
        raise errors.Unavailable(
            f"the registration is over: {link.closed_because}", reason="WORKER_DROPPED"
        )

    async def _read(
        self, requests: AsyncIterator[engine_pb2.AttachRequest], link: WorkerLink
    ) -> None:
        try:
            async for request in requests:
                if request.HasField("report"):
                    self._dispatcher.report(link, request.report)
        except Exception:
            log.exception("attach stream: reading failed", extra={"worker_id": link.info.worker_id})
        finally:
            self._dispatcher.detach(link)
