"""The scheduler as a process: starts, says it serves, leaves at once when idle."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable

from grpc_health.v1 import health_pb2, health_pb2_grpc

from candor import rpc
from tests.fakes.scheduler import FakeClient, FakeWorker, request, until


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler", *flags, stderr=asyncio.subprocess.PIPE
    )


async def test_an_idle_process_leaves_at_once_with_streams_open(
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    process = await start("--scheduler", f"127.0.0.1:{port}", "--drain-grace-s", "60")
    channel = rpc.connect(f"127.0.0.1:{port}")
    try:
        async with asyncio.timeout(20):
            await channel.channel_ready()
        stub = health_pb2_grpc.HealthStub(channel)
        service = "candor.v1.SchedulerService"
        asked = health_pb2.HealthCheckRequest(service=service)
        async with asyncio.timeout(20):
            while (await stub.Check(asked)).status != health_pb2.HealthCheckResponse.SERVING:
                pass
        worker = await FakeWorker(num_tokens=2).start(port)
        client = FakeClient(channel)
        await until(lambda: worker.responses)
        await client.submit(1, request())
        await client.ended(1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert time.monotonic() - began < 3
        await until(lambda: client.call.done() and worker.attach_error)
        await client.close()
        await worker.kill()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await channel.close()


async def test_a_wrong_setting_is_named() -> None:
    process = await start("--placement", "darts")
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"--placement='darts' is none of expected_wait" in said


async def test_a_taken_port_is_said_in_one_line(free_port: Callable[[], int]) -> None:
    port = free_port()
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", port)
    async with server:
        process = await start("--scheduler", f"127.0.0.1:{port}")
        _, said = await process.communicate()
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}".encode() in said and b"Traceback" not in said
