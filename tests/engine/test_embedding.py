"""An embedding worker over real loopback gRPC: what it says it is, order, bounds, cancels, drain, reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from candor import errors, rpc
from candor.cli import models
from candor.v1 import engine_pb2, engine_pb2_grpc
from candor.v1 import inference_pb2 as pb
from engine.config import Config
from engine.embedding import EmbeddingProcess, open_encoder
from engine.runners import blas
from tests.fakes.encoders import TIMEOUT_S, CountingEncoder, expected
from tests.fakes.engine import ByteCodec
from tokenizer_svc.codec import open_codec

MODEL = "all-minilm-l6-v2"
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / f"{MODEL}.json").read_text())["cases"]


class Door:
    """A worker's stub, with requests in short."""

    def __init__(self, stub: engine_pb2_grpc.EngineServiceAsyncStub) -> None:
        self.stub = stub

    async def embed(
        self, inputs: Sequence[Sequence[int]], within_s: float | None = None, **fields: Any
    ) -> pb.EmbedResponse:
        """The answer; raises the error of `candor.errors` that came instead."""
        ids = [pb.TokenIds(ids=each) for each in inputs]
        request = engine_pb2.EngineServiceEmbedRequest(
            request=pb.EmbedRequest(inputs=ids, **fields)
        )
        try:
            return (await self.stub.Embed(request, timeout=within_s)).response
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None

    async def vectors(self, inputs: Sequence[Sequence[int]], **fields: Any) -> list[list[float]]:
        """The vectors alone."""
        return [list(e.values) for e in (await self.embed(inputs, **fields)).embeddings]


@contextlib.asynccontextmanager
async def worker(
    encoder: CountingEncoder, **settings: Any
) -> AsyncIterator[tuple[EmbeddingProcess, Door]]:
    """A worker on a free port, attached to nobody."""
    config = Config(
        model=__file__,
        model_name="m",
        served_aliases=("alias",),
        engine="127.0.0.1:0",
        scheduler="127.0.0.1:1",
        **{"slots": 4, "token_budget": 16, "threads": 1, **settings},
    )
    process = EmbeddingProcess(config, encoder, ByteCodec())
    port = await process.start()
    try:
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            yield process, Door(engine_pb2_grpc.EngineServiceStub(channel))
    finally:
        encoder.gate.set()
        await process.stop()


@pytest.fixture
def encoder() -> CountingEncoder:
    return CountingEncoder()


@pytest.fixture
def held(encoder: CountingEncoder) -> CountingEncoder:
    """Its passes wait for the gate."""
    encoder.gate.clear()
    return encoder


async def until(holds: Callable[[], object]) -> None:
    """Give the loop turns until something is true."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110 (the condition lives in objects without events)
            await asyncio.sleep(0.002)


def num_open(process: EmbeddingProcess) -> int:
    """Requests that have come in and have not ended."""
    load = process.backend.progress().load.engine
    return load.num_running + load.num_waiting


# --- answers -----------------------------------------------------------------------------------------


async def test_a_long_request_is_cut_into_passes_and_keeps_its_order(
    encoder: CountingEncoder,
) -> None:
    inputs = [[i] * (1 + i % 8) for i in range(67)]
    async with worker(encoder) as (process, door):
        answer = await door.embed(inputs, model="alias", tokenizer_fingerprint="bytes")
        assert [list(e.values) for e in answer.embeddings] == expected(inputs)
        assert answer.prompt_tokens == sum(map(len, inputs))
        assert len(encoder.passes) > 4 and all(sum(map(len, p)) <= 16 for p in encoder.passes)
        progress = process.backend.progress()
        assert progress.is_idle and progress.step_seq == len(encoder.passes)
        assert progress.load.engine.totals.prompt_tokens == answer.prompt_tokens
        assert progress.load.prefill_rate


async def test_requests_that_come_together_share_a_pass(held: CountingEncoder) -> None:
    async with worker(held) as (process, door):
        first = asyncio.create_task(door.vectors([[1]]))
        await until(held.has_begun.is_set)
        others = [asyncio.create_task(door.vectors([[i] * 2])) for i in range(2, 6)]
        await until(lambda: num_open(process) == 5)
        held.gate.set()
        assert await asyncio.gather(first, *others) == [
            expected([[1]]),
            *(expected([[i] * 2]) for i in range(2, 6)),
        ]
        assert len(held.passes) == 2


async def test_as_many_passes_as_threads_are_computed_at_the_same_time(
    held: CountingEncoder,
) -> None:
    async with worker(held, threads=2) as (_, door):
        inputs = [[i] * 8 for i in range(9)]
        running = asyncio.create_task(door.vectors(inputs))
        await until(lambda: len(held.passes) == 2)
        held.gate.set()
        assert await running == expected(inputs)
        assert len(held.passes) == 5


async def test_a_worker_says_that_it_embeds_and_how_it_is_doing(held: CountingEncoder) -> None:
    async with worker(held, slots=1, worker_id="seat") as (process, door):
        tasks = [asyncio.create_task(door.vectors([[i]])) for i in range(3)]
        await until(lambda: num_open(process) == 3)
        reply = await door.stub.GetInfo(engine_pb2.GetInfoRequest())
        info, model = reply.info, reply.info.model
        assert (info.worker_id, info.backend, info.runner) == ("seat", "embedding", "counting")
        assert (info.slots, len(info.features), info.pid) == (1, 0, os.getpid())
        assert (model.name, *model.aliases) == ("m", "alias")
        assert model.kind == pb.MODEL_KIND_EMBEDDING
        assert (model.max_model_len, model.vocab_size, model.embedding_size) == (8, 300, 2)
        assert model.tokenizer_fingerprint == "bytes"
        report = reply.report
        assert not report.idle and report.last_step_seq == 0
        assert (report.load.num_running, report.load.num_waiting) == (1, 2)
        held.gate.set()
        await asyncio.gather(*tasks)
        report = (await door.stub.GetInfo(engine_pb2.GetInfoRequest())).report
        assert report.idle and report.last_step_seq == len(held.passes)


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "fields", "kind", "field"),
    [
        ([], {}, errors.InvalidArgument, "inputs"),
        ([[1]] * 6, {}, errors.InvalidArgument, "inputs"),
        ([[1], []], {}, errors.InvalidArgument, "inputs[1]"),
        ([[1] * 9], {}, errors.InvalidArgument, "inputs[0]"),
        ([[1], [300]], {}, errors.InvalidArgument, "inputs[1]"),
        ([[1]], {"model": "other"}, errors.NotFound, "model"),
        (
            [[1]],
            {"tokenizer_fingerprint": "theirs"},
            errors.FailedPrecondition,
            "tokenizer_fingerprint",
        ),
    ],
)
async def test_refusals_keep_their_class_and_field(
    encoder: CountingEncoder,
    inputs: list[list[int]],
    fields: dict[str, Any],
    kind: type[errors.CandorError],
    field: str,
) -> None:
    async with worker(encoder, max_embed_inputs=5) as (_, door):
        with pytest.raises(kind) as caught:
            await door.embed(inputs, **fields)
        assert caught.value.field == field and caught.value.is_client_fault
        assert not encoder.passes


async def test_a_smaller_context_can_be_set(encoder: CountingEncoder) -> None:
    async with worker(encoder, max_model_len=4) as (process, door):
        assert process._info.model.max_model_len == 4
        with pytest.raises(errors.InvalidArgument, match="5 tokens, the model takes 4"):
            await door.embed([[1] * 5])
        assert await door.vectors([[1] * 4]) == [[4, 1]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"max_requests": 2}, "2 requests"), ({"max_embed_tokens": 10}, "11 tokens")],
)
async def test_more_than_the_worker_holds_is_refused_for_now(
    held: CountingEncoder, settings: dict[str, int], words: str
) -> None:
    async with worker(held, **settings) as (process, door):
        tasks = [asyncio.create_task(door.vectors([[i] * 5])) for i in range(2)]
        await until(lambda: num_open(process) == 2)
        with pytest.raises(errors.ResourceExhausted, match=words) as caught:
            await door.embed([[7]])
        assert caught.value.retry_after_s
        held.gate.set()
        assert await asyncio.gather(*tasks) == [[[5, 0]], [[5, 1]]]
        assert await door.vectors([[7]]) == [[1, 7]]


async def test_a_request_above_the_bound_on_tokens_is_let_in_alone(
    encoder: CountingEncoder,
) -> None:
    async with worker(encoder, max_embed_tokens=10) as (_, door):
        assert len(await door.vectors([[1] * 8] * 9)) == 9


async def test_generation_is_refused_by_name(encoder: CountingEncoder) -> None:
    async with worker(encoder) as (_, door):
        call = door.stub.Run()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        error = rpc.from_rpc_error(caught.value)
        assert isinstance(error, errors.Unimplemented) and error.message.startswith("m embeds")


async def test_a_failed_pass_fails_its_own_requests_and_no_others(held: CountingEncoder) -> None:
    held.error = RuntimeError("secret")
    async with worker(held) as (process, door):
        first = asyncio.create_task(door.vectors([[1]]))
        await until(held.has_begun.is_set)
        second = asyncio.create_task(door.vectors([[2]]))
        await until(lambda: num_open(process) == 2)
        held.gate.set()
        with pytest.raises(errors.Internal) as caught:
            await first
        assert "secret" not in caught.value.message
        assert await second == [[1, 2]]
        assert process.backend.progress().is_idle and not process.died.is_set()


# --- giving up, leaving ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_request_that_is_given_up_or_too_late_ends_between_two_passes(
    held: CountingEncoder, is_late: bool
) -> None:
    async with worker(held, slots=1) as (process, door):
        long = asyncio.create_task(door.embed([[1] * 8] * 60, within_s=1.0 if is_late else None))
        await until(held.has_begun.is_set)
        if is_late:
            with pytest.raises(errors.DeadlineExceeded):
                await long
        else:
            long.cancel()
        await until(lambda: process.backend.progress().is_idle)
        held.gate.set()
        assert await door.vectors([[2, 2]]) == [[2, 2]]
        assert held.passes == [[[1] * 8] * 2, [[2, 2]]]


async def test_a_worker_that_leaves_finishes_what_it_has_and_takes_nothing_new(
    held: CountingEncoder,
) -> None:
    async with worker(held) as (process, door):
        running = asyncio.create_task(door.vectors([[1] * 8] * 5))
        await until(held.has_begun.is_set)
        leaving = asyncio.create_task(process.stop())
        await until(lambda: process.membership.is_draining)
        with pytest.raises(errors.Unavailable) as caught:
            await door.embed([[2]])
        assert caught.value.reason == "DRAINING"
        held.gate.set()
        assert await running == [[8, 1]] * 5
        await leaving


async def test_what_is_not_done_within_the_grace_is_ended(held: CountingEncoder) -> None:
    async with worker(held, drain_grace_s=0.05) as (process, door):
        running = asyncio.create_task(door.vectors([[1] * 8] * 50))
        await until(held.has_begun.is_set)
        leaving = asyncio.create_task(process.stop())
        with pytest.raises(errors.CandorError) as caught:
            await running
        assert not caught.value.is_client_fault
        held.gate.set()
        await leaving
        assert len(held.passes) == 1


# --- the real model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> str:
    return str(models.ensure(MODEL))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"runner": "native"}, "--runner=native"),
        ({"max_model_len": 257}, "--max-model-len=257"),
        ({"engine_metrics": "127.0.0.1:9"}, "--engine-metrics=127"),
    ],
)
def test_settings_that_an_encoder_cannot_have_are_named(
    folder: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        open_encoder(Config(model=folder, **settings), open_codec(folder))


def test_a_tokenizer_with_more_tokens_than_the_encoder_is_refused(folder: str) -> None:
    codec = open_codec(folder)

    class Larger(ByteCodec):
        vocab_size = codec.vocab_size + 1

    with pytest.raises(ValueError, match="30523 tokens, the encoder 30522"):
        open_encoder(Config(model=folder), Larger())


def test_a_pass_has_one_thread_whatever_the_library_would_take(folder: str) -> None:
    before = blas.get_threads()
    assert before is not None
    try:
        blas.set_threads(2)
        open_encoder(Config(model=folder, threads=2), open_codec(folder))
        assert blas.get_threads() == 1
    finally:
        blas.set_threads(before)


async def test_a_worker_process_embeds_and_drains_on_sigterm(
    folder: str, free_port: Callable[[], int]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    arguments = ["--model", folder, "--engine", address, "--scheduler", "127.0.0.1:1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine", *arguments, "--threads", "1"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60), rpc.connect(address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            info = (await stub.GetInfo(engine_pb2.GetInfoRequest(), wait_for_ready=True)).info
            assert info.pid == process.pid and info.model.kind == pb.MODEL_KIND_EMBEDDING
            assert (info.model.max_model_len, info.model.embedding_size) == (256, 384)
            assert info.model.name == MODEL and info.runner == "bert"
            many = [GOLDEN[5]["ids"]] * 12
            running = asyncio.create_task(Door(stub).vectors(many))
            report = engine_pb2.Report(idle=True)
            while report.idle:  # until it has begun
                report = (await stub.GetInfo(engine_pb2.GetInfoRequest())).report
            process.send_signal(signal.SIGTERM)
            for vector in await running:
                wanted = GOLDEN[5]["embedding"]
                assert sum(a * b for a, b in zip(vector, wanted, strict=True)) > 1 - 1e-5
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
