"""The scheduler over real loopback gRPC, with workers that do what the test says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from candor import errors, rpc
from candor.v1 import engine_pb2, inference_pb2, scheduler_pb2, scheduler_pb2_grpc
from scheduler.__main__ import Process
from scheduler.config import Config
from scheduler.core import Record
from scheduler.core.prefixes import block_digests
from tests.fakes.scheduler import (
    FINGERPRINT,
    FakeClient,
    FakeTokenizer,
    FakeWorker,
    delta,
    finished,
    request,
    until,
)

ALL = (
    engine_pb2.ENGINE_FEATURE_SEED,
    engine_pb2.ENGINE_FEATURE_RESUME,
    engine_pb2.ENGINE_FEATURE_PROMPT_LOGPROBS,
)


class World:
    """One scheduler, whatever is attached to it, and the end of all of it."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.clients: list[FakeClient] = []

    async def open(self, **settings: Any) -> World:
        self.tokenizer = FakeTokenizer()
        settings.setdefault("tokenizer", f"127.0.0.1:{await self.tokenizer.start()}")
        settings.setdefault("drain_grace_s", 0.0)
        config = Config(scheduler="127.0.0.1:0", **settings)
        self.process = Process(config, random.Random(7))
        self.core = self.process.dispatcher.core
        self.port = await self.process.start()
        self.channel = rpc.connect(f"127.0.0.1:{self.port}")
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        return self

    async def worker(self, worker_id: str = "w1", **how: Any) -> FakeWorker:
        """A worker that is ready."""
        worker = await FakeWorker(worker_id, **how).start(self.port)
        self.workers.append(worker)
        await until(lambda: self.state(worker_id) == "ready", f"{worker_id} ready")
        return worker

    def state(self, worker_id: str) -> str:
        worker = self.core.pool.workers.get(worker_id)
        return "none" if worker is None else str(worker.state)

    def client(self) -> FakeClient:
        self.clients.append(FakeClient(self.channel))
        return self.clients[-1]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.channel.close()
        await self.process.stop()
        for worker in self.workers:
            await worker.kill()
        await self.tokenizer.stop()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.close()
    core = world.core
    assert core.num_in_flight == core.queue.num_requests == core.queue.num_tokens == 0
    stats = core.stats
    assert stats.submitted == stats.finished + stats.failed + stats.cancelled + stats.refused


async def test_generate_streams_started_deltas_and_one_ending(world: World) -> None:
    await world.open()
    await world.worker(num_tokens=3)
    events = [r.event async for r in world.stub.Generate(request(request_id="r1"))]
    assert [e.WhichOneof("event") for e in events] == ["started", *["delta"] * 3, "finished"]
    started = events[0].started
    assert started.worker_id == "w1" and started.num_prompt_tokens == 3
    assert started.HasField("queue_us") and started.sampling.HasField("seed")
    assert [i for e in events[1:4] for i in e.delta.token_ids] == [100, 101, 102]
    assert events[-1].finished.usage.completion_tokens == 3
    assert events[-1].finished.timings.HasField("total_us")


async def test_a_drawn_seed_differs_and_a_given_one_stays(world: World) -> None:
    await world.open()
    worker = await world.worker(num_tokens=1, slots=8)
    client = world.client()
    await client.submit(1, request())
    await client.submit(2, request())
    await client.submit(3, request(sampling=inference_pb2.SamplingParams(seed=5)))
    await client.ended(1, 2, 3)
    seeds = [submit.request.sampling.seed for submit in worker.submitted]
    assert len(set(seeds)) == 3 and seeds[2] == 5


async def test_choices_keep_their_own_tokens(world: World) -> None:
    await world.open()
    await world.worker(num_tokens=2)
    client = world.client()
    await client.submit(1, request(sampling=inference_pb2.SamplingParams(n=3)))
    await client.ended(1)
    assert [client.tokens(1, choice) for choice in range(3)] == [[100, 101]] * 3
    assert client.kinds(1).count("finished") == 1


async def test_a_frame_reaches_a_client_as_one_message(world: World) -> None:
    await world.open()
    worker = await world.worker(slots=8)
    client = world.client()
    for handle in range(1, 9):
        await client.submit(handle, request())
    await until(lambda: len(worker.submitted) == 8)
    worker.step(*(delta(s.handle, 0) for s in worker.submitted))
    await until(lambda: all(client.tokens(handle) for handle in range(1, 9)))
    assert client.num_messages == 1


async def test_text_and_chat_prompts_go_through_the_tokenizer(world: World) -> None:
    await world.open()
    worker = await world.worker(num_tokens=1)
    client = world.client()
    text = inference_pb2.Prompt(text="bcd")
    chat = inference_pb2.Prompt(
        chat=inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", content="ef")]
        )
    )
    await client.submit(1, inference_pb2.GenerateRequest(model="m", prompt=text))
    await client.ended(1)
    await client.submit(2, inference_pb2.GenerateRequest(model="m", prompt=chat))
    await client.ended(2)
    assert [list(s.request.prompt.token_ids.ids) for s in worker.submitted] == [[1, 2, 3], [4, 5]]
    assert {s.request.tokenizer_fingerprint for s in worker.submitted} == {FINGERPRINT}


async def test_a_prompt_cancelled_at_the_tokenizer_never_runs(world: World) -> None:
    await world.open()
    worker = await world.worker(num_tokens=1)
    world.tokenizer.release.clear()
    client = world.client()
    text = inference_pb2.GenerateRequest(model="m", prompt=inference_pb2.Prompt(text="abc"))
    await client.submit(1, text)
    await until(lambda: world.tokenizer.num_asked == 1)
    await client.cancel(1)
    await client.ended(1)
    world.tokenizer.release.set()
    await client.submit(2, request())
    await client.ended(2)
    assert isinstance(client.failure(1), errors.Cancelled)
    assert len(worker.submitted) == 1


async def test_an_absent_tokenizer_is_unavailable_without_addresses(world: World) -> None:
    await world.open(tokenizer="127.0.0.1:1")
    await world.worker(num_tokens=1)
    client = world.client()
    text = inference_pb2.GenerateRequest(model="m", prompt=inference_pb2.Prompt(text="abc"))
    await client.submit(1, text)
    await client.ended(1)
    assert client.failure(1).reason == "TOKENIZER_UNAVAILABLE"
    assert "127.0.0.1" not in client.failure(1).message


async def test_the_surplus_waits_in_the_scheduler_and_is_told(world: World) -> None:
    await world.open(queued_after_ms=0, queued_every_ms=20)
    worker = await world.worker(slots=1)
    client = world.client()
    for handle in range(1, 6):
        await client.submit(handle, request())
    await until(lambda: client.kinds(5) and client.kinds(4))
    assert len(worker.submitted) == 3  # one slot and a slack of two
    assert client.events[4][0].queued.position == 1
    assert client.events[5][0].queued.position == 2
    worker.step(finished(worker.submitted[0].handle))
    await until(lambda: len(worker.submitted) == 4)
    await until(lambda: client.events[5][-1].queued.position == 1)
    assert client.events[5][-1].queued.HasField("eta_ms")


async def test_a_full_queue_refuses_at_once_with_a_time_to_retry(world: World) -> None:
    await world.open(max_queued_requests=1)
    worker = await world.worker(slots=1)
    client = world.client()
    for handle in range(1, 6):
        await client.submit(handle, request())
    await client.ended(5)
    error = client.failure(5)
    assert isinstance(error, errors.ResourceExhausted) and error.reason == "QUEUE_FULL"
    assert error.retry_after_s is not None and error.retry_after_s > 0
    assert not client.has_ended(4) and len(worker.submitted) == 3
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(world.stub.Generate(request())))
    assert rpc.from_rpc_error(refused.value).http_status == 429


async def test_refusals_name_their_reason(world: World) -> None:
    await world.open()
    client = world.client()
    await client.submit(1, request())
    await client.ended(1)
    assert client.failure(1).reason == "NO_CAPACITY"
    await world.worker(features=())
    wanted = {
        2: (request(model="other"), "The model `other` does not exist.", "model"),
        3: (request(range(100)), "context length is 100", "prompt"),
        4: (request([1000]), "vocabulary of 1000", "prompt"),
        5: (request([]), "empty", "prompt"),
        6: (request(tokenizer_fingerprint="x"), "tokenizer x", "tokenizer_fingerprint"),
        7: (request(sampling=inference_pb2.SamplingParams(seed=1)), "seed", "seed"),
        8: (request(constraint=inference_pb2.Constraint(regex="a")), "constraint", "constraint"),
        9: (request(output=inference_pb2.OutputOptions(prompt_logprobs=1)), "", "prompt_logprobs"),
        10: (request(sampling=inference_pb2.SamplingParams(n=0)), "at least 1", "n"),
        11: (request(deadline_unix_ms=1000), "deadline passed", "deadline_unix_ms"),
        12: (inference_pb2.GenerateRequest(model="m"), "no prompt", "prompt"),
    }
    for handle, (refused, words, field) in wanted.items():
        await client.submit(handle, refused)
        await client.ended(handle)
        error = client.failure(handle)
        assert words in error.message and error.field == field, error.message
        assert client.kinds(handle) == ["failed"]


async def test_a_cancel_in_the_queue_and_one_on_the_worker(world: World) -> None:
    await world.open()
    worker = await world.worker(slots=1)
    client = world.client()
    for handle in range(1, 6):
        await client.submit(handle, request())
    await until(lambda: world.core.queue.num_requests == 2)
    await client.cancel(4)
    await client.ended(4)
    assert isinstance(client.failure(4), errors.Cancelled)
    await client.cancel(1)
    await until(lambda: worker.cancelled == [worker.submitted[0].handle])
    await until(lambda: len(worker.submitted) == 4)  # 5 took the seat of 1
    worker.step(delta(worker.submitted[0].handle, 0), finished(worker.submitted[3].handle))
    await client.ended(5)
    assert client.kinds(1) == ["failed"]  # what the worker still had to say of it went nowhere


async def test_a_client_that_goes_away_leaves_nothing_behind(world: World) -> None:
    await world.open()
    worker = await world.worker(slots=1)
    client = world.client()
    for handle in range(1, 6):
        await client.submit(handle, request())
    await until(lambda: len(worker.submitted) == 3 and world.core.queue.num_requests == 2)
    await client.close()
    await until(lambda: len(worker.cancelled) == 3)
    assert world.core.num_in_flight == 0 and len(worker.submitted) == 3


async def test_a_generate_call_that_is_dropped_is_cancelled_on_the_worker(world: World) -> None:
    await world.open()
    worker = await world.worker()
    call = world.stub.Generate(request())
    await until(lambda: worker.submitted)
    call.cancel()
    await until(lambda: worker.cancelled == [worker.submitted[0].handle])


async def test_normal_ends_cause_no_cancels(world: World) -> None:
    await world.open()
    worker = await world.worker(num_tokens=1, slots=4)
    client = world.client()
    for handle in range(1, 51):
        await client.submit(handle, request())
    await client.ended(*range(1, 51))
    await client.call.done_writing()
    await until(lambda: client.call.done())
    assert worker.cancelled == []


async def test_half_closing_lets_what_runs_end(world: World) -> None:
    await world.open()
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request())
    await client.call.done_writing()
    await until(lambda: worker.submitted)
    worker.step(
        delta(worker.submitted[0].handle, 0, end=True), finished(worker.submitted[0].handle)
    )
    await until(lambda: client.call.done())
    assert client.kinds(1) == ["delta", "finished"] and client.error is None


async def test_a_handle_in_use_ends_the_stream(world: World) -> None:
    await world.open()
    await world.worker()
    client = world.client()
    await client.submit(1, request())
    await client.submit(1, request())
    await until(lambda: client.error)
    assert client.error is not None and client.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: world.core.num_in_flight == 0)


async def test_a_request_id_in_flight_is_refused_and_free_afterwards(world: World) -> None:
    await world.open()
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request(request_id="same"))
    await client.submit(2, request(request_id="same"))
    await client.ended(2)
    assert isinstance(client.failure(2), errors.AlreadyExists)
    worker.step(finished(worker.submitted[0].handle))
    await client.ended(1)
    await client.submit(3, request(request_id="same"))
    await until(lambda: len(worker.submitted) == 2)


async def test_a_worker_killed_mid_stream_fails_its_requests_clearly(world: World) -> None:
    await world.open()
    worker = await world.worker("w1")
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    other = await world.worker("w2", num_tokens=1)
    worker.start_request(worker.submitted[0].handle)
    worker.step(delta(worker.submitted[0].handle, 0))
    await until(lambda: client.tokens(1) == [100])
    await worker.kill()
    await client.ended(1)
    error = client.failure(1)
    assert isinstance(error, errors.Unavailable) and error.reason == "WORKER_LOST"
    assert "worker w1 was lost" in error.message and "after 1 tokens" in error.message
    await client.submit(2, request())
    await client.ended(2)
    assert client.kinds(2)[-1] == "finished" and len(other.submitted) == 1


async def test_a_request_without_tokens_goes_to_another_worker(world: World) -> None:
    await world.open()
    worker = await world.worker("w1")
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    await world.worker("w2", num_tokens=2)
    await worker.kill()
    await client.ended(1)
    assert client.kinds(1) == ["started", "delta", "delta", "finished"]


async def test_a_resumed_request_has_every_token_once(world: World) -> None:
    await world.open()
    worker = await world.worker("w1", features=ALL)
    client = world.client()
    await client.submit(1, request(sampling=inference_pb2.SamplingParams(n=2)))
    await until(lambda: worker.submitted)
    other = await world.worker("w2", features=ALL)
    old = worker.submitted[0].handle
    worker.start_request(old)
    worker.step(
        delta(old, 0), delta(old, 0, choice=1), delta(old, 1), delta(old, 1, choice=1, end=True)
    )
    await until(lambda: client.tokens(1, 1) == [100, 101])
    await worker.kill()
    await until(lambda: other.submitted)
    resumed = other.submitted[0].request
    assert [(r.choice, list(r.token_ids), r.finished) for r in resumed.resume] == [
        (0, [100, 101], False),
        (1, [100, 101], True),
    ]
    assert resumed.sampling.seed == worker.submitted[0].request.sampling.seed
    new = other.submitted[0].handle
    other.start_request(new)
    other.step(delta(new, 2, end=True))
    other.step(finished(new, completion_tokens=5))
    await client.ended(1)
    assert client.tokens(1) == [100, 101, 102] and client.tokens(1, 1) == [100, 101]
    assert client.kinds(1) == ["started", *["delta"] * 4, "moved", "delta", "finished"]
    moved = client.events[1][5].moved
    assert (moved.from_worker_id, moved.to_worker_id) == ("w1", "w2")
    assert moved.num_replayed_tokens == 3 + 4


async def test_a_request_waits_for_its_worker_to_come_back_then_503(world: World) -> None:
    await world.open(worker_wait_s=0.05)
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    await worker.kill()
    await client.ended(1)
    assert client.failure(1).reason == "WORKER_LOST" and client.failure(1).http_status == 503
    await client.submit(2, request())
    await client.ended(2)
    assert client.failure(2).reason == "NO_CAPACITY"


async def test_a_worker_without_progress_loses_its_lease(world: World) -> None:
    await world.open(lease_ms=150, worker_wait_s=0.05)
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    worker.start_request(worker.submitted[0].handle)
    worker.step(delta(worker.submitted[0].handle, 0))

    async def keep_talking() -> None:
        while worker.attach_error is None:
            worker.report(idle=False)
            await asyncio.sleep(0.02)

    await asyncio.wait_for(keep_talking(), 10)
    await client.ended(1)
    assert "no progress within its lease" in client.failure(1).message
    assert rpc.from_rpc_error(worker.attach_error).reason == "WORKER_DROPPED"  # type: ignore[arg-type]
    await until(lambda: worker.peer_cancelled)
    assert world.state("w1") == "lost"


async def test_a_silent_idle_worker_loses_its_lease_too(world: World) -> None:
    await world.open(lease_ms=100)
    await world.worker()
    await until(lambda: world.state("w1") == "lost")


async def test_steps_alone_keep_a_worker_alive(world: World) -> None:
    await world.open(lease_ms=200)
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    handle = worker.submitted[0].handle
    attached = world.core.pool.workers["w1"]
    first_lease, num_sent = attached.lease_until, 0
    # Longer than two leases, without one report.
    while world.process.dispatcher.now() < first_lease + 0.4:
        worker.step(delta(handle, num_sent))
        num_sent += 1
        await until(lambda: attached.last_step_seq == worker.step_seq)
        await asyncio.sleep(0.01)  # the pace of the fake's steps
    worker.step(finished(handle))
    await client.ended(1)
    assert client.kinds(1)[-1] == "finished"


async def test_a_drained_worker_finishes_and_takes_nothing_new(world: World) -> None:
    await world.open()
    first = await world.worker("w1")
    client = world.client()
    await client.submit(1, request())
    await until(lambda: first.submitted)
    second = await world.worker("w2", num_tokens=1)
    drained = await world.stub.DrainWorker(scheduler_pb2.DrainWorkerRequest(worker_id="w1"))
    assert drained.num_running == 1
    await until(lambda: first.responses[-1].HasField("drain"))
    for handle in range(2, 8):
        await client.submit(handle, request())
    await client.ended(*range(2, 8))
    assert len(first.submitted) == 1 and len(second.submitted) == 6
    first.step(delta(first.submitted[0].handle, 0), finished(first.submitted[0].handle))
    await client.ended(1)
    assert client.kinds(1) == ["delta", "finished"]
    await first.leave()
    await until(lambda: world.state("w1") == "none")
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await world.stub.DrainWorker(scheduler_pb2.DrainWorkerRequest(worker_id="w1"))
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_two_workers_share_the_load(world: World) -> None:
    await world.open()
    first, second = await world.worker("w1", slots=4), await world.worker("w2", slots=4)
    client = world.client()
    for handle in range(1, 9):
        await client.submit(handle, request())
    await until(lambda: len(first.submitted) + len(second.submitted) == 8)
    assert len(first.submitted) == len(second.submitted) == 4


async def test_a_restarted_worker_replaces_its_former_self(world: World) -> None:
    await world.open()
    former = await world.worker("w1")
    client = world.client()
    await client.submit(1, request())
    await until(lambda: former.submitted)
    again = FakeWorker("w1", num_tokens=1, instance_id="w1-2")
    world.workers.append(again)
    await again.start(world.port)
    await client.ended(1)
    assert client.kinds(1)[-1] == "finished" and len(again.submitted) == 1
    await until(lambda: former.attach_error)
    listed = (await world.stub.ListWorkers(scheduler_pb2.ListWorkersRequest())).workers
    assert [w.info.instance_id for w in listed] == ["w1-2"]


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ({"api_major": 2}, "FAILED_PRECONDITION", "contract 2"),
        (
            {"model": inference_pb2.ModelInfo(tokenizer_fingerprint="other")},
            "FAILED_PRECONDITION",
            "tokenizer",
        ),
        ({"slots": 0}, "INVALID_ARGUMENT", "slot"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused(
    world: World, how: dict[str, Any], code: str, words: str
) -> None:
    await world.open()
    await world.worker("w1")
    worker = await FakeWorker("w2", **how).start(world.port)
    world.workers.append(worker)
    await until(lambda: worker.attach_error)
    assert worker.attach_error is not None and worker.attach_error.code().name == code
    assert words in str(worker.attach_error.details())
    assert world.state("w2") == "none"


async def test_an_attach_that_does_not_register_first_is_refused(world: World) -> None:
    await world.open()
    from candor.v1 import engine_pb2_grpc

    async def said() -> AsyncIterator[engine_pb2.AttachRequest]:
        yield engine_pb2.AttachRequest(report=engine_pb2.Report())

    stub = engine_pb2_grpc.RegistryServiceStub(world.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(stub.Attach(said())))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_whose_address_is_dead_is_given_up(world: World) -> None:
    await world.open(connect_timeout_s=0.05)
    worker = await FakeWorker("w1", address="127.0.0.1:1").start(world.port)
    world.workers.append(worker)
    await until(lambda: world.state("w1") == "lost")
    await until(lambda: worker.attach_error)


async def test_a_client_that_does_not_read_is_cut_off(world: World) -> None:
    await world.open(client_buffer=50)
    worker = await world.worker()
    other = world.client()
    await other.submit(1, request())
    await until(lambda: worker.submitted)
    call = world.stub.Connect()
    submit = engine_pb2.Submit(handle=1, request=request())
    await call.write(
        scheduler_pb2.ConnectRequest(commands=[scheduler_pb2.ClientCommand(submit=submit)])
    )
    await until(lambda: len(worker.submitted) == 2)
    slow = worker.submitted[1].handle
    big = "x" * 100_000  # the transport's own window is full after a few of these
    for offset in range(200):
        event = delta(slow, offset)
        event.delta.text = big
        worker.step(event)
    await until(lambda: worker.cancelled == [slow])
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    worker.step(delta(worker.submitted[0].handle, 0), finished(worker.submitted[0].handle))
    await other.ended(1)
    assert other.kinds(1) == ["delta", "finished"]


async def test_a_gap_in_the_tokens_is_an_error_not_an_answer(world: World) -> None:
    await world.open()
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    handle = worker.submitted[0].handle
    worker.step(delta(handle, 0), delta(handle, 2))
    await client.ended(1)
    assert client.kinds(1) == ["delta", "failed"]
    assert client.failure(1).reason == "BROKEN_ANSWER"
    await until(lambda: worker.cancelled == [handle])


async def test_a_workers_own_error_reaches_the_client(world: World) -> None:
    await world.open()
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    failed = rpc.to_status(errors.InvalidArgument("bad schema", field="constraint"))
    worker.step(inference_pb2.GenerateEvent(handle=worker.submitted[0].handle, failed=failed))
    await client.ended(1)
    assert client.failure(1).message == "bad schema" and client.failure(1).field == "constraint"


async def test_deadlines_end_running_requests(world: World) -> None:
    await world.open()
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request(ttft_budget_ms=30))
    await client.ended(1)
    assert client.failure(1).reason == "TTFT_BUDGET"
    await until(lambda: worker.cancelled == [worker.submitted[0].handle])


async def test_embeddings_are_relayed(world: World) -> None:
    await world.open()
    kind = inference_pb2.ModelInfo(kind=inference_pb2.MODEL_KIND_EMBEDDING)
    worker = await world.worker(model=kind)
    inputs = [inference_pb2.TokenIds(ids=[1, 2]), inference_pb2.TokenIds(ids=[3])]
    wanted = inference_pb2.EmbedRequest(model="m", inputs=inputs)
    answer = await world.stub.Embed(scheduler_pb2.SchedulerServiceEmbedRequest(request=wanted))
    assert [list(e.values) for e in answer.response.embeddings] == [[2.0], [1.0]]
    assert answer.response.prompt_tokens == 3 and len(worker.embedded) == 1
    with pytest.raises(grpc.aio.AioRpcError) as wrong:
        await anext(aiter(world.stub.Generate(request())))
    assert rpc.from_rpc_error(wrong.value).reason == "WRONG_MODEL_KIND"


async def test_lists_and_stats_say_what_is_there(world: World) -> None:
    await world.open()
    load = engine_pb2.Load(num_running=1, kv_total_tokens=100)
    worker = await world.worker(card="cpu")
    worker.report(load=load)
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    models = (await world.stub.ListModels(scheduler_pb2.ListModelsRequest())).models
    assert [(m.name, m.max_model_len) for m in models] == [("m", 100)]
    await until(lambda: world.process.dispatcher.core.pool.workers["w1"].load.kv_total_tokens)
    stats = await world.stub.GetStats(scheduler_pb2.GetStatsRequest())
    assert (stats.num_running, stats.num_queued, stats.num_submitted) == (1, 0, 1)
    status = stats.workers[0]
    assert status.state == engine_pb2.WORKER_STATE_READY and status.num_assigned == 1
    assert status.info.card == "cpu" and status.load.num_running == 1
    assert 0 < status.lease_left_ms <= 10_000


async def test_stopping_lets_running_requests_finish(world: World) -> None:
    await world.open(drain_grace_s=10.0)
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request())
    await until(lambda: worker.submitted)
    stopping = asyncio.create_task(world.process.dispatcher.stop(10.0))
    await client.submit(2, request())
    await client.ended(2)
    assert client.failure(2).reason == "SHUTTING_DOWN"
    worker.step(delta(worker.submitted[0].handle, 0), finished(worker.submitted[0].handle))
    await client.ended(1)
    await stopping
    assert client.kinds(1) == ["delta", "finished"]


async def test_stopping_ends_what_does_not_finish(world: World) -> None:
    await world.open()
    worker = await world.worker(slots=1)
    client = world.client()
    for handle in range(1, 6):
        await client.submit(handle, request())
    await until(lambda: world.core.queue.num_requests == 2)
    await world.process.dispatcher.stop(0.0)
    await client.ended(*range(1, 6))
    assert {client.failure(handle).reason for handle in range(1, 6)} == {"SHUTTING_DOWN"}
    assert len(worker.submitted) == 3


async def test_a_tenants_quota_is_refused_by_name_and_with_a_time(world: World) -> None:
    await world.open(tenants='{"a": {"concurrent": 1}}')
    worker = await world.worker()
    client = world.client()
    await client.submit(1, request(tenant="a"))
    await until(lambda: worker.submitted)
    await client.submit(2, request(tenant="a"))
    await client.submit(3, request(tenant="b"))
    await client.ended(2)
    refusal = client.failure(2)
    assert (refusal.reason, refusal.field) == ("TENANT_QUOTA", "tenant")
    assert refusal.retry_after_s == 1.0 and "tenant `a` has 1 requests in flight" in refusal.message
    await until(lambda: len(worker.submitted) == 2)
    worker.step(finished(worker.submitted[0].handle))
    await client.ended(1)
    await client.submit(4, request(tenant="a"))
    await until(lambda: len(worker.submitted) == 3)


async def test_prompts_follow_the_digests_that_workers_report(world: World) -> None:
    await world.open()
    workers = {}
    for worker_id in ("w1", "w2", "w3"):
        roomy = inference_pb2.ModelInfo(max_model_len=10_000)
        workers[worker_id] = await world.worker(worker_id, slots=8, model=roomy)
    prompt = list(range(64 * 4))
    report = engine_pb2.Report(
        state=engine_pb2.WORKER_STATE_READY, idle=True, cached_prefixes=block_digests(prompt)
    )
    workers["w2"].send(report)
    await until(lambda: world.core.placer.prefixes.num_blocks == 4)
    client = world.client()
    for handle in range(3):
        await client.submit(handle, request([*prompt, 7, handle]))
        await until(lambda: len(workers["w2"].submitted) == handle + 1)  # noqa: B023
        running = workers["w2"].submitted[-1].handle
        workers["w2"].step(delta(running, 0), finished(running))
        await client.ended(handle)
    salted = request([*prompt, 9], cache_salt="s")
    await client.submit(9, salted)
    await until(lambda: sum(len(w.submitted) for w in workers.values()) == 4)
    record = client_record(world, 9)
    assert record.request.is_salted and record.cached_tokens == 0


def client_record(world: World, number: int) -> Record:
    """The only request in flight, which a client has under that number."""
    (outbox,) = world.process.dispatcher._outboxes
    return outbox.live[number]
