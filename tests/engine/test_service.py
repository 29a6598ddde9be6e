"""The worker over real loopback gRPC: frames, refusals, cancels, broken streams, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from candor import errors, rpc
from candor.v1 import engine_pb2, engine_pb2_grpc
from candor.v1 import inference_pb2 as pb
from engine.__main__ import Process
from engine.config import Config
from engine.runners import StepInput
from tests.fakes.engine import EOS, ByteCodec, ScriptedRunner, says

TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def worker(
    runner: ScriptedRunner | None = None, **settings: Any
) -> AsyncIterator[tuple[Process, engine_pb2_grpc.EngineServiceAsyncStub]]:
    """A worker on a free port, attached to nobody, and a stub for it."""
    config = Config(
        model=__file__,
        model_name="m",
        served_aliases=("alias",),
        engine="127.0.0.1:0",
        scheduler="127.0.0.1:1",
        slots=4,
        token_budget=64,
        **settings,
    )
    process = Process(config, runner or ScriptedRunner(), ByteCodec())
    port = await process.start()
    async with rpc.connect(f"127.0.0.1:{port}") as channel:
        yield process, engine_pb2_grpc.EngineServiceStub(channel)
        await process.stop()


class Client:
    """One Run stream, and what came over it by handle."""

    def __init__(self, stub: engine_pb2_grpc.EngineServiceAsyncStub) -> None:
        self.call = stub.Run()
        self.frames: list[engine_pb2.RunResponse] = []
        self.events: dict[int, list[pb.GenerateEvent]] = {}

    async def submit(self, handle: int, request: pb.GenerateRequest) -> None:
        submit = engine_pb2.Submit(handle=handle, request=request)
        command = engine_pb2.EngineCommand(submit=submit)
        await self.call.write(engine_pb2.RunRequest(commands=[command]))

    async def cancel(self, handle: int) -> None:
        command = engine_pb2.EngineCommand(cancel=engine_pb2.Cancel(handle=handle))
        await self.call.write(engine_pb2.RunRequest(commands=[command]))

    async def read(self) -> engine_pb2.RunResponse:
        async with asyncio.timeout(TIMEOUT_S):
            frame = await self.call.read()
        assert isinstance(frame, engine_pb2.RunResponse), frame
        self.frames.append(frame)
        for event in frame.events:
            self.events.setdefault(event.handle, []).append(event)
        return frame

    async def until_ended(self, *handles: int) -> None:
        """Read until each of these requests has its one ending."""
        while not all(self.ending(handle) for handle in handles):
            await self.read()

    def ending(self, handle: int) -> str | None:
        kinds = [e.WhichOneof("event") for e in self.events.get(handle, [])]
        endings = [kind for kind in kinds if kind in ("finished", "failed")]
        assert len(endings) <= 1
        assert not endings or kinds[-1] == endings[0]
        return endings[0] if endings else None

    def text(self, handle: int) -> str:
        return "".join(e.delta.text for e in self.events[handle] if e.HasField("delta"))

    def error(self, handle: int) -> errors.CandorError:
        return rpc.from_status(self.events[handle][-1].failed)


def ask(prompt: bytes = b"hi", **fields: Any) -> pb.GenerateRequest:
    """A greedy request of few tokens, unless told otherwise."""
    made = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), **fields)
    if not made.sampling.HasField("temperature"):
        made.sampling.temperature = 0
    if not made.stopping.HasField("max_tokens"):
        made.stopping.max_tokens = 8
    return made


async def until(holds: Callable[[], object]) -> None:
    """Give the loop turns until something is true."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110 (the condition lives in objects without events)
            await asyncio.sleep(0.002)


def num_open(process: Process) -> int:
    """Requests that have come in and have not ended."""
    return len(process.backend._sinks)


def hold(gate: threading.Event) -> Callable[[StepInput], None]:
    """Forward passes wait for a gate."""

    def wait(step: StepInput) -> None:
        assert gate.wait(TIMEOUT_S)

    return wait


async def test_a_request_is_answered_in_frames() -> None:
    async with worker(ScriptedRunner(says({b"hi": b"yes"}))) as (_, stub):
        client = Client(stub)
        await client.submit(7, ask())
        await client.until_ended(7)
        kinds = [e.WhichOneof("event") for e in client.events[7]]
        assert kinds == ["started", *["delta"] * 4, "finished"]
        assert client.text(7) == "yes"
        started, last = client.events[7][0].started, client.events[7][-1].finished
        assert started.num_prompt_tokens == 2 and started.sampling.HasField("seed")
        assert started.stopping.max_tokens == 8
        assert last.usage.completion_tokens == 4 and last.timings.total_us > 0
        end = client.events[7][-2].delta.end
        assert end.reason == pb.FINISH_REASON_STOP and end.WhichOneof("stop_cause") is None
        client.call.cancel()


async def test_one_frame_per_step_carries_every_sequence() -> None:
    gate = threading.Event()
    runner = ScriptedRunner(says({b"a": b"1" * 9, b"b": b"2" * 9}), before_forward=hold(gate))
    async with worker(runner) as (process, stub):
        client = Client(stub)
        await client.submit(1, ask(b"a"))
        await client.submit(2, ask(b"b"))
        await until(lambda: num_open(process) == 2)
        gate.set()
        await client.until_ended(1, 2)
        steps = [f.step_seq for f in client.frames]
        assert steps == sorted(set(steps)), "a step with two frames"
        both = [f for f in client.frames if {e.handle for e in f.events} == {1, 2}]
        assert len(both) >= 7 and all(f.num_decode_tokens <= 2 and f.step_us for f in client.frames)
        assert client.frames[-1].load.kv_total_tokens == 2048
        client.call.cancel()


async def test_scores_and_prompt_scores_cross_the_wire() -> None:
    async with worker(ScriptedRunner(says({b"hi": "é".encode()}))) as (_, stub):
        client = Client(stub)
        await client.submit(1, ask(output=pb.OutputOptions(logprobs=2, prompt_logprobs=0)))
        await client.until_ended(1)
        scored = client.events[1][1].prompt_logprobs.positions
        assert len(scored) == 2 and not scored[0].token_ids
        assert scored[1].pieces == [b"i"] and scored[1].texts == ["i"]
        entries = [e.delta.logprobs[0] for e in client.events[1] if e.HasField("delta")]
        assert [e.pieces[0] for e in entries] == [b"\xc3", b"\xa9", b"</s>"]
        assert [e.texts[0] for e in entries] == ["", "é", ""]
        assert entries[0].ranks[0] == 1 and len(entries[0].token_ids) == 2
        client.call.cancel()


async def test_stop_causes_cross_the_wire() -> None:
    async with worker(ScriptedRunner(says({b"hi": b"yes", b"ho": b"no"}))) as (_, stub):
        client = Client(stub)
        await client.submit(1, ask(stopping=pb.StoppingParams(stop=["es"], max_tokens=8)))
        await client.submit(2, ask(b"ho", stopping=pb.StoppingParams(stop_token_ids=[ord("o")])))
        await client.until_ended(1, 2)
        assert client.events[1][-2].delta.end.stop_string == "es" and client.text(1) == "y"
        assert client.events[2][-2].delta.end.stop_token_id == ord("o")
        client.call.cancel()


@pytest.mark.parametrize(
    ("request_", "kind", "field", "reason"),
    [
        (ask(model="other"), errors.NotFound, "model", "NOT_FOUND"),
        (
            ask(tokenizer_fingerprint="theirs"),
            errors.FailedPrecondition,
            "tokenizer_fingerprint",
            "TOKENIZER_MISMATCH",
        ),
        (ask(b""), errors.InvalidArgument, "prompt", None),
        (ask(b"x" * 600), errors.InvalidArgument, "prompt", "CONTEXT_LENGTH_EXCEEDED"),
        (
            ask(sampling=pb.SamplingParams(temperature=float("nan"))),
            errors.InvalidArgument,
            "temperature",
            None,
        ),
        (
            ask(constraint=pb.Constraint(regex="(")),
            errors.InvalidArgument,
            "constraint.regex",
            None,
        ),
        (ask(constraint=pb.Constraint()), errors.InvalidArgument, "constraint", None),
        (
            ask(constraint=pb.Constraint(regex="a", whitespace_pattern=" ")),
            errors.InvalidArgument,
            "constraint.whitespace_pattern",
            None,
        ),
    ],
)
async def test_refusals_keep_their_class_field_and_reason(
    request_: pb.GenerateRequest, kind: type[errors.CandorError], field: str, reason: str | None
) -> None:
    async with worker() as (_, stub):
        client = Client(stub)
        await client.submit(1, request_)
        await client.submit(2, ask(model="alias", tokenizer_fingerprint="bytes"))
        await client.until_ended(1, 2)
        error = client.error(1)
        assert type(error) is kind and error.field == field and error.is_client_fault
        assert reason is None or error.reason == reason
        assert client.ending(2) == "finished"
        client.call.cancel()


async def test_text_prompts_are_not_for_workers() -> None:
    async with worker() as (_, stub):
        client = Client(stub)
        await client.submit(1, pb.GenerateRequest(prompt=pb.Prompt(text="hello")))
        await client.until_ended(1)
        assert client.error(1).field == "prompt"
        client.call.cancel()


async def test_a_cancel_frees_the_row_and_ends_in_silence() -> None:
    gate = threading.Event()
    runner = ScriptedRunner(says({}), before_forward=hold(gate))
    async with worker(runner) as (process, stub):
        client = Client(stub)
        long = pb.StoppingParams(max_tokens=400, ignore_eos=True)
        await client.submit(1, ask(stopping=long))
        await until(lambda: not process.backend.progress().is_idle)
        await client.cancel(1)
        await client.cancel(99)
        await until(lambda: process.backend.progress().is_idle)
        gate.set()
        await client.submit(2, ask(b"next"))
        await client.until_ended(2)
        assert client.ending(1) is None and runner.num_forwards < 10
        assert process.backend.progress().load.engine.kv_used_tokens == 0
        client.call.cancel()


async def test_a_broken_stream_aborts_what_it_began() -> None:
    gate = threading.Event()
    async with worker(ScriptedRunner(says({}), before_forward=hold(gate))) as (process, stub):
        client, other = Client(stub), Client(stub)
        long = pb.StoppingParams(max_tokens=400, ignore_eos=True)
        for handle in range(3):
            await client.submit(handle, ask(stopping=long))
        await other.submit(1, ask())
        await until(lambda: num_open(process) == 4)
        client.call.cancel()
        await until(lambda: num_open(process) == 1)
        gate.set()
        await other.until_ended(1)
        assert other.ending(1) == "finished"
        other.call.cancel()


async def test_the_same_handle_on_two_streams_is_no_clash() -> None:
    async with worker(ScriptedRunner(says({b"a": b"1", b"b": b"2"}))) as (_, stub):
        clients = [Client(stub), Client(stub)]
        await clients[0].submit(1, ask(b"a"))
        await clients[1].submit(1, ask(b"b"))
        for client in clients:
            await client.until_ended(1)
        assert [c.text(1) for c in clients] == ["1", "2"]
        for client in clients:
            client.call.cancel()


async def test_a_handle_in_use_ends_the_stream() -> None:
    gate = threading.Event()
    async with worker(ScriptedRunner(before_forward=hold(gate))) as (process, stub):
        client = Client(stub)
        await client.submit(1, ask())
        await client.submit(1, ask())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await client.call.read():
                pass
        gate.set()
        assert rpc.from_rpc_error(caught.value).field == "submit.handle"
        await until(lambda: process.backend.progress().is_idle)


async def test_a_stream_whose_sender_is_done_ends_with_its_last_request() -> None:
    async with worker(ScriptedRunner(says({b"hi": b"yes"}))) as (_, stub):
        client = Client(stub)
        await client.submit(1, ask())
        await client.call.done_writing()
        await client.until_ended(1)
        assert await client.call.read() is grpc.aio.EOF
        assert await client.call.code() is grpc.StatusCode.OK


async def test_a_reader_that_does_not_read_is_ended_and_the_loop_goes_on() -> None:
    # Nobody reads: gRPC's own window fills first, then ours.
    gate = threading.Event()
    runner = ScriptedRunner(says({}), before_forward=hold(gate))
    settings: dict[str, Any] = {"stream_buffer_frames": 20, "max_logprobs": 200}
    async with worker(runner, **settings) as (process, stub):
        client = Client(stub)
        heavy = pb.OutputOptions(logprobs=200)
        long = pb.StoppingParams(max_tokens=500, ignore_eos=True)
        for handle in range(4):
            await client.submit(handle, ask(output=heavy, stopping=long))
        await until(lambda: num_open(process) == 4)
        gate.set()
        await until(lambda: process.backend.progress().step_seq > 0)
        await until(lambda: process.backend.progress().is_idle)
        # A call of one's own still works.
        other = Client(stub)
        await other.submit(1, ask())
        await other.until_ended(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await client.call.read():
                pass
        assert rpc.from_rpc_error(caught.value).reason == "SLOW_READER"
        other.call.cancel()


async def test_more_requests_than_the_worker_holds_are_refused_for_now() -> None:
    gate = threading.Event()
    async with worker(ScriptedRunner(before_forward=hold(gate)), max_requests=2) as (_, stub):
        client = Client(stub)
        for handle in range(3):
            await client.submit(handle, ask())
        await client.until_ended(2)
        error = client.error(2)
        assert isinstance(error, errors.ResourceExhausted) and error.retry_after_s
        gate.set()
        await client.until_ended(0, 1)
        client.call.cancel()


async def test_embedding_is_refused_by_name() -> None:
    async with worker() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(engine_pb2.EngineServiceEmbedRequest())
        assert isinstance(rpc.from_rpc_error(caught.value), errors.Unimplemented)


async def test_info_says_who_this_is_and_how_it_is_doing() -> None:
    async with worker(worker_id="seat-1", card="cuda:3") as (_, stub):
        client = Client(stub)
        await client.submit(1, ask(b"x" * 70, stopping=pb.StoppingParams(max_tokens=5)))
        await client.until_ended(1)
        reply = await stub.GetInfo(engine_pb2.GetInfoRequest())
        info, report = reply.info, reply.report
        assert (info.worker_id, info.card, info.slots) == ("seat-1", "cuda:3", 4)
        assert info.model.name == "m" and list(info.model.aliases) == ["alias"]
        assert info.model.max_model_len == 512 and info.model.vocab_size == 259
        assert report.idle and report.last_step_seq == client.frames[-1].step_seq
        assert report.load.prompt_tokens == 70 and report.load.generated_tokens >= 1
        assert report.load.prefill_rate > 0 and len(report.cached_prefixes) == 1
        client.call.cancel()


async def test_a_seed_that_nobody_gave_is_another_one_each_time() -> None:
    async with worker() as (_, stub):
        client = Client(stub)
        hot = pb.SamplingParams(temperature=1)
        for handle in range(2):
            await client.submit(handle, ask(sampling=hot))
        await client.until_ended(0, 1)
        seeds = {client.events[h][0].started.sampling.seed for h in range(2)}
        assert len(seeds) == 2
        assert client.text(0) != client.text(1)
        client.call.cancel()


async def test_a_resumed_request_continues_the_offsets() -> None:
    async with worker(ScriptedRunner(says({b"hi": b"yes"}))) as (_, stub):
        client = Client(stub)
        await client.submit(1, ask(resume=[pb.ResumedChoice(choice=0, token_ids=b"ye")]))
        await client.until_ended(1)
        deltas = [e.delta for e in client.events[1] if e.HasField("delta")]
        assert [(d.token_offset, list(d.token_ids)) for d in deltas] == [
            (2, [ord("s")]),
            (3, [EOS]),
        ]
        assert client.text(1) == "s"
        client.call.cancel()


async def test_a_deadline_in_the_past_is_told_as_one() -> None:
    async with worker() as (_, stub):
        client = Client(stub)
        await client.submit(1, ask(deadline_unix_ms=1))
        await client.until_ended(1)
        assert isinstance(client.error(1), errors.DeadlineExceeded)
        client.call.cancel()
