"""Starts one worker process: loads the model, opens the door, attaches to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
import uuid

from candor import rpc, settings, telemetry
from candor.v1 import engine_pb2, engine_pb2_grpc, inference_pb2
from engine import translate
from engine.backends import Backend, Description
from engine.backends.native import NativeBackend
from engine.config import Config
from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.runners import Runner, open_runner
from engine.service import EngineService, Served
from engine.worker import Membership
from tokenizer_svc.codec import Codec, open_codec

log = logging.getLogger("engine")

PROG = "python -m engine"
SERVICES = ("candor.v1.EngineService",)
API_MAJOR, API_MINOR = 1, 0
_FAREWELL_S = 1.0
"""For streams to carry their last events once everything has ended."""
_FEATURES = (
    engine_pb2.ENGINE_FEATURE_CONSTRAINT,
    engine_pb2.ENGINE_FEATURE_PROMPT_LOGPROBS,
    engine_pb2.ENGINE_FEATURE_BEAM_SEARCH,
    engine_pb2.ENGINE_FEATURE_RESUME,
    engine_pb2.ENGINE_FEATURE_SEED,
)


class Process:
    """A worker with its door open; tests run it in their own process."""

    def __init__(self, config: Config, runner: Runner, codec: Codec) -> None:
        """Called on the event loop. Takes over the runner."""
        self._config = config
        self._runner = runner
        self._codec = codec
        engine = Engine(
            runner,
            codec,
            slots=config.slots,
            token_budget=config.token_budget,
            mixed_budget=config.mixed_token_budget,
            max_choices=config.max_choices,
            max_logprobs=config.max_logprobs,
            clock=time.monotonic,
        )
        self.backend: Backend = NativeBackend(
            engine,
            Grammars(codec, runner.vocab_size),
            Description(
                backend="native",
                runner=runner.name,
                slots=config.slots,
                kv_tokens=runner.kv_tokens,
                max_model_len=engine.limits.max_model_len,
                vocab_size=runner.vocab_size,
                is_batch_invariant=runner.is_batch_invariant,
            ),
            max_requests=config.max_requests,
            on_death=self._die,
            on_quiet_change=lambda: self.membership.tell(),
        )
        self.died = asyncio.Event()
        self._instance_id = uuid.uuid4().hex
        self._info = self._describe(config.address)
        self.membership = Membership(config.scheduler, self._info, self._report)
        self._server = rpc.Server(SERVICES)
        self._attached: asyncio.Task[None] | None = None
        service = EngineService(
            self.backend,
            Served((config.name, *config.served_aliases), codec.fingerprint),
            piece=codec.piece,
            info=lambda: self._info,
            report=lambda: self._report(self.membership.state),
            is_draining=lambda: self.membership.is_draining,
            max_buffered_frames=config.stream_buffer_frames,
            max_buffered_bytes=config.stream_buffer_bytes,
        )
        engine_pb2_grpc.add_EngineServiceServicer_to_server(service, self._server.grpc)

    async def start(self) -> int:
        """Open the door and begin to attach; returns the port."""
        port = await self._server.start(self._config.address)
        self._info.address = self._config.reachable_at(port)
        await self._server.set_serving(True)
        self._attached = asyncio.create_task(self.membership.keep(), name="membership")
        return port

    async def stop(self) -> None:
        """Take nothing new, finish what runs, leave, close."""
        self.membership.drain()
        await self._server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_grace_s):
                await self.backend.wait_idle()
        if self._attached is not None:
            self._attached.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._attached
        await self._server.stop(_FAREWELL_S)
        if await asyncio.to_thread(self.backend.close):
            self._runner.close()

    def _die(self) -> None:
        self.died.set()

    def _describe(self, address: str) -> engine_pb2.WorkerInfo:
        config, backend = self._config, self.backend.description
        return engine_pb2.WorkerInfo(
            worker_id=config.seat,
            instance_id=self._instance_id,
            address=address,
            pid=os.getpid(),
            card=config.card,
            model=inference_pb2.ModelInfo(
                name=config.name,
                aliases=config.served_aliases,
                kind=inference_pb2.MODEL_KIND_GENERATIVE,
                max_model_len=backend.max_model_len,
                tokenizer_fingerprint=self._codec.fingerprint,
                vocab_size=backend.vocab_size,
            ),
            slots=backend.slots,
            kv_tokens=backend.kv_tokens,
            backend=backend.backend,
            runner=backend.runner,
            api_major=API_MAJOR,
            api_minor=API_MINOR,
            features=_FEATURES,
        )

    def _report(self, state: engine_pb2.WorkerState) -> engine_pb2.Report:
        return translate.report_to_pb(self.backend.progress(), state)


async def run(config: Config, runner: Runner, codec: Codec) -> int:
    """Serve until a signal or the scheduler says stop. Returns the exit code."""
    process = Process(config, runner, codec)
    try:
        port = await process.start()
    except RuntimeError as error:
        sys.stderr.write(f"{PROG}: cannot listen on {config.address}: {error}\n")
        return 1
    log.info("serving", extra={"address": config.reachable_at(port), "model": config.name})
    reasons = {
        asyncio.create_task(rpc.wait_for_signal()): "signal",
        asyncio.create_task(process.membership.wants_to_leave.wait()): "drained by the scheduler",
        asyncio.create_task(process.died.wait()): "died",
    }
    done, pending = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    why = reasons[done.pop()]
    log.info("stopping", extra={"why": why})
    await process.stop()
    return 1 if why == "died" else 0


def main() -> None:
    """The process."""
    config = settings.load(Config, prog=PROG)
    telemetry.setup_logging("engine", config.log_level)
    try:
        codec = open_codec(config.model_path)
        runner = open_runner(
            config.runner,
            config.model_path,
            max_rows=config.num_rows,
            kv_tokens=config.num_kv_tokens,
            max_batch_tokens=config.token_budget,
            max_model_len=config.max_model_len,
            threads=config.num_threads,
            slots=config.slots,
        )
    except ValueError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        raise SystemExit(2) from error
    raise SystemExit(asyncio.run(run(config, runner, codec)))


if __name__ == "__main__":
    main()
