"""The process: starts without anyone behind it, logs JSON, drains on SIGTERM and exits with 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx


def test_the_gateway_starts_alone_and_ends_cleanly(free_port: Callable[[], int]) -> None:
    port = free_port()
    nobody = {"CANDOR_SCHEDULER": "127.0.0.1:9", "CANDOR_TOKENIZER": "127.0.0.1:9"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--http", f"127.0.0.1:{port}"],
        env={**os.environ, **nobody},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            trust_env=False,
            transport=httpx.HTTPTransport(retries=0),
        ) as http:
            give_up_at = time.monotonic() + 20
            while True:
                try:
                    reply = http.get("/health", headers={"x-request-id": "first"})
                    break
                except httpx.ConnectError:
                    assert process.poll() is None and time.monotonic() < give_up_at
            assert reply.status_code == 200
            assert http.get("/health/ready").status_code == 503
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    (first,) = (line for line in lines if line.get("path") == "/health")
    assert first["request_id"] == "first" and first["service"] == "gateway"
    assert (first["method"], first["status"]) == ("GET", 200) and first["ms"] >= 0
