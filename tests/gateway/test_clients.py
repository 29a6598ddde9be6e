"""The one stream to the scheduler: dealing out, cancelling, breaking, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from candor import errors, rpc
from candor.v1 import inference_pb2 as pb
from gateway.clients import SchedulerClient, TokenizerClient
from gateway.directory import Directory
from gateway.events import Delta, Event, Finished, Started, Tagged
from tests.fakes.gateway import (
    FINGERPRINT,
    FakeScheduler,
    Step,
    babble,
    delta,
    ended,
    failed,
    finished,
    upstream,
)


def request(name: str = "r", max_tokens: int = 3) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        model="MODEL",
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2])),
        stopping=pb.StoppingParams(max_tokens=max_tokens),
        sampling=pb.SamplingParams(n=1, best_of=1),
    )


@asynccontextmanager
async def client(
    fake: FakeScheduler, *, stream_buffer: int = 100, submit_buffer: int = 100
) -> AsyncIterator[SchedulerClient]:
    async with upstream(fake) as (address, _):
        scheduler = SchedulerClient(
            address, timeout_s=2.0, stream_buffer=stream_buffer, submit_buffer=submit_buffer
        )
        await scheduler.start()
        try:
            async with asyncio.timeout(5):
                await scheduler.wait_connected()
            yield scheduler
        finally:
            await scheduler.close()


async def everything(scheduler: SchedulerClient, *requests: pb.GenerateRequest) -> list[Tagged]:
    with scheduler.generate(requests, timeout_s=10) as generation:
        return [tagged async for batch in generation for tagged in batch]


def text(events: list[Tagged], prompt: int = 0) -> str:
    return "".join(e.text for p, e in events if p == prompt and isinstance(e, Delta))


async def test_events_arrive_in_order_and_end() -> None:
    fake = FakeScheduler()
    async with client(fake) as scheduler:
        events = await everything(scheduler, request())
        kinds: list[type[Event]] = [type(e) for _, e in events]
        assert kinds == [Started, Delta, Delta, Delta, Finished]
        assert len(text(events)) == 3
        assert scheduler.num_running == 0
    assert fake.cancelled == []


async def test_many_requests_share_one_stream() -> None:
    fake = FakeScheduler()
    async with client(fake) as scheduler:
        requests = [request(str(i), max_tokens=i % 5 + 1) for i in range(64)]
        answers = await asyncio.gather(*(everything(scheduler, r) for r in requests))
        assert [len(text(a)) for a in answers] == [r.stopping.max_tokens for r in requests]
        assert fake.num_connects == 1


async def test_prompts_of_one_request_keep_their_number() -> None:
    async with client(FakeScheduler()) as scheduler:
        events = await everything(scheduler, request(max_tokens=2), request(max_tokens=4))
        assert len(text(events, 0)) == 2 and len(text(events, 1)) == 4


async def test_closing_cancels_what_runs_and_nothing_else() -> None:
    gate = asyncio.Event()

    def script(_: pb.GenerateRequest) -> Iterator[Step]:
        yield [delta(0, "a")]
        yield gate

    fake = FakeScheduler(script)
    async with client(fake) as scheduler:
        with scheduler.generate([request()], timeout_s=10) as generation:
            assert [e.text for _, e in await anext(generation) if isinstance(e, Delta)] == ["a"]
        await fake.wait_for(lambda: fake.cancelled == [1])
        assert scheduler.num_running == 0


async def test_a_refusal_is_the_exception_it_was() -> None:
    full = errors.ResourceExhausted("the queue is full: 9 of 9", retry_after_s=3.0)
    async with client(FakeScheduler(lambda _: [[failed(full)]])) as scheduler:
        with pytest.raises(errors.ResourceExhausted, match="9 of 9") as caught:
            await everything(scheduler, request())
        assert caught.value.retry_after_s == 3.0


async def test_what_came_before_a_failure_is_seen_first() -> None:
    steps = [[delta(0, "a"), failed(errors.Internal("broken"))]]
    async with client(FakeScheduler(lambda _: steps)) as scheduler:
        with scheduler.generate([request()], timeout_s=10) as generation:
            assert len(await anext(generation)) == 1
            assert not generation.is_complete
            with pytest.raises(errors.Internal, match="broken"):
                await anext(generation)


async def test_one_failed_prompt_cancels_its_siblings() -> None:
    gate = asyncio.Event()

    def script(r: pb.GenerateRequest) -> Iterator[Step]:
        yield [failed(errors.Internal("broken"))] if r.request_id == "bad" else gate

    fake = FakeScheduler(script)
    async with client(fake) as scheduler:
        with pytest.raises(errors.Internal):
            await everything(scheduler, request("good"), request("bad"))
        await fake.wait_for(lambda: fake.cancelled == [1])


async def test_a_broken_stream_fails_its_requests_and_is_opened_again() -> None:
    gate = asyncio.Event()

    def script(r: pb.GenerateRequest) -> Iterator[Step]:
        if r.request_id != "long":
            yield from babble(r)
            return
        yield [delta(0, "a")]
        yield gate

    fake = FakeScheduler(script)
    async with client(fake) as scheduler:
        with scheduler.generate([request("long")], timeout_s=10) as generation:
            await anext(generation)
            await fake.drop_streams()
            with pytest.raises(errors.Unavailable, match="broke the stream"):
                await anext(generation)
        async with asyncio.timeout(5):
            await scheduler.wait_connected()
        await fake.wait_for(lambda: fake.num_connects == 2)
        assert len(text(await everything(scheduler, request()))) == 3
    assert fake.cancelled == []


async def test_without_a_scheduler_a_request_is_refused_at_once() -> None:
    scheduler = SchedulerClient("127.0.0.1:9", timeout_s=0.5, stream_buffer=1, submit_buffer=1)
    await scheduler.start()
    try:
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:9"):
            scheduler.generate([request()], timeout_s=1)
        with pytest.raises(errors.Unavailable, match="does not answer"):
            await scheduler.list_models()
    finally:
        await scheduler.close()


async def test_a_consumer_that_lags_loses_its_request() -> None:
    steps = [[delta(0, "x") for _ in range(5)], [delta(0, "y", end=ended()), finished()]]
    fake = FakeScheduler(lambda _: [*steps[:1], asyncio.Event()])
    lost: list[bool] = []
    async with client(fake, stream_buffer=4) as scheduler:
        with scheduler.generate([request()], timeout_s=10) as generation:
            generation.on_overflow = lambda: lost.append(True)
            await fake.wait_for(lambda: fake.cancelled == [1])
            assert lost == [True]
            assert len(await anext(generation)) == 4
            with pytest.raises(errors.ResourceExhausted, match="limit"):
                await anext(generation)


async def test_a_request_that_takes_too_long_ends_with_its_deadline() -> None:
    fake = FakeScheduler(lambda _: [asyncio.Event()])
    async with client(fake) as scheduler:
        with (
            scheduler.generate([request()], timeout_s=0.05) as generation,
            pytest.raises(errors.DeadlineExceeded, match=r"0\.05 s"),
        ):
            await anext(generation)
        await fake.wait_for(lambda: fake.cancelled == [1])


async def test_commands_that_cannot_be_sent_are_bounded() -> None:
    async with client(FakeScheduler(), submit_buffer=2) as scheduler:
        with pytest.raises(errors.Unavailable, match="limit 2"):
            scheduler.generate([request(str(i)) for i in range(3)], timeout_s=1)
        assert scheduler.num_running == 0


async def test_the_catalog_is_kept_and_asked_again_for_an_unknown_name() -> None:
    fake = FakeScheduler()
    async with upstream(fake) as (scheduler_at, tokenizer_at):
        scheduler = SchedulerClient(scheduler_at, timeout_s=2, stream_buffer=9, submit_buffer=9)
        tokenizer = TokenizerClient(tokenizer_at, timeout_s=2)
        directory = Directory(scheduler, tokenizer, ttl_s=0.0)
        try:
            model = await directory.find("MODEL-ALIAS")
            assert model is not None and model.name == "MODEL"
            assert model.base_vocab_size == 258 and model.fingerprint == FINGERPRINT
            assert await directory.find("LATER") is None
            fake.models.append(pb.ModelInfo(name="LATER", tokenizer_fingerprint=FINGERPRINT))
            assert await directory.find("LATER") is not None
        finally:
            await directory.close()
            await scheduler.close()
            await tokenizer.close()


async def test_tokenizer_errors_keep_their_class_and_its_absence_is_unavailable() -> None:
    async with upstream() as (_, address):
        tokenizer = TokenizerClient(address, timeout_s=2)
        with pytest.raises(errors.InvalidArgument, match="boom"):
            await tokenizer.encode_chat(
                "MODEL",
                pb.ChatPrompt(chat_template="raise boom"),
                add_special_tokens=False,
                truncate_to=None,
            )
        ids, fingerprint = await tokenizer.encode(
            "MODEL", ["abc"], add_special_tokens=True, truncate_to=3
        )
        assert ids == [[256, 98, 99]] and fingerprint == FINGERPRINT
        await tokenizer.close()
    gone = TokenizerClient("127.0.0.1:9", timeout_s=0.5)
    with pytest.raises(errors.Unavailable, match="tokenizer at"):
        await gone.decode("MODEL", [[1]])
    await gone.close()


def test_the_error_table_is_the_one_of_every_hop() -> None:
    for kind in errors.KINDS.values():
        event = failed(kind("m", reason="R", field="f"))
        assert type(rpc.from_status(event.failed)) is kind
