"""What the gateway talks to, in process and over real loopback gRPC: a scheduler that follows a script,
and a tokenizer whose tokens are bytes. And the gateway itself, as a server on a free port.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from candor import errors, rpc
from candor.v1 import (
    engine_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from candor.v1 import inference_pb2 as pb
from gateway.app import Server, make_server
from gateway.config import Config

BOS, EOS, MARKER = 256, 257, 258
FINGERPRINT = "bytes-1"
SPECIAL = {BOS: "<s>", EOS: "</s>", MARKER: "<|marker|>"}
_MARKERS = {shown: token_id for token_id, shown in SPECIAL.items()}
NUM_BASE_TOKENS = 258

Step = Sequence[pb.GenerateEvent] | asyncio.Event
"""One frame's events of a request; or something to wait for before the next frame."""
Script = Callable[[pb.GenerateRequest], Iterable[Step]]


# --- tokenizer ---------------------------------------------------------------------------------------


def encode(text: str, *, bos: bool = True) -> list[int]:
    """One token per byte; the markers are tokens of their own."""
    ids = [BOS] if bos else []
    for part in re.split("(" + "|".join(map(re.escape, SPECIAL.values())) + ")", text):
        ids += [_MARKERS[part]] if part in _MARKERS else part.encode()
    return ids


def decode(ids: Iterable[int]) -> str:
    """The text of ids, special tokens shown, unknown ids silent."""
    parts = [SPECIAL[i].encode() if i in SPECIAL else bytes([i]) for i in ids if i <= MARKER]
    return b"".join(parts).decode(errors="replace")


def render(prompt: pb.ChatPrompt) -> str:
    """The fake chat template: `role:content|`, then `assistant:`; `raise TEXT` as a template fails."""
    if prompt.chat_template.startswith("raise "):
        raise errors.InvalidArgument(prompt.chat_template[6:], field="chat_template")
    text = "".join(f"{m.role}:{m.content}|" for m in prompt.messages)
    wants_turn = not prompt.HasField("add_generation_prompt") or prompt.add_generation_prompt
    return prompt.chat_template + text + ("assistant:" if wants_turn else "")


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Bytes as tokens."""

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Any) -> Any:
        bos = not request.HasField("add_special_tokens") or request.add_special_tokens
        keep = request.truncate_to if request.HasField("truncate_to") else None
        rows = []
        for text in request.texts:
            ids = encode(text, bos=bos)
            if keep is not None and len(ids) > keep:
                ids = ([BOS] if bos else []) + ids[len(ids) - keep + bos :]
            rows.append(pb.TokenIds(ids=ids))
        return tokenizer_pb2.EncodeResponse(sequences=rows, fingerprint=FINGERPRINT)

    async def EncodeChat(self, request: tokenizer_pb2.EncodeChatRequest, context: Any) -> Any:
        rows = []
        for conversation in request.conversations:
            ids = encode(render(conversation), bos=request.add_special_tokens)
            keep = request.truncate_to if request.HasField("truncate_to") else len(ids)
            rows.append(pb.TokenIds(ids=ids[-keep:]))
        return tokenizer_pb2.EncodeChatResponse(sequences=rows, fingerprint=FINGERPRINT)

    async def Decode(self, request: tokenizer_pb2.DecodeRequest, context: Any) -> Any:
        return tokenizer_pb2.DecodeResponse(
            texts=[decode(s.ids) for s in request.sequences], fingerprint=FINGERPRINT
        )

    async def Count(self, request: Any, context: Any) -> Any:
        raise errors.Unimplemented("gateways use Encode")

    async def Describe(self, request: Any, context: Any) -> Any:
        info = tokenizer_pb2.TokenizerInfo(
            model="MODEL",
            fingerprint=FINGERPRINT,
            vocab_size=259,
            base_vocab_size=NUM_BASE_TOKENS,
            has_chat_template=True,
        )
        return tokenizer_pb2.DescribeResponse(tokenizers=[info])


# --- scheduler ---------------------------------------------------------------------------------------


def delta(
    choice: int,
    text: str,
    *,
    offset: int = 0,
    ids: Sequence[int] | None = None,
    logprobs: Sequence[pb.TokenLogprobs] = (),
    end: pb.ChoiceEnd | None = None,
) -> pb.GenerateEvent:
    """A delta of one token, unless `ids` says otherwise."""
    ids = ids if ids is not None else [ord(text[0]) % 256 if text else 0]
    message = pb.Delta(
        choice=choice, token_offset=offset, token_ids=ids, text=text, logprobs=logprobs
    )
    if end is not None:
        message.end.CopyFrom(end)
    return pb.GenerateEvent(delta=message)


def ended(
    reason: str = "length", *, by: int | str | None = None, score: float = 0.0
) -> pb.ChoiceEnd:
    """Why a choice ended."""
    end = pb.ChoiceEnd(reason=f"FINISH_REASON_{reason.upper()}", cumulative_logprob=score)
    if isinstance(by, int):
        end.stop_token_id = by
    elif by is not None:
        end.stop_string = by
    return end


def finished() -> pb.GenerateEvent:
    """The last event of a request."""
    return pb.GenerateEvent(finished=pb.Finished(usage=pb.Usage()))


def failed(error: errors.CandorError) -> pb.GenerateEvent:
    """The last event of a request that failed."""
    return pb.GenerateEvent(failed=rpc.to_status(error))


def logprobs_at(ids: Sequence[int], values: Sequence[float]) -> pb.TokenLogprobs:
    """A position whose tokens are bytes, the sampled one first."""
    return pb.TokenLogprobs(
        token_ids=ids,
        logprobs=values,
        ranks=range(1, len(ids) + 1),
        texts=[decode([i]) for i in ids],
        pieces=[bytes([i]) for i in ids],
    )


def babble(request: pb.GenerateRequest) -> Iterator[Step]:
    """The script unless told otherwise: letters drawn from the seed, max_tokens of them per choice.

    Obeys stop strings of one letter, stop token ids, a bias that forces a token and allowed_token_ids, so
    that fields can be seen to have an effect.
    """
    sampling, stopping, output = request.sampling, request.stopping, request.output
    prompt = list(request.prompt.token_ids.ids)
    yield [pb.GenerateEvent(started=pb.Started(worker_id="w0", num_prompt_tokens=len(prompt)))]
    if output.HasField("prompt_logprobs"):
        k = output.prompt_logprobs
        rows = [pb.TokenLogprobs()]
        for token in prompt[1:]:
            ids = [token, *(i for i in range(97, 97 + k) if i != token)][: k + 1]
            rows.append(logprobs_at(ids, [-0.5 * (j + 1) for j in range(len(ids))]))
        yield [pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=rows))]
    letters = list(range(97, 123))
    forced = [b.token_id for b in sampling.logit_bias if b.bias >= 100]
    if forced or sampling.HasField("allowed_token_ids"):
        letters = forced or list(sampling.allowed_token_ids.ids)
    open_choices = list(range(max(sampling.best_of, sampling.n)))
    # Greedy answers do not depend on the seed; drawn ones do, and on the choice.
    seed = sampling.seed if sampling.temperature > 0 else 0
    draws = [random.Random(f"{prompt}{seed}{c}") for c in open_choices]
    scores = [0.0 for _ in open_choices]
    for position in range(stopping.max_tokens):
        events = []
        for choice in list(open_choices):
            token = draws[choice].choice(letters)
            scores[choice] -= draws[choice].random()
            text, end = decode([token]), None
            may_stop = position + 1 >= stopping.min_tokens
            if may_stop and token in stopping.stop_token_ids:
                end, text = ended("stop", by=token, score=scores[choice]), ""
            elif may_stop and text in stopping.stop:
                end, text = ended("stop", by=text, score=scores[choice]), ""
            elif position + 1 == stopping.max_tokens:
                end = ended("length", score=scores[choice])
            entries = []
            if output.HasField("logprobs"):
                ids = [token, *(i for i in range(97, 98 + output.logprobs) if i != token)]
                ids = ids[: output.logprobs + 1]
                entries = [logprobs_at(ids, [-0.25 * (j + 1) for j in range(len(ids))])]
            events.append(
                delta(choice, text, offset=position, ids=[token], logprobs=entries, end=end)
            )
            if end is not None:
                open_choices.remove(choice)
        yield events
        if not open_choices:
            break
    yield [finished()]


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers every submit by its script and writes down what it is told."""

    script: Script = babble
    models: list[pb.ModelInfo] = field(default_factory=list)
    submitted: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    num_connects: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self._calls: set[Any] = set()
        if not self.models:
            self.models = [
                pb.ModelInfo(
                    name="MODEL",
                    aliases=["MODEL-ALIAS"],
                    kind=pb.MODEL_KIND_GENERATIVE,
                    max_model_len=512,
                    tokenizer_fingerprint=FINGERPRINT,
                    vocab_size=259,
                )
            ]

    async def wait_for(self, predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until something about what was told is true."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(predicate)

    async def drop_streams(self) -> None:
        """Break every stream that is open."""
        for task in list(self._calls):
            task.cancel()

    async def Connect(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        out: asyncio.Queue[list[pb.GenerateEvent] | None] = asyncio.Queue()
        running: dict[int, asyncio.Task[None]] = {}
        self.num_connects += 1
        await self._tell()

        async def follow(handle: int, request: pb.GenerateRequest) -> None:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                events = []
                for event in step:
                    copy = pb.GenerateEvent()
                    copy.CopyFrom(event)
                    copy.handle = handle
                    events.append(copy)
                await out.put(events)
                await asyncio.sleep(0)

        async def listen() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                async for request in requests:
                    for command in request.commands:
                        if command.WhichOneof("kind") == "submit":
                            handle, submitted = command.submit.handle, command.submit.request
                            self.submitted.append(submitted)
                            running[handle] = asyncio.create_task(follow(handle, submitted))
                        else:
                            self.cancelled.append(command.cancel.handle)
                            running.pop(command.cancel.handle).cancel()
                    await self._tell()
            await out.put(None)

        listener = asyncio.create_task(listen())
        self._calls.add(listener)
        try:
            while (events := await out.get()) is not None:
                while not out.empty() and (more := out.get_nowait()) is not None:
                    events += more
                yield scheduler_pb2.ConnectResponse(events=events)
            raise errors.Unavailable("the fake scheduler drops its streams")
        finally:
            self._calls.discard(listener)
            for task in (listener, *running.values()):
                task.cancel()

    async def Embed(self, request: Any, context: Any) -> Any:
        rows = [
            pb.Embedding(values=[float(len(i.ids)), 0.5, -1.25]) for i in request.request.inputs
        ]
        return scheduler_pb2.SchedulerServiceEmbedResponse(
            response=pb.EmbedResponse(embeddings=rows)
        )

    async def ListModels(self, request: Any, context: Any) -> Any:
        return scheduler_pb2.ListModelsResponse(models=self.models)

    async def GetStats(self, request: Any, context: Any) -> Any:
        worker = scheduler_pb2.WorkerStatus(
            info=engine_pb2.WorkerInfo(
                worker_id="w0", card="cpu", model=self.models[0], slots=8, kv_tokens=4096
            ),
            state=engine_pb2.WORKER_STATE_READY,
            load=engine_pb2.Load(
                num_running=3, num_waiting=1, kv_used_tokens=1024, kv_total_tokens=4096
            ),
        )
        return scheduler_pb2.GetStatsResponse(
            num_queued=2, num_running=3, max_queued=100, workers=[worker]
        )

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for step in self.script(request):
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            for event in step:
                yield scheduler_pb2.GenerateResponse(event=event)

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        raise errors.Unimplemented("gateways use GetStats")

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        raise errors.Unimplemented("gateways do not drain workers")

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


# --- the whole ---------------------------------------------------------------------------------------


@dataclass
class Stack:
    """A gateway with its fakes behind it."""

    url: str
    port: int
    scheduler: FakeScheduler
    server: Server


@contextlib.asynccontextmanager
async def upstream(scheduler: FakeScheduler | None = None) -> AsyncIterator[tuple[str, str]]:
    """The two services on free ports: (scheduler, tokenizer) addresses."""
    async with contextlib.AsyncExitStack() as stack:
        servers = rpc.Server([]), rpc.Server([])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
            scheduler or FakeScheduler(), servers[0].grpc
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(FakeTokenizer(), servers[1].grpc)
        addresses = []
        for server in servers:
            port = await server.start("127.0.0.1:0")
            stack.push_async_callback(server.stop, 0)
            addresses.append(f"127.0.0.1:{port}")
        yield addresses[0], addresses[1]


@contextlib.asynccontextmanager
async def gateway(
    scheduler: FakeScheduler | None = None,
    *,
    wait: bool = True,
    scheduler_at: str = "",
    tokenizer_at: str = "",
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A gateway on a free port over real loopback HTTP; connected, unless `wait` is false.

    `scheduler_at` and `tokenizer_at` put something else in the place of the fakes.
    """
    scheduler = scheduler or FakeScheduler()
    async with upstream(scheduler) as (scheduler_here, tokenizer_here):
        config = Config(
            http="127.0.0.1:0",
            scheduler=scheduler_at or scheduler_here,
            tokenizer=tokenizer_at or tokenizer_here,
            **{"drain_s": 1, **settings},
        )
        server = make_server(config)
        task = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(10):
                await server.has_started.wait()
                if wait:
                    await server.application.scheduler.wait_connected()
            yield Stack(f"http://127.0.0.1:{server.port}", server.port, scheduler, server)
        finally:
            server.drain()
            await task


@contextlib.asynccontextmanager
async def socket_to(
    stack: Stack, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to the gateway, closed at the end whatever became of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
