"""`candor serve`: the whole stack on this host, as processes, under one supervisor."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.text import Text

from candor import rpc
from candor.cli.supervisor import Service, StartFailed, State, Status, Supervisor, readable
from candor.settings import host_port
from candor.v1 import engine_pb2, inference_pb2, scheduler_pb2, scheduler_pb2_grpc

START_TIMEOUT_S = 120.0
STOP_GRACE_S = 20.0


@dataclass(frozen=True)
class Plan:
    """What to run where. Addresses are host:port; worker i listens on the engine port + i."""

    model_path: Path
    model_name: str
    aliases: tuple[str, ...]
    workers: int
    slots: int
    threads: int
    runner: str
    max_model_len: int | None
    http: str
    scheduler: str
    tokenizer: str
    engine: str
    log_dir: Path
    embedding: tuple[str, Path] | None = None
    """Name and folder of an embedding model served beside the main one, by a worker of its own."""

    def engine_address(self, index: int) -> str:
        """Where worker `index` listens."""
        host, port = host_port(self.engine)
        return f"{host}:{port + index}"


def services_of(plan: Plan) -> list[Service]:
    """The processes of a plan, in order of start."""
    python = [sys.executable, "-m"]
    models = [(plan.model_name, plan.model_path), *([plan.embedding] if plan.embedding else [])]
    model = ",".join(f"{name}={path}" for name, path in models)

    def where(*names: str) -> list[str]:
        return [word for name in names for word in (f"--{name}", getattr(plan, name))]

    def worker(index: int, path: Path, name: str, seat: str) -> list[str]:
        command = [*python, "engine", "--engine", plan.engine_address(index), *where("scheduler")]
        command += ["--model", str(path), "--model-name", name, "--worker-id", seat]
        return [*command, "--slots", str(plan.slots), "--threads", str(plan.threads)]

    services = [
        Service(
            "tokenizer",
            [*python, "tokenizer_svc", *where("tokenizer"), "--models", model],
            _healthy(plan.tokenizer),
        ),
        Service(
            "scheduler",
            [*python, "scheduler", *where("scheduler", "tokenizer")],
            _healthy(plan.scheduler),
        ),
    ]
    for index in range(plan.workers):
        command = worker(index, plan.model_path, plan.model_name, f"worker-{index}")
        command += ["--runner", plan.runner]
        if plan.aliases:
            command += ["--served-aliases", ",".join(plan.aliases)]
        if plan.max_model_len:
            command += ["--max-model-len", str(plan.max_model_len)]
        services.append(Service(f"engine-{index}", command, _registered(plan.scheduler)))
    if plan.embedding:
        name, path = plan.embedding
        command = worker(plan.workers, path, name, "embedder-0")
        command += ["--model-kind", "embedding", "--runner", "auto"]
        # These belong to the model beside it, also where they come from the environment.
        command += ["--served-aliases", "", "--max-model-len", "", "--engine-metrics", ""]
        services.append(Service("embedder", command, _registered(plan.scheduler)))
    services.append(
        Service(
            "gateway",
            [*python, "gateway", *where("http", "scheduler", "tokenizer")],
            _answers(plan.http),
        )
    )
    return services


def _healthy(address: str) -> Callable[[int], Awaitable[bool]]:
    async def ask(_pid: int) -> bool:
        try:
            async with rpc.connect(address) as channel:
                reply = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=1
                )
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return ask


def _registered(scheduler: str) -> Callable[[int], Awaitable[bool]]:
    async def ask(pid: int) -> bool:
        try:
            workers = await list_workers(scheduler, timeout_s=1)
        except grpc.RpcError:
            return False
        ready = engine_pb2.WORKER_STATE_READY
        return any(w.info.pid == pid and w.state == ready for w in workers)

    return ask


def _answers(http: str) -> Callable[[int], Awaitable[bool]]:
    async def ask(_pid: int) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                reply = await client.get(f"http://{_dialable(http)}/health/ready", timeout=1)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    return ask


async def list_workers(scheduler: str, timeout_s: float) -> list[scheduler_pb2.WorkerStatus]:
    """The workers a scheduler knows. Raises grpc.RpcError."""
    async with rpc.connect(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        reply: Message = await stub.ListWorkers(
            scheduler_pb2.ListWorkersRequest(), timeout=timeout_s
        )
    assert isinstance(reply, scheduler_pb2.ListWorkersResponse)
    return list(reply.workers)


def _dialable(address: str) -> str:
    host, port = host_port(address)
    return f"{'127.0.0.1' if host in ('', '0.0.0.0', '::') else host}:{port}"


def busy_addresses(plan: Plan) -> dict[str, str]:
    """Addresses of the plan at which somebody listens already → the option that moves each."""
    wanted = {plan.http: "--http", plan.scheduler: "--scheduler", plan.tokenizer: "--tokenizer"}
    workers = plan.workers + (plan.embedding is not None)
    wanted |= {plan.engine_address(index): "--engine" for index in range(workers)}
    return {address: flag for address, flag in wanted.items() if not _can_bind(address)}


def _can_bind(address: str) -> bool:
    host, port = host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


_COLORS = {
    State.STARTING: "yellow",
    State.READY: "green",
    State.RESTARTING: "red",
    State.STOPPED: "dim",
}


class _Screen:
    """Says what changes, one line at a time: readable in a terminal and in a log alike."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_stopping = False

    def changed(self, service: Service, status: Status) -> None:
        words = Text.assemble(
            (f"{service.name:<16}", "bold"), (status.state, _COLORS.get(status.state, ""))
        )
        if status.state is State.READY:
            words.append(f"  pid {status.pid}")
        if status.state is State.RESTARTING:
            words.append(f"  exit code {status.exit_code}, restart {status.restarts}")
            if status.tail:
                words.append(f"\n{'':16}{readable(status.tail[-1])}", "dim")
        self._console.print(words)

    def line(self, service: Service, line: str) -> None:
        if self.is_stopping:
            return  # what services say of each other's leaving is no news now
        if '"level": "error"' in line or '"level": "warning"' in line:
            self._console.print(Text(f"{service.name:<16}{readable(line)}", "yellow"))


async def serve(plan: Plan, console: Console) -> int:
    """Run the plan until a signal. Returns the exit code."""
    if busy := busy_addresses(plan):
        listed = ", ".join(f"{address} ({flag})" for address, flag in busy.items())
        console.print(
            f"[red]already in use:[/] {listed}. Is another stack running? Each option in brackets"
            " takes another host:port.",
            soft_wrap=True,
        )
        return 1
    screen = _Screen(console)
    supervisor = Supervisor(
        services_of(plan),
        log_dir=plan.log_dir,
        on_change=screen.changed,
        on_line=screen.line,
        start_timeout_s=START_TIMEOUT_S,
        stop_grace_s=STOP_GRACE_S,
    )
    signalled = asyncio.create_task(rpc.wait_for_signal())
    starting = asyncio.create_task(supervisor.start())
    code = 0
    try:
        await asyncio.wait({signalled, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            known = await list_workers(plan.scheduler, timeout_s=5)
            _greet(plan, [w for w in known if w.info.model.name == plan.model_name], console)
            await signalled
    except StartFailed as failure:
        console.print(f"[red]{failure}[/]", highlight=False)
        code = 1
    finally:
        starting.cancel()
        signalled.cancel()
        console.print("stopping", style="dim")
        screen.is_stopping = True
        await supervisor.stop()
    return code


def _greet(plan: Plan, workers: Sequence[scheduler_pb2.WorkerStatus], console: Console) -> None:
    runners = sorted({worker.info.runner for worker in workers})
    kinds = {worker.info.model.kind for worker in workers}
    beside = f"; embeddings by {plan.embedding[0]}" if plan.embedding else ""
    url = f"http://{_dialable(plan.http)}"
    console.print(
        f"\nserving [bold]{plan.model_name}[/] on [bold]{url}[/]"
        f" ({plan.workers} worker{'s' if plan.workers > 1 else ''} x {plan.slots} slots,"
        f" computed by {', '.join(runners)}{beside};"
        f" logs in {plan.log_dir}). Try:\n",
        highlight=False,
        soft_wrap=True,
    )
    if inference_pb2.MODEL_KIND_EMBEDDING in kinds:
        path, body = "embeddings", '"input": ["first text", "second text"]}'
    else:
        question = "What is the capital of France? Answer in one sentence."
        messages = f'[{{"role": "user", "content": "{question}"}}]}}'
        path, body = "chat/completions", f'"stream": true, "max_tokens": 64, "messages": {messages}'
    print(
        f"curl -N {url}/v1/{path} -H 'Content-Type: application/json'"
        f' -d \'{{"model": "{plan.model_name}", {body}\'\n',
        flush=True,
    )


def default_threads(workers: int) -> int:
    """Cores this process may use, shared among the workers."""
    return max(1, len(os.sched_getaffinity(0)) // workers)
