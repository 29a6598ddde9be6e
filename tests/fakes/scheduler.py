"""A worker, a tokenizer and a client for tests of the scheduler: real gRPC over loopback, scripted by hand."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import grpc

from candor import rpc
from candor.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    inference_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

FINGERPRINT = "fake-1"
TIMEOUT_S = 10.0
Event = inference_pb2.GenerateEvent


async def until(holds: Callable[[], object], what: str = "") -> None:
    """Give other tasks turns until `holds()` is true; fails the test when that takes too long."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not holds():  # noqa: ASYNC110 (the condition lives in objects without events)
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never happened: {what or holds}") from None


def request(
    prompt: Iterable[int] = (1, 2, 3), *, request_id: str = "", model: str = "m", **fields: Any
) -> inference_pb2.GenerateRequest:
    """A request with token ids."""
    tokens = inference_pb2.TokenIds(ids=prompt)
    made = inference_pb2.GenerateRequest(
        model=model, prompt=inference_pb2.Prompt(token_ids=tokens), **fields
    )
    if request_id:
        made.request_id = request_id
    return made


class FakeWorker(engine_pb2_grpc.EngineServiceServicer):
    """Does what the test says; with `num_tokens` it answers every request with so many tokens by itself."""

    def __init__(
        self,
        worker_id: str = "w1",
        *,
        slots: int = 2,
        num_tokens: int | None = None,
        features: Iterable[engine_pb2.EngineFeature] = (engine_pb2.ENGINE_FEATURE_SEED,),
        **info: Any,
    ) -> None:
        self.submitted: list[engine_pb2.Submit] = []
        self.cancelled: list[int] = []
        self.embedded: list[inference_pb2.EmbedRequest] = []
        self.responses: list[engine_pb2.AttachResponse] = []
        self._is_accepted = asyncio.Event()
        self.attach_error: grpc.aio.AioRpcError | None = None
        self.step_seq = 0
        self._num_tokens = num_tokens
        self._left: dict[int, int] = {}
        self._frames: asyncio.Queue[engine_pb2.RunResponse | None] = asyncio.Queue()
        self._reports: asyncio.Queue[engine_pb2.AttachRequest | None] = asyncio.Queue()
        model = inference_pb2.ModelInfo(
            name="m",
            max_model_len=100,
            vocab_size=1000,
            tokenizer_fingerprint=FINGERPRINT,
            kind=inference_pb2.MODEL_KIND_GENERATIVE,
        )
        self.info = engine_pb2.WorkerInfo(
            worker_id=worker_id,
            instance_id=f"{worker_id}-1",
            model=model,
            slots=slots,
            api_major=1,
            features=features,
        )
        self.info.MergeFrom(engine_pb2.WorkerInfo(**info))

    async def start(self, scheduler_port: int) -> FakeWorker:
        """Serve, attach and say ready."""
        self._server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        if not self.info.address:
            self.info.address = f"127.0.0.1:{port}"
        self._channel = rpc.connect(f"127.0.0.1:{scheduler_port}")
        self._attached = asyncio.create_task(self._attach())
        self.report()
        return self

    def report(
        self,
        *,
        state: engine_pb2.WorkerState = engine_pb2.WORKER_STATE_READY,
        idle: bool = True,
        load: engine_pb2.Load | None = None,
    ) -> None:
        """Send a report."""
        self.send(engine_pb2.Report(state=state, idle=idle, last_step_seq=self.step_seq, load=load))

    def send(self, report: engine_pb2.Report) -> None:
        """Send this very report."""
        self._reports.put_nowait(engine_pb2.AttachRequest(report=report))

    def step(self, *events: Event) -> None:
        """Send one frame."""
        self.step_seq += 1
        self._frames.put_nowait(engine_pb2.RunResponse(step_seq=self.step_seq, events=events))

    def start_request(self, handle: int) -> None:
        """Say Started."""
        self.step(Event(handle=handle, started=inference_pb2.Started(num_cached_tokens=0)))

    async def leave(self) -> None:
        """End the Attach stream in order."""
        self._reports.put_nowait(None)
        await self._attached
        await self._shut()

    async def kill(self) -> None:
        """Vanish: every stream breaks at once."""
        self._attached.cancel()
        await asyncio.wait([self._attached])
        await self._shut()

    async def _shut(self) -> None:
        self._frames.put_nowait(None)
        await self._server.stop(0)
        await self._channel.close()

    async def _attach(self) -> None:
        async def said() -> AsyncIterator[engine_pb2.AttachRequest]:
            yield engine_pb2.AttachRequest(register=self.info)
            # Writing to a call that is being refused would hide the refusal behind the failed write.
            await self._is_accepted.wait()
            while (report := await self._reports.get()) is not None:
                yield report

        stub = engine_pb2_grpc.RegistryServiceStub(self._channel)
        try:
            async for response in stub.Attach(said()):
                self.responses.append(response)
                self._is_accepted.set()
        except grpc.aio.AioRpcError as error:
            self.attach_error = error

    async def Run(
        self, request_iterator: AsyncIterator[engine_pb2.RunRequest], context: Any
    ) -> AsyncIterator[engine_pb2.RunResponse]:
        """The stream that the scheduler opens."""
        self.peer_cancelled = False
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (frame := await self._frames.get()) is not None:
                yield frame
        finally:
            self.peer_cancelled = True
            reader.cancel()

    async def _read(self, requests: AsyncIterator[engine_pb2.RunRequest]) -> None:
        async for request in requests:
            for command in request.commands:
                if command.HasField("submit"):
                    self.submitted.append(command.submit)
                    if self._num_tokens is not None:
                        self._answer(command.submit)
                else:
                    self.cancelled.append(command.cancel.handle)

    def _answer(self, submit: engine_pb2.Submit) -> None:
        assert self._num_tokens is not None
        handle, n = submit.handle, max(1, submit.request.sampling.n)
        self.start_request(handle)
        for offset in range(self._num_tokens):
            last = offset == self._num_tokens - 1
            self.step(*(delta(handle, offset, choice=c, end=last) for c in range(n)))
        self.step(finished(handle, len(submit.request.prompt.token_ids.ids), n * self._num_tokens))

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Any
    ) -> engine_pb2.GetInfoResponse:
        """Who it is."""
        return engine_pb2.GetInfoResponse(info=self.info)

    async def Embed(
        self, request: engine_pb2.EngineServiceEmbedRequest, context: Any
    ) -> engine_pb2.EngineServiceEmbedResponse:
        """One vector per input: its length."""
        self.embedded.append(request.request)
        lengths = [len(sequence.ids) for sequence in request.request.inputs]
        response = inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=[float(n)]) for n in lengths],
            prompt_tokens=sum(lengths),
        )
        return engine_pb2.EngineServiceEmbedResponse(response=response)


def delta(
    handle: int,
    offset: int,
    *,
    choice: int = 0,
    ids: Iterable[int] | None = None,
    end: bool = False,
) -> Event:
    """One step's tokens of one choice; by default token 100 + offset."""
    made = inference_pb2.Delta(
        choice=choice,
        token_offset=offset,
        token_ids=[100 + offset] if ids is None else ids,
        text=f"<{offset}>",
    )
    if end:
        made.end.reason = inference_pb2.FINISH_REASON_STOP
    return Event(handle=handle, delta=made)


def finished(handle: int, prompt_tokens: int = 3, completion_tokens: int = 0) -> Event:
    """The closing words."""
    usage = inference_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return Event(handle=handle, finished=inference_pb2.Finished(usage=usage))


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """A token per character: its place in the alphabet. With `is_held` it answers when released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.release.set()
        self.num_asked = 0

    async def start(self) -> int:
        """Serve; returns the port."""
        self._server = grpc.aio.server()
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Stop serving."""
        await self._server.stop(0)

    async def Decode(self, request: Any, context: Any) -> Any:
        """The scheduler never asks for this."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    Count = Describe = Decode

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Any
    ) -> tokenizer_pb2.EncodeResponse:
        """Texts."""
        self.num_asked += 1
        await self.release.wait()
        sequences = [_ids(text) for text in request.texts]
        return tokenizer_pb2.EncodeResponse(sequences=sequences, fingerprint=FINGERPRINT)

    async def EncodeChat(
        self, request: tokenizer_pb2.EncodeChatRequest, context: Any
    ) -> tokenizer_pb2.EncodeChatResponse:
        """Conversations: the contents behind each other."""
        self.num_asked += 1
        await self.release.wait()
        texts = ["".join(m.content for m in chat.messages) for chat in request.conversations]
        return tokenizer_pb2.EncodeChatResponse(
            sequences=[_ids(text) for text in texts], fingerprint=FINGERPRINT
        )


def _ids(text: str) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=[ord(c) - ord("a") for c in text])


class FakeClient:
    """A gateway: one Connect stream, the events of each handle in order."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.events: dict[int, list[Event]] = defaultdict(list)
        self.num_messages = 0
        self.error: grpc.aio.AioRpcError | None = None
        self.call = self.stub.Connect()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self.call:
                self.num_messages += 1
                for event in response.events:
                    self.events[event.handle].append(event)
        except grpc.aio.AioRpcError as error:
            self.error = error

    async def submit(self, handle: int, wanted: inference_pb2.GenerateRequest) -> None:
        """Send one request."""
        submit = engine_pb2.Submit(handle=handle, request=wanted)
        await self._send(scheduler_pb2.ClientCommand(submit=submit))

    async def cancel(self, handle: int) -> None:
        """Send a cancel."""
        await self._send(scheduler_pb2.ClientCommand(cancel=engine_pb2.Cancel(handle=handle)))

    async def _send(self, command: scheduler_pb2.ClientCommand) -> None:
        await self.call.write(scheduler_pb2.ConnectRequest(commands=[command]))

    def kinds(self, handle: int) -> list[str]:
        """Which events came."""
        return [str(event.WhichOneof("event")) for event in self.events[handle]]

    def tokens(self, handle: int, choice: int = 0) -> list[int]:
        """The generated ids."""
        return [
            token
            for event in self.events[handle]
            if event.HasField("delta") and event.delta.choice == choice
            for token in event.delta.token_ids
        ]

    def has_ended(self, handle: int) -> bool:
        """Whether the last event is an ending."""
        return bool(self.events[handle]) and self.kinds(handle)[-1] in ("finished", "failed")

    async def ended(self, *handles: int) -> None:
        """Wait for endings."""
        for handle in handles:
            await until(partial(self.has_ended, handle), f"end of {handle}")

    def failure(self, handle: int) -> Any:
        """The error that ended it."""
        last = self.events[handle][-1]
        assert last.HasField("failed"), self.kinds(handle)
        return rpc.from_status(last.failed)

    async def close(self) -> None:
        """Go away."""
        self.call.cancel()
        await asyncio.wait([self._reader])
