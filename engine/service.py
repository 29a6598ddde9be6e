"""EngineService on top of a backend: commands up, one frame per engine step down.

Owns what belongs to a stream: its handles, its outbound buffer, and the duty to abort what it began. Knows
nothing about how tokens are made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from candor import errors
from candor.v1 import engine_pb2, engine_pb2_grpc, inference_pb2
from engine import translate
from engine.backends import Backend, Frame
from engine.core.types import Failed, Finished

log = logging.getLogger("engine.service")

Info = Callable[[], engine_pb2.WorkerInfo]
Report = Callable[[], engine_pb2.Report]


@dataclass(frozen=True, slots=True)
class Served:
    """What a request is checked against before the backend sees it."""

    names: tuple[str, ...]
    """The model's name and its aliases."""
    fingerprint: str


def check_request(
    request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest,
    served: Served,
    is_draining: bool,
) -> None:
    """Whether a request came to the right worker. Raises Unavailable, NotFound, FailedPrecondition."""
    if is_draining:
        raise errors.Unavailable("the worker finishes what it has and leaves", reason="DRAINING")
    if request.HasField("model") and request.model not in served.names:
        raise errors.NotFound(
            f"this worker serves {', '.join(served.names)}, not {request.model!r}", field="model"
        )
    theirs = request.tokenizer_fingerprint
    if request.HasField("tokenizer_fingerprint") and theirs != served.fingerprint:
        raise errors.FailedPrecondition(
            f"the token ids were made by tokenizer {theirs[:12]}, this worker's is"
            f" {served.fingerprint[:12]}",
            reason="TOKENIZER_MISMATCH",
            field="tokenizer_fingerprint",
        )


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """The worker's door."""

    def __init__(
        self,
        backend: Backend,
        served: Served,
        *,
        piece: translate.Piece,
        info: Info,
        report: Report,
        is_draining: Callable[[], bool],
        max_buffered_frames: int,
        max_buffered_bytes: int,
    ) -> None:
        """`max_buffered_frames` and `_bytes`: what a stream may leave unread before it is ended."""
        self._backend = backend
        self._served = served
        self._piece = piece
        self._info = info
        self._report = report
        self._is_draining = is_draining
        self._max_frames = max_buffered_frames
        self._max_bytes = max_buffered_bytes

    async def Run(
        self,
        request_iterator: AsyncIterator[engine_pb2.RunRequest],
        context: grpc.aio.ServicerContext[engine_pb2.RunRequest, engine_pb2.RunResponse],
    ) -> AsyncIterator[engine_pb2.RunResponse]:
        """Serve one scheduler until its stream ends."""
        stream = _Stream(self._backend, self._piece, self._max_frames, self._max_bytes)
        reader = asyncio.create_task(self._read(request_iterator, stream), name="run reader")
        try:
            while (response := await stream.next()) is not None:
                yield response
        finally:
            reader.cancel()
            stream.close()

    async def _read(self, requests: AsyncIterator[engine_pb2.RunRequest], stream: _Stream) -> None:
        try:
            async for request in requests:
                for command in request.commands:
                    self._obey(command, stream)
            stream.no_more_commands()
        except errors.CandorError as error:
            stream.fail(error)
        except grpc.RpcError as error:
            stream.fail(errors.Cancelled(f"the stream broke: {error}"))
        except Exception as error:
            log.exception("a command could not be carried out")
            stream.fail(error)

    def _obey(self, command: engine_pb2.EngineCommand, stream: _Stream) -> None:
        kind = command.WhichOneof("kind")
        if kind == "cancel":
            stream.cancel(command.cancel.handle)
        elif kind == "submit":
            if not command.submit.HasField("handle"):
                raise errors.InvalidArgument("a submit without a handle", field="submit.handle")
            self._submit(command.submit, stream)
        else:
            raise errors.InvalidArgument("a command of a kind that this worker does not know")

    def _submit(self, submit: engine_pb2.Submit, stream: _Stream) -> None:
        key = stream.open(self._backend.next_key(), submit.handle)
        try:
            check_request(submit.request, self._served, self._is_draining())
            request = translate.request_from_pb(
                submit.request, key, now=time.monotonic(), unix_ms=round(time.time() * 1000)
            )
        except errors.CandorError as error:
            stream.refuse(key, error)
            return
        self._backend.submit(request, stream)

    async def Embed(
        self,
        request: engine_pb2.EngineServiceEmbedRequest,
        context: grpc.aio.ServicerContext[
            engine_pb2.EngineServiceEmbedRequest, engine_pb2.EngineServiceEmbedResponse
        ],
    ) -> engine_pb2.EngineServiceEmbedResponse:
        """Not this kind of worker."""
        raise errors.Unimplemented(
            f"{self._served.names[0]} generates text and has no embeddings", field="model"
        )

    async def GetInfo(
        self,
        request: engine_pb2.GetInfoRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetInfoRequest, engine_pb2.GetInfoResponse],
    ) -> engine_pb2.GetInfoResponse:
        """Who this is and how it is doing."""
        return engine_pb2.GetInfoResponse(info=self._info(), report=self._report())


class _Stream:
    """One Run stream: its requests and what it has not read yet."""

    def __init__(
        self, backend: Backend, piece: translate.Piece, max_frames: int, max_bytes: int
    ) -> None:
        self._backend = backend
        self._piece = piece
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._handles: dict[int, int] = {}
        """The backend's key → the sender's handle, for requests that have not ended."""
        self._frames: deque[engine_pb2.RunResponse] = deque()
        self._num_bytes = 0
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self._takes_commands = True

    # --- requests ---

    def open(self, key: int, handle: int) -> int:
        """Note a new request. Raises when the handle is in use: its events could not be told apart."""
        if handle in self._handles.values():
            raise errors.InvalidArgument(
                f"handle {handle} belongs to a request that has not ended", field="submit.handle"
            )
        self._handles[key] = handle
        return key

    def cancel(self, handle: int) -> None:
        """Forget a request; one that has ended in the meantime is nothing to complain about."""
        for key, known in self._handles.items():
            if known == handle:
                del self._handles[key]
                self._backend.abort(key)
                self._wake.set()
                return

    def refuse(self, key: int, error: errors.CandorError) -> None:
        """End a request that never came to the backend."""
        progress = self._backend.progress()
        handle = self._handles.pop(key)
        event = translate.event_to_pb(Failed(key, error), handle, self._piece)
        self._put(engine_pb2.RunResponse(step_seq=progress.step_seq, events=[event]))

    def deliver(self, frame: Frame) -> None:
        """Take a step's events; see `engine.backends.Sink`."""
        events: list[inference_pb2.GenerateEvent] = []
        for event in frame.events:
            handle = self._handles.get(event.key)
            if handle is None:
                continue
            events.append(translate.event_to_pb(event, handle, self._piece))
            if isinstance(event, Finished | Failed):
                del self._handles[event.key]
        if events:
            self._put(translate.frame_to_pb(frame, events))

    # --- the outbound side ---

    def _put(self, response: engine_pb2.RunResponse) -> None:
        self._frames.append(response)
        self._num_bytes += response.ByteSize()
        if len(self._frames) > self._max_frames or self._num_bytes > self._max_bytes:
            self.fail(
                errors.ResourceExhausted(
                    f"{len(self._frames)} frames of {self._num_bytes} bytes were not read in time",
                    reason="SLOW_READER",
                )
            )
        self._wake.set()

    async def next(self) -> engine_pb2.RunResponse | None:
        """The next frame; None when there will be none. Raises what ended the stream."""
        while True:
            if self._error is not None:
                raise self._error
            if self._frames:
                response = self._frames.popleft()
                self._num_bytes -= response.ByteSize()
                return response
            if not (self._takes_commands or self._handles):
                return None
            self._wake.clear()
            await self._wake.wait()

    def no_more_commands(self) -> None:
        """The sender is done; the stream ends with its last request."""
        self._takes_commands = False
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error; nothing more is kept for it."""
        self._error = self._error or error
        self._frames.clear()
        self._num_bytes = 0
        self.close()
        self._wake.set()

    def close(self) -> None:
        """Abort what the stream began."""
        for key in self._handles:
            self._backend.abort(key)
        self._handles.clear()
