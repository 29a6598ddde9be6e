"""What happens when a client goes away, a worker dies, or the queue is full."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.stack import Running, candor_stack
from tests.e2e.test_streams import body, client_of, stream

LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def slow(model_path: Path) -> Iterator[Running]:
    """Two workers that take 20 ms a step; a short queue."""
    arguments = ["--served-model-name", "synthetic", "--runner", "synthetic", "--slots", "4"]
    environ = {"CANDOR_SYNTHETIC_STEP_MS": "20", "CANDOR_MAX_QUEUED_REQUESTS": "4"}
    with candor_stack(model_path, workers=2, arguments=arguments, environ=environ) as stack:
        yield stack


def running(stack: Running) -> float:
    """Sequences in slots, as /metrics shows them."""
    text = httpx.get(stack.url + "/metrics", trust_env=False).text
    values = re.findall(r"^vllm:num_requests_running(?:\{[^}]*\})? (\S+)$", text, re.M)
    assert values, text
    return sum(map(float, values))


def until(condition: Any, timeout_s: float, what: str) -> float:
    """Poll a condition; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)
    return time.monotonic() - began


def workers(stack: Running) -> list[dict[str, Any]]:
    """`candor workers --json`."""
    command = [sys.executable, "-m", "candor.cli", "workers", "--json"]
    done = subprocess.run(
        [*command, "--scheduler", stack.scheduler], capture_output=True, text=True, check=True
    )
    return list(json.loads(done.stdout))


def open_stream(stack: Running, request: dict[str, Any]) -> socket.socket:
    """A streaming request over a bare socket, with its first bytes read."""
    payload = json.dumps({**request, "stream": True}).encode()
    host, port = stack.url.removeprefix("http://").split(":")
    s = socket.create_connection((host, int(port)), timeout=30)
    s.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(payload)}\r\n\r\n".encode()
        + payload
    )
    received = b""
    while b"content" not in received.partition(b"\r\n\r\n")[2]:
        received += s.recv(4096)
    return s


def test_a_client_that_goes_away_frees_its_slot_within_200_ms(slow: Running) -> None:
    s = open_stream(slow, body("synthetic", 1, **LONG))
    until(lambda: running(slow) == 1, 5, "running")
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    s.close()
    # Asked every 5 ms; each answer itself costs a scrape.
    assert until(lambda: running(slow) == 0, 5, "slot free") < 0.2


async def test_an_unstreamed_request_is_cancelled_with_its_connection(slow: Running) -> None:
    async with client_of(slow) as client:
        with contextlib.suppress(httpx.ReadTimeout):
            await client.post(
                "/v1/chat/completions", json=body("synthetic", 2, **LONG), timeout=0.5
            )
    await asyncio.to_thread(until, lambda: running(slow) == 0, 2, "slot free")


async def test_kill_9_of_a_worker_ends_nothing_silently_and_it_comes_back(slow: Running) -> None:
    victim = workers(slow)[0]
    async with client_of(slow) as client:
        streams = [
            asyncio.create_task(
                stream(client, body("synthetic", i, max_tokens=100, ignore_eos=True))
            )
            for i in range(6)
        ]
        await asyncio.to_thread(until, lambda: running(slow) == 6, 10, "running")
        os.kill(victim["pid"], signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*streams), 60)
        for got in ended:
            # The other worker went on where this one stopped: same ending as any other stream.
            assert (got.reasons, got.done, got.completion_tokens) == (["length"], 1, 100)
        new = await stream(client, body("synthetic", 9))
        assert new.done == 1

    def is_back() -> bool:
        listed = workers(slow)
        ready = [w for w in listed if w["state"] == "ready"]
        return len(ready) == 2 and victim["pid"] not in [w["pid"] for w in listed]

    await asyncio.to_thread(until, is_back, 60, "the dead worker is back")


async def test_a_full_queue_is_refused_at_once_and_says_when_to_come_back(slow: Running) -> None:
    async with client_of(slow) as client:
        # Two workers hold slots + 2 each, four wait; the rest is refused.
        tasks = [
            asyncio.create_task(
                client.post("/v1/chat/completions", json=body("synthetic", i, **LONG), timeout=30)
            )
            for i in range(20)
        ]
        refused: list[httpx.Response] = []
        async with asyncio.timeout(10):
            while len(refused) < 4:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                refused = [t.result() for t in done]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert {r.status_code for r in refused} == {429}
    assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
    assert "4" in refused[0].json()["message"]
    await asyncio.to_thread(until, lambda: running(slow) == 0, 5, "slots free")


@pytest.mark.parametrize("penalty", [1e308, -1e308])
async def test_one_requests_absurd_number_is_its_own_400_and_nobody_elses_fault(
    scripted: Running, penalty: float
) -> None:
    beam = {"use_beam_search": True, "best_of": 3, "length_penalty": penalty, "max_tokens": 4}
    async with client_of(scripted) as client:
        streams = [
            asyncio.create_task(stream(client, body("synthetic", i, max_tokens=60)))
            for i in range(8)
        ]
        reply = await client.post("/v1/chat/completions", json=body("synthetic", 1) | beam)
        ended = await asyncio.gather(*streams)
    assert reply.status_code == 400 and "length_penalty" in reply.json()["message"]
    assert all((len(got.reasons), got.done) == (1, 1) for got in ended)


async def test_a_line_that_is_too_long_to_log_takes_no_service_down(scripted: Running) -> None:
    gateway = scripted.pid_of("gateway")
    async with client_of(scripted) as client:
        reply = await client.get("/" + "%01" * 12_000)
        assert reply.status_code == 404
        assert (await client.get("/health")).status_code == 200
    assert scripted.pid_of("gateway") == gateway
