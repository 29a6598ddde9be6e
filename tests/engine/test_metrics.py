"""A worker's own endpoint: the numbers of its steps and requests, over HTTP, when it is asked for."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from candor import rpc
from candor.v1 import engine_pb2, engine_pb2_grpc
from candor.v1 import inference_pb2 as pb
from engine.__main__ import Process
from engine.backends import Frame, Load
from engine.config import Config
from engine.core.speculation import StepCosts
from engine.core.types import EngineLoad, Failed, StepStats, Totals
from engine.metrics import EngineMetrics, MetricsServer
from tests.fakes.engine import ByteCodec, ScriptedRunner, peak


def numbers(text: str) -> dict[str, float]:
    """Sample lines as "name{label=value}" → number."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return numbers(answer.read().decode())


async def serve_one(address: str, request: pb.GenerateRequest) -> pb.Finished:
    """Send one request and read until it has ended."""
    async with asyncio.timeout(10), rpc.connect(address) as channel:
        call = engine_pb2_grpc.EngineServiceStub(channel).Run()
        submit = engine_pb2.Submit(handle=1, request=request)
        await call.write(engine_pb2.RunRequest(commands=[engine_pb2.EngineCommand(submit=submit)]))
        await call.done_writing()
        events = [event async for frame in call for event in frame.events]
    return events[-1].finished


async def test_a_worker_tells_what_a_request_took(free_port: Callable[[], int]) -> None:
    config = Config(
        model=__file__,
        model_name="m",
        engine="127.0.0.1:0",
        scheduler="127.0.0.1:1",
        engine_metrics=f"127.0.0.1:{free_port()}",
    )
    runner = ScriptedRunner(lambda _ids: peak(97))
    process = Process(config, runner, ByteCodec(), StepCosts([(1, 1.0), (64, 1.0)]))
    port = await process.start()
    try:
        request = pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[97] * 8)),
            stopping=pb.StoppingParams(max_tokens=30),
            sampling=pb.SamplingParams(temperature=0),
        )
        done = await serve_one(f"127.0.0.1:{port}", request)
        assert process.metrics_server is not None
        found = await asyncio.to_thread(scrape, process.metrics_server.address)
    finally:
        await process.stop()
    assert done.usage.completion_tokens == 30 and done.usage.accepted_draft_tokens > 20
    timings = done.timings
    parts = timings.queue_us + timings.prefill_us + timings.decode_us
    assert abs(parts - timings.total_us) <= 3 and min(timings.queue_us, timings.prefill_us) > 0
    steps = runner.num_forwards
    for phase in ("plan", "forward", "sample", "emit"):
        assert found[f"candor_engine_step_microseconds_count{{phase={phase}}}"] == steps
        assert found[f"candor_engine_step_microseconds_sum{{phase={phase}}}"] > 0
    for phase in ("queue", "prefill", "decode"):
        assert found[f"candor_engine_request_microseconds_count{{phase={phase}}}"] == 1
    decode = found["candor_engine_request_microseconds_sum{phase=decode}"]
    assert abs(decode - timings.decode_us) <= 1
    assert found["candor_engine_requests_total{outcome=finished}"] == 1
    assert found["candor_engine_requests_total{outcome=failed}"] == 0
    assert found["candor_engine_prompt_tokens_total"] == 8
    assert found["candor_engine_generated_tokens_total"] == 30
    accepted = found["candor_engine_accepted_draft_tokens_total"]
    assert accepted == done.usage.accepted_draft_tokens <= found["candor_engine_draft_tokens_total"]
    kv = [found[f"candor_engine_kv_tokens{{state={s}}}"] for s in ("used", "cached", "free")]
    assert kv[0] == 0 and kv[1] > 30 and sum(kv) == runner.kv_tokens
    info = "batch_invariant=true,model=m,runner=scripted,speculation=lookup"
    assert found[f"candor_engine_info{{{info}}}"] == 1
    with pytest.raises(OSError):
        await asyncio.to_thread(scrape, process.metrics_server.address)


def test_failures_count_and_frames_without_a_step_do_not() -> None:
    metrics = EngineMetrics(model="m", runner="r", is_batch_invariant=False, speculates=False)
    load = EngineLoad(2, 3, 10, 20, 100, Totals(num_preemptions=4, num_failed_steps=1))
    frame = Frame(StepStats(7, 5, 2, forward_s=0.012), Load(load), [Failed(1, ValueError())])
    metrics.observe(frame)
    metrics.observe(frame)
    server = MetricsServer(metrics, "127.0.0.1:0")
    try:
        found = scrape(server.address)
    finally:
        server.close()
    assert found["candor_engine_step_microseconds_count{phase=forward}"] == 1
    assert found["candor_engine_step_microseconds_sum{phase=forward}"] == pytest.approx(12_000)
    assert found["candor_engine_requests_total{outcome=failed}"] == 2
    assert found["candor_engine_sequences{state=running}"] == 2
    assert found["candor_engine_sequences{state=waiting}"] == 3
    assert found["candor_engine_kv_tokens{state=free}"] == 70
    assert found["candor_engine_preemptions_total"] == 4
    assert found["candor_engine_failed_steps_total"] == 1


def test_workers_that_share_a_setting_take_neighbouring_ports(free_port: Callable[[], int]) -> None:
    metrics = EngineMetrics(model="m", runner="r", is_batch_invariant=False, speculates=False)
    wanted = f"127.0.0.1:{free_port()}"
    servers = [MetricsServer(metrics, wanted) for _ in range(3)]
    try:
        assert servers[0].address == wanted and len({s.address for s in servers}) == 3
        assert all(scrape(s.address) for s in servers)
    finally:
        for server in servers:
            server.close()
