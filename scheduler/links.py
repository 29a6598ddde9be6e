"""The connection to one worker: its Attach stream (it called us) and its Run stream (we call it back).

Knows how to talk, nothing about what is worth saying.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from candor import rpc
from candor.v1 import engine_pb2, engine_pb2_grpc, inference_pb2

log = logging.getLogger("scheduler.links")


class LinkEvents(Protocol):
    """Who is told what the worker does."""

    def linked(self, link: WorkerLink) -> None:
        """The worker's address answers, its Run stream is open."""

    def frame_arrived(self, link: WorkerLink, frame: engine_pb2.RunResponse) -> None:
        """The worker made a step."""

    def link_broken(self, link: WorkerLink, why: str) -> None:
        """The connection is over; said once, unless `close` came first."""


class WorkerLink:
    """Both streams of one worker instance."""

    def __init__(
        self,
        info: engine_pb2.WorkerInfo,
        events: LinkEvents,
        *,
        connect_timeout_s: float,
        command_limit: int,
    ) -> None:
        self.info = info
        self.load = engine_pb2.Load()
        """As last reported, for consoles."""
        self.closed_because: str | None = None
        self._events = events
        self._connect_timeout_s = connect_timeout_s
        self._command_limit = command_limit
        self._commands: list[engine_pb2.EngineCommand] = []
        self._has_commands = asyncio.Event()
        self._wants_drain = False
        self._attach_wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None

    # --- the Attach side ---

    async def responses(self) -> AsyncIterator[engine_pb2.AttachResponse]:
        """What the worker is told on its Attach stream, until the link is closed."""
        told_drain = False
        while self.closed_because is None:
            if self._wants_drain and not told_drain:
                told_drain = True
                yield engine_pb2.AttachResponse(drain=engine_pb2.Drain())
                continue
            self._attach_wake.clear()
            await self._attach_wake.wait()

    def drain(self) -> None:
        """Ask the worker to finish and leave."""
        self._wants_drain = True
        self._attach_wake.set()

    # --- the Run side ---

    def open(self) -> None:
        """Start to dial; `linked` or `link_broken` tell how it went."""
        self._channel = rpc.connect(self.info.address)
        self._task = asyncio.create_task(
            self._run(self._channel), name=f"link {self.info.worker_id}"
        )

    def submit(self, handle: int, request: inference_pb2.GenerateRequest) -> None:
        """Queue a request for the worker."""
        submit = engine_pb2.Submit(handle=handle, request=request)
        self._send(engine_pb2.EngineCommand(submit=submit))

    def cancel(self, handle: int) -> None:
        """Queue a cancel for the worker."""
        self._send(engine_pb2.EngineCommand(cancel=engine_pb2.Cancel(handle=handle)))

    def _send(self, command: engine_pb2.EngineCommand) -> None:
        self._commands.append(command)
        self._has_commands.set()
        if len(self._commands) > self._command_limit:
            # Not from here: the caller is in the middle of carrying out other decisions.
            asyncio.get_running_loop().call_soon(self._broken, "it does not read its commands")

    async def embed(self, request: inference_pb2.EmbedRequest) -> inference_pb2.EmbedResponse:
        """Have the worker embed. Bounded by its lease: a lost worker's call is cancelled."""
        assert self._channel is not None
        stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        wrapped = engine_pb2.EngineServiceEmbedRequest(request=request)
        answer = await stub.Embed(wrapped, metadata=rpc.call_metadata(request.request_id))
        return answer.response

    async def _run(self, channel: grpc.aio.Channel) -> None:
        why = "its stream ended"
        try:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    await channel.channel_ready()
            except TimeoutError:
                why = "its own address cannot be reached"
                return
            if self.info.model.kind == inference_pb2.MODEL_KIND_EMBEDDING:
                # Embedding is one call per request; the Attach stream tells whether the worker lives.
                self._events.linked(self)
                await asyncio.Event().wait()
            else:
                await self._talk(channel)
        except grpc.aio.AioRpcError as error:
            why = f"its stream broke: {error.code().name.lower()}"
        except Exception:
            why = "the scheduler failed on it"
            log.exception("relay failed", extra={"worker_id": self.info.worker_id})
        finally:
            await channel.close()
            self._broken(why)

    async def _talk(self, channel: grpc.aio.Channel) -> None:
        call = engine_pb2_grpc.EngineServiceStub(channel).Run()
        writer = asyncio.create_task(self._write(call))
        try:
            self._events.linked(self)
            async for frame in call:
                self._events.frame_arrived(self, frame)
        finally:
            writer.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    async def _write(
        self, call: grpc.aio.StreamStreamCall[engine_pb2.RunRequest, engine_pb2.RunResponse]
    ) -> None:
        try:
            while True:
                await self._has_commands.wait()
                self._has_commands.clear()
                commands, self._commands = self._commands, []
                await call.write(engine_pb2.RunRequest(commands=commands))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The reader sees the same end and reports it.
            log.debug("run stream: write failed", exc_info=error)

    def _broken(self, why: str) -> None:
        if self.closed_because is None:
            self._events.link_broken(self, why)

    def close(self, why: str) -> None:
        """End both streams. Idempotent."""
        if self.closed_because is None:
            self.closed_because = why
            self._attach_wake.set()
            if self._task is not None:
                self._task.cancel()

    async def wait_closed(self) -> None:
        """After `close`: until the Run stream is really gone."""
        if self._task is not None:
            await asyncio.wait([self._task])
