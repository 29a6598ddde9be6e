"""The gateway's way to the other services: typed calls that raise `candor.errors`.

One multiplexed stream to the scheduler carries every request of this process: commands go up in batches,
frames come down and are dealt out to bounded per-request buffers. Knows no dialect and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from candor import errors, rpc
from candor.v1 import inference_pb2, scheduler_pb2, tokenizer_pb2
from candor.v1.scheduler_pb2_grpc import SchedulerServiceStub
from candor.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from gateway import translate
from gateway.catalog import ModelCard, Stats, TokenizerCard
from gateway.events import Tagged

log = logging.getLogger("gateway.clients")

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0
COMMANDS_PER_MESSAGE = 256


# --- tokenizer ---------------------------------------------------------------------------------------


class TokenizerClient:
    """Text to ids and back. Every call has a deadline."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._address = address
        self._channel = rpc.connect(address)
        self._stub = TokenizerServiceStub(self._channel)
        self._timeout_s = timeout_s

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def encode(
        self, model: str, texts: Sequence[str], *, add_special_tokens: bool, truncate_to: int | None
    ) -> tuple[list[list[int]], str]:
        """Token ids per text, and the tokenizer's fingerprint."""
        request = tokenizer_pb2.EncodeRequest(
            model=model, texts=texts, add_special_tokens=add_special_tokens, truncate_to=truncate_to
        )
        reply = await self._call(self._stub.Encode, request)
        return [list(s.ids) for s in reply.sequences], reply.fingerprint

    async def encode_chat(
        self,
        model: str,
        conversation: inference_pb2.ChatPrompt,
        *,
        add_special_tokens: bool,
        truncate_to: int | None,
    ) -> tuple[list[int], str]:
        """Token ids of the rendered conversation, and the tokenizer's fingerprint."""
        request = tokenizer_pb2.EncodeChatRequest(
            model=model,
            conversations=[conversation],
            add_special_tokens=add_special_tokens,
            truncate_to=truncate_to,
        )
        reply = await self._call(self._stub.EncodeChat, request)
        return list(reply.sequences[0].ids), reply.fingerprint

    async def decode(self, model: str, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence, special tokens shown."""
        request = tokenizer_pb2.DecodeRequest(
            model=model, sequences=[inference_pb2.TokenIds(ids=s) for s in sequences]
        )
        return list((await self._call(self._stub.Decode, request)).texts)

    async def describe(self, timeout_s: float | None = None) -> list[TokenizerCard]:
        """Every tokenizer that is loaded."""
        request = tokenizer_pb2.DescribeRequest()
        reply = await self._call(self._stub.Describe, request, timeout_s)
        return [translate.tokenizer_from_pb(t) for t in reply.tokenizers]

    async def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self._timeout_s
        return await _unary(method, request, timeout_s, f"tokenizer at {self._address}")


async def _unary(method: Any, request: Any, timeout_s: float, whom: str) -> Any:
    try:
        return await method(request, timeout=timeout_s, metadata=rpc.call_metadata())
    except grpc.aio.AioRpcError as error:
        raised = rpc.from_rpc_error(error)
        # A bare status is the transport's own: nobody said it on purpose.
        is_bare = raised.reason == raised.default_reason
        if isinstance(raised, errors.Unavailable | errors.DeadlineExceeded) and is_bare:
            raise errors.Unavailable(
                f"the {whom} does not answer", reason="UPSTREAM_LOST", retry_after_s=1.0
            ) from error
        raise raised from error


# --- scheduler ---------------------------------------------------------------------------------------


class Generation:
    """One request's events. Iterating gives, each time, everything that has arrived.

    Ends after the last prompt's Finished; raises the request's failure. `close` cancels whatever still runs,
    so it belongs in a `finally` (or use it as a context manager). When the consumer lags by more than the
    buffer holds, the request is cancelled and `on_overflow` is called once.
    """

    def __init__(self, limit: int, close: Callable[[Generation], None]) -> None:
        self._events: list[Tagged] = []
        self._limit = limit
        self._close = close
        self._waiter: asyncio.Future[None] | None = None
        self._error: errors.CandorError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.handles: dict[int, int] = {}
        """Handles that still run → which prompt each is."""
        self.on_overflow: Callable[[], object] | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Tagged]:
        while not self._events:
            if self._error is not None:
                raise self._error
            if not self.handles:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs. Idempotent; nothing is sent for a request that has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)

    def expire_after(self, timeout_s: float) -> None:
        """Fail with DeadlineExceeded when the request is not closed by then."""
        late = errors.DeadlineExceeded(f"the request took longer than {timeout_s:g} s")
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.fail, late)

    @property
    def is_complete(self) -> bool:
        """Whether every prompt has finished and everything that arrived has been taken."""
        return not self.handles and not self._events and self._error is None

    def push(self, handle: int, event: inference_pb2.GenerateEvent) -> None:
        """Take one event of this request off the wire."""
        kind = event.WhichOneof("event")
        if kind == "failed":
            del self.handles[handle]
            self.fail(rpc.from_status(event.failed))
            return
        plain = translate.event_from_pb(event, kind)
        if plain is None:
            return
        if len(self._events) >= self._limit:
            self._overflow()
            return
        self._events.append(Tagged(self.handles[handle], plain))
        if kind == "finished":
            del self.handles[handle]
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: errors.CandorError) -> None:
        """End the request with `error`, after what has already arrived."""
        if self._error is None:
            self._error = error
        self._wake()

    def _overflow(self) -> None:
        message = (
            f"the client reads too slowly: {self._limit} events are waiting, which is the limit"
        )
        self.fail(errors.ResourceExhausted(message, reason="SLOW_CLIENT"))
        self.close()
        if self.on_overflow is not None:
            self.on_overflow()
            self.on_overflow = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SchedulerClient:
    """The one stream to the scheduler, and its unary calls."""

    def __init__(
        self, address: str, *, timeout_s: float, stream_buffer: int, submit_buffer: int
    ) -> None:
        self._address = address
        self._channel = rpc.connect(address)
        self._stub = SchedulerServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._stream_buffer, self._submit_buffer = stream_buffer, submit_buffer
        self._running: dict[int, Generation] = {}
        self._outbox: deque[scheduler_pb2.ClientCommand] = deque()
        self._wake = asyncio.Event()
        self._next_handle = 1
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether requests can be submitted."""
        return self._connected.is_set()

    async def wait_connected(self) -> None:
        """Wait until requests can be submitted."""
        await self._connected.wait()

    @property
    def num_running(self) -> int:
        """Prompts submitted and not ended."""
        return len(self._running)

    async def start(self) -> None:
        """Begin to hold the stream; returns at once."""
        self._task = asyncio.create_task(self._hold(), name="scheduler stream")

    async def close(self) -> None:
        """End the stream, and with it everything that runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def generate(
        self, requests: Sequence[inference_pb2.GenerateRequest], *, timeout_s: float
    ) -> Generation:
        """Submit the prompts of one request. Raises Unavailable without a stream to the scheduler."""
        if not self.is_connected:
            raise self._lost("does not answer")
        if len(self._outbox) + len(requests) > self._submit_buffer:
            raise errors.Unavailable(
                f"{len(self._outbox)} commands wait for the scheduler, limit {self._submit_buffer}",
                reason="SUBMIT_BUFFER_FULL",
                retry_after_s=1.0,
            )
        generation = Generation(self._stream_buffer, self._cancel)
        for prompt, request in enumerate(requests):
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            generation.handles[handle] = prompt
            self._running[handle] = generation
            submit = {"handle": handle, "request": request}
            self._send(scheduler_pb2.ClientCommand(submit=submit))
        generation.expire_after(timeout_s)
        return generation

    async def embed(
        self,
        model: ModelCard,
        inputs: Sequence[Sequence[int]],
        *,
        request_id: str,
        fingerprint: str,
        timeout_s: float,
    ) -> list[list[float]]:
        """One vector per input."""
        request = inference_pb2.EmbedRequest(
            request_id=request_id,
            model=model.name,
            inputs=[inference_pb2.TokenIds(ids=ids) for ids in inputs],
        )
        if fingerprint:
            request.tokenizer_fingerprint = fingerprint
        wrapped = scheduler_pb2.SchedulerServiceEmbedRequest(request=request)
        reply = await self._call(self._stub.Embed, wrapped, timeout_s)
        return [list(e.values) for e in reply.response.embeddings]

    async def list_models(self, timeout_s: float | None = None) -> list[ModelCard]:
        """Every model that workers have registered."""
        reply = await self._call(
            self._stub.ListModels, scheduler_pb2.ListModelsRequest(), timeout_s
        )
        return [translate.model_from_pb(m) for m in reply.models]

    async def stats(self, timeout_s: float | None = None) -> Stats:
        """The scheduler's numbers and its workers."""
        reply = await self._call(self._stub.GetStats, scheduler_pb2.GetStatsRequest(), timeout_s)
        return translate.stats_from_pb(reply)

    async def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self._timeout_s
        return await _unary(method, request, timeout_s, f"scheduler at {self._address}")

    # --- the stream ----------------------------------------------------------------------------------

    def _cancel(self, generation: Generation) -> None:
        for handle in generation.handles:
            if self._running.pop(handle, None) is not None and self.is_connected:
                self._send(scheduler_pb2.ClientCommand(cancel={"handle": handle}))
        generation.handles.clear()

    def _send(self, command: scheduler_pb2.ClientCommand) -> None:
        self._outbox.append(command)
        self._wake.set()

    def _lost(self, what: str) -> errors.Unavailable:
        return errors.Unavailable(
            f"the scheduler at {self._address} {what}", reason="SCHEDULER_LOST", retry_after_s=1.0
        )

    async def _hold(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            try:
                await self._converse()
                why = "the scheduler ended the stream"
            except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else ""
                why = details or type(error).__name__
            except Exception:
                # A fault of ours in dealing out events must not end the service: start over, loudly.
                log.exception("the scheduler stream failed")
                why = "internal error"
            was_connected = self.is_connected
            self._connected.clear()
            self._fail_all(self._lost("broke the stream; this request cannot be continued"))
            if was_connected:
                log.warning("lost the scheduler", extra={"address": self._address, "why": why})
            if time.monotonic() - began > LAST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _converse(self) -> None:
        call = self._stub.Connect(metadata=rpc.call_metadata())
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await call.wait_for_connection()
            self._outbox.clear()
            self._connected.set()
            log.info("connected to the scheduler", extra={"address": self._address})
            writer = asyncio.create_task(self._write(call), name="scheduler commands")
            while (frame := await call.read()) is not grpc.aio.EOF:
                assert isinstance(frame, scheduler_pb2.ConnectResponse)
                self._deal(frame)
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                size = min(len(self._outbox), COMMANDS_PER_MESSAGE)
                commands = [self._outbox.popleft() for _ in range(size)]
                await call.write(scheduler_pb2.ConnectRequest(commands=commands))

    def _deal(self, frame: scheduler_pb2.ConnectResponse) -> None:
        running = self._running
        for event in frame.events:
            handle = event.handle
            generation = running.get(handle)
            if generation is None:
                continue  # cancelled here while the event was on its way
            generation.push(handle, event)
            if handle not in generation.handles:
                running.pop(handle, None)

    def _fail_all(self, error: errors.CandorError) -> None:
        # A snapshot by identity: a request of several prompts is here once per prompt.
        generations = {id(g): g for g in self._running.values()}
        self._running.clear()
        for generation in generations.values():
            generation.handles.clear()
            generation.fail(error)
