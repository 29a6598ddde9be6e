"""The tokenizer as a process: how it starts, what stops it, what it says when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from candor.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tests.fakes import tokenizer_svc as fakes

COMMAND = [sys.executable, "-m", "tokenizer_svc"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_ends_cleanly(
    stop: signal.Signals, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    model = fakes.bpe_gguf(tmp_path / "tiny.gguf")
    address = f"127.0.0.1:{free_port()}"
    # The short flag, and the model by environment.
    environment = os.environ | {
        "CANDOR_MODELS_SERVED": f"tiny={model}",
        "CANDOR_MODELS": "/nowhere",
    }
    with subprocess.Popen(
        [*COMMAND, "--tokenizer", address], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            started = json.loads(process.stderr.readline())
            assert (started["message"], started["address"]) == ("serving", address)
            with grpc.insecure_channel(address) as channel:
                stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
                answer = stub.Encode(
                    tokenizer_pb2.EncodeRequest(model="tiny", texts=["hello"]), timeout=10
                )
            assert answer.fingerprint == started["models"]["tiny"]
            process.send_signal(stop)
            assert json.loads(process.stderr.readline())["signal"] == stop.name
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--models", "tiny=/no/such/file"],
            "model 'tiny': /no/such/file is neither a GGUF file nor",
        ),
        (["--models", "/x"], "'/x' is not name=path"),
        ([], "models-served is empty"),
        (["--models", "a=/x", "--tokenizer-threads", "0"], "below the least allowed value 1"),
    ],
)
def test_a_wrong_setting_ends_it_with_one_line(arguments: list[str], words: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CANDOR_")}
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
