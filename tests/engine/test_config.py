"""Settings of a worker, and the process: wrong values, signals, a whole life with the real model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from candor import rpc
from candor.settings import SettingError, load
from candor.v1 import engine_pb2, engine_pb2_grpc
from candor.v1 import inference_pb2 as pb
from engine.config import Config

HERE = str(Path(__file__))


def test_defaults_follow_from_each_other() -> None:
    config = Config(model=HERE, card_index=3)
    assert config.address == "127.0.0.1:50103" and config.name == "test_config"
    assert config.num_rows == 16 and config.num_kv_tokens == 8192
    assert Config(model=HERE, slots=16).num_kv_tokens == 16384
    assert Config(model=HERE, max_model_len=9000).num_kv_tokens == 9000
    assert Config(model=HERE, cached_rows=0).num_rows == 8
    assert (
        Config(model=HERE, engine="0.0.0.0:7", advertise="card-1:9").reachable_at(7) == "card-1:9"
    )
    assert Config(model=HERE).reachable_at(7) == "127.0.0.1:7"


def test_flags_and_variables_reach_the_settings() -> None:
    config = load(
        Config,
        prog="x",
        argv=["--model", HERE, "--served-aliases", "a, b", "--slots", "3"],
        environ={"CANDOR_RUNNER": "synthetic", "CANDOR_SLOTS": "9"},
    )
    assert (config.runner, config.slots, config.served_aliases) == ("synthetic", 3, ("a", "b"))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, "--model"),
        ({"model": "/no/such/file"}, "/no/such/file"),
        ({"model": HERE, "engine": "nowhere"}, "nowhere"),
        ({"model": HERE, "slots": 300, "token_budget": 256}, "--token-budget"),
        ({"model": HERE, "kv_tokens": 10, "max_model_len": 20}, "--kv-tokens"),
    ],
)
def test_values_that_do_not_fit_are_named(values: dict[str, object], names: str) -> None:
    with pytest.raises(SettingError, match=names):
        Config(**values)  # type: ignore[arg-type]


async def start(*arguments: str, **environ: str) -> asyncio.subprocess.Process:
    """A worker process."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environ,
    )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--model", HERE, "--slots", "0"], "--slots"),
        (["--model", HERE, "--runner", "abacus"], "abacus"),
        (["--model", HERE], HERE),
        (["--model", HERE, "--model-kind", "embedding"], "--model-kind=embedding"),
        (["--slots", "4"], "--model"),
        (["--model", HERE, "--engine-metrics", "nowhere"], "nowhere"),
        (["--model", HERE, "--speculation", "wild"], "wild"),
    ],
)
async def test_a_wrong_setting_ends_the_process_with_one_line(
    arguments: list[str], names: str
) -> None:
    process = await start(*arguments)
    _, said = await process.communicate()
    assert process.returncode == 2
    (line,) = said.decode().strip().splitlines()
    assert names in line


@pytest.mark.model
async def test_a_worker_process_serves_the_real_model_and_drains_on_sigterm(
    model_path: Path, free_port: Callable[[], int]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = await start(
        *("--model", str(model_path), "--engine", address, "--slots", "2", "--threads", "1"),
        *("--scheduler", "127.0.0.1:1", "--max-model-len", "512", "--kv-tokens", "1024"),
        "--runner",
        "llamacpp",
    )
    try:
        async with asyncio.timeout(60), rpc.connect(address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            info = (await stub.GetInfo(engine_pb2.GetInfoRequest(), wait_for_ready=True)).info
            assert info.pid == process.pid and info.model.max_model_len == 512
            call = stub.Run()
            request = pb.GenerateRequest(
                prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2, 3])),
                stopping=pb.StoppingParams(max_tokens=12, ignore_eos=True),
            )
            submit = engine_pb2.Submit(handle=1, request=request)
            await call.write(
                engine_pb2.RunRequest(commands=[engine_pb2.EngineCommand(submit=submit)])
            )
            tokens: list[int] = []
            is_finished = False
            while not is_finished:
                frame = await call.read()
                assert isinstance(frame, engine_pb2.RunResponse)
                if not tokens:
                    process.send_signal(signal.SIGTERM)
                tokens += [t for event in frame.events for t in event.delta.token_ids]
                is_finished = frame.events[-1].HasField("finished")
            assert len(tokens) == 12, "what ran was finished"
            call.cancel()
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def test_a_model_is_named_after_its_file_without_the_ending_or_its_whole_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "encoder-v1.5"
    folder.mkdir()
    (folder / "weights.gguf").touch()
    assert Config(model=str(folder)).name == "encoder-v1.5"
    assert Config(model=str(folder / "weights.gguf")).name == "weights"
    assert Config(model=str(folder), model_name="mine").name == "mine"
