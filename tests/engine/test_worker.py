"""Membership against a registry over loopback: register, report, wedge, drain, come back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from candor import errors, rpc
from candor.v1 import engine_pb2, engine_pb2_grpc
from candor.v1 import inference_pb2 as pb
from engine.__main__ import Process
from engine.config import Config
from engine.runners import StepInput
from tests.fakes.engine import ByteCodec, ScriptedRunner, says

TIMEOUT_S = 10.0


class Registry(engine_pb2_grpc.RegistryServiceServicer):
    """Accepts whoever comes and writes down what is said."""

    def __init__(self, lease_ms: int = 60) -> None:
        self.lease_ms = lease_ms
        self.infos: list[engine_pb2.WorkerInfo] = []
        self.reports: list[engine_pb2.Report] = []
        self.drain = asyncio.Event()
        self.is_gone = asyncio.Event()
        self._news = asyncio.Condition()

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        first = await anext(request_iterator)
        async with self._news:
            self.infos.append(first.register)
            self._news.notify_all()
        yield engine_pb2.AttachResponse(accepted=engine_pb2.Accepted(lease_ms=self.lease_ms))
        reader = asyncio.create_task(self._read(request_iterator))
        going = asyncio.create_task(self.is_gone.wait())
        draining = asyncio.create_task(self.drain.wait())
        try:
            await asyncio.wait({going, draining}, return_when=asyncio.FIRST_COMPLETED)
            if self.is_gone.is_set():
                self.is_gone.clear()
                raise errors.Unavailable("the scheduler restarts")
            yield engine_pb2.AttachResponse(drain=engine_pb2.Drain())
            await reader
        finally:
            for task in (reader, going, draining):
                task.cancel()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            async with self._news:
                self.reports.append(request.report)
                self._news.notify_all()

    async def wait_for(self, holds: Callable[[], object]) -> None:
        """Until what was said makes it true."""
        async with asyncio.timeout(TIMEOUT_S), self._news:
            await self._news.wait_for(holds)


@contextlib.asynccontextmanager
async def registry(port: int = 0, **how: Any) -> AsyncIterator[tuple[Registry, int]]:
    """A registry on a port."""
    server = rpc.Server(["candor.v1.RegistryService"])
    served = Registry(**how)
    engine_pb2_grpc.add_RegistryServiceServicer_to_server(served, server.grpc)
    port = await server.start(f"127.0.0.1:{port}")
    yield served, port
    await server.stop(0)


@contextlib.asynccontextmanager
async def worker(port: int, runner: ScriptedRunner, **settings: Any) -> AsyncIterator[Process]:
    """A worker that attaches to a registry."""
    config = Config(
        model=__file__,
        model_name="m",
        engine="127.0.0.1:0",
        scheduler=f"127.0.0.1:{port}",
        worker_id="seat",
        token_budget=64,
        **settings,
    )
    process = Process(config, runner, ByteCodec())
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


async def generate(process: Process, max_tokens: int) -> Any:
    """Open a stream at the worker's own address and submit; the call is the caller's to close."""
    channel = rpc.connect(process._info.address)
    call = engine_pb2_grpc.EngineServiceStub(channel).Run()
    request = pb.GenerateRequest(
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=b"hi")),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    submit = engine_pb2.Submit(handle=1, request=request)
    command = engine_pb2.EngineCommand(submit=submit)
    await call.write(engine_pb2.RunRequest(commands=[command]))
    return channel, call


async def test_a_worker_says_who_it_is_and_then_reports() -> None:
    async with registry() as (served, port), worker(port, ScriptedRunner()) as process:
        await served.wait_for(lambda: len(served.reports) >= 3)
        info = served.infos[0]
        assert info.worker_id == "seat" and info.instance_id and info.api_major == 1
        assert info.address == process._info.address and not info.address.endswith(":0")
        assert engine_pb2.ENGINE_FEATURE_RESUME in info.features
        report = served.reports[0]
        assert report.state == engine_pb2.WORKER_STATE_READY and report.idle
        assert process.membership.is_attached


async def test_a_wedged_step_shows_as_no_progress() -> None:
    gate = threading.Event()
    entered = threading.Event()

    def wedge(step: StepInput) -> None:
        entered.set()
        assert gate.wait(TIMEOUT_S)

    runner = ScriptedRunner(says({}), before_forward=wedge)
    async with registry() as (served, port), worker(port, runner) as process:
        channel, call = await generate(process, 3)
        assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
        await served.wait_for(lambda: served.reports and not served.reports[-1].idle)
        seen = len(served.reports)
        await served.wait_for(lambda: len(served.reports) >= seen + 3)
        stuck = served.reports[seen:]
        assert not any(r.idle for r in stuck) and len({r.last_step_seq for r in stuck}) == 1
        gate.set()
        await served.wait_for(lambda: served.reports[-1].idle)
        assert served.reports[-1].last_step_seq > stuck[-1].last_step_seq
        assert served.reports[-1].last_step_unix_ms >= stuck[-1].last_step_unix_ms
        call.cancel()
        await channel.close()


async def test_a_worker_comes_back_to_a_scheduler_that_restarts() -> None:
    async with registry() as (served, port), worker(port, ScriptedRunner()) as process:
        await served.wait_for(lambda: served.reports)
        served.is_gone.set()
        await served.wait_for(lambda: len(served.infos) == 2)
        seen = len(served.reports)
        await served.wait_for(lambda: len(served.reports) > seen)
        assert served.infos[0] == served.infos[1]
        assert served.reports[-1].state == engine_pb2.WORKER_STATE_READY
        assert process.membership.is_attached


async def test_a_worker_waits_for_a_scheduler_that_is_not_there_yet(
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    async with worker(port, ScriptedRunner()) as process:
        assert not process.membership.is_attached
        async with registry(port) as (served, _):
            await served.wait_for(lambda: served.reports)


async def test_a_drain_is_reported_at_once_and_what_runs_is_finished() -> None:
    gate = threading.Event()

    def wait(step: StepInput) -> None:
        assert gate.wait(TIMEOUT_S)

    runner = ScriptedRunner(says({}), before_forward=wait)
    # A lease so long that no regular report can come in time.
    async with registry(lease_ms=600_000) as (served, port), worker(port, runner) as process:
        channel, call = await generate(process, 5)
        await served.wait_for(lambda: served.reports)
        served.drain.set()
        async with asyncio.timeout(TIMEOUT_S):
            await process.membership.wants_to_leave.wait()
        await served.wait_for(lambda: served.reports[-1].state == engine_pb2.WORKER_STATE_DRAINING)
        stopping = asyncio.create_task(process.stop())
        gate.set()
        tokens = 0
        while (frame := await call.read()) and hasattr(frame, "events"):
            tokens += sum(len(e.delta.token_ids) for e in frame.events)
            if any(e.HasField("finished") for e in frame.events):
                break
        assert tokens == 5
        call.cancel()
        await stopping
        await channel.close()


async def test_a_draining_worker_takes_nothing_new() -> None:
    async with registry() as (served, port), worker(port, ScriptedRunner()) as process:
        await served.wait_for(lambda: served.reports)
        process.membership.drain()
        channel, call = await generate(process, 5)
        frame = await call.read()
        error = rpc.from_status(frame.events[0].failed)
        assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
        call.cancel()
        await channel.close()


@pytest.mark.parametrize("grace", [0.0, 0.05])
async def test_what_does_not_finish_within_the_grace_is_ended(grace: float) -> None:
    runner = ScriptedRunner(says({}))
    runner.max_model_len = runner.kv_tokens = 10_000_000
    async with registry() as (_, port):
        async with worker(port, runner, drain_grace_s=grace) as process:
            channel, call = await generate(process, 9_000_000)
            assert await call.read()
        await channel.close()
