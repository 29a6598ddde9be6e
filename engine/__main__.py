"""Starts one worker process: loads the model, opens the door, attaches to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable

from candor import rpc, settings, telemetry
from candor.v1 import engine_pb2, inference_pb2
from engine.backends import Description
from engine.backends.native import NativeBackend
from engine.config import Config
from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.speculation import Speculator, StepCosts
from engine.embedding import EmbeddingProcess, open_encoder
from engine.metrics import EngineMetrics, MetricsServer
from engine.process import WorkerProcess
from engine.runners import Runner, open_runner
from engine.runners.bert import is_encoder
from engine.runners.timing import pass_times
from engine.service import EngineService, Served
from tokenizer_svc.codec import Codec, open_codec

log = logging.getLogger("engine")

PROG = "python -m engine"
_FEATURES = (
    engine_pb2.ENGINE_FEATURE_CONSTRAINT,
    engine_pb2.ENGINE_FEATURE_PROMPT_LOGPROBS,
    engine_pb2.ENGINE_FEATURE_BEAM_SEARCH,
    engine_pb2.ENGINE_FEATURE_RESUME,
    engine_pb2.ENGINE_FEATURE_SEED,
)


class Process(WorkerProcess):
    """A worker process around a runner."""

    def __init__(
        self, config: Config, runner: Runner, codec: Codec, costs: StepCosts | None = None
    ) -> None:
        """Called on the event loop. Takes over the runner. `costs`: of its passes, if it is to speculate.

        Raises OSError when the metrics' address is taken.
        """
        self._runner = runner
        self._costs = costs
        self._metrics = EngineMetrics(
            model=config.name,
            runner=runner.name,
            is_batch_invariant=runner.is_batch_invariant,
            speculates=costs is not None,
        )
        self.metrics_server: MetricsServer | None = None
        if config.engine_metrics is not None:
            self.metrics_server = MetricsServer(self._metrics, config.engine_metrics)
            log.info("metrics", extra={"address": self.metrics_server.address})
        super().__init__(config, codec)

    def _open_backend(self) -> NativeBackend:
        config, runner = self._config, self._runner
        engine = Engine(
            runner,
            self._codec,
            slots=config.slots,
            token_budget=config.token_budget,
            mixed_budget=config.mixed_token_budget,
            max_choices=config.max_choices,
            max_logprobs=config.max_logprobs,
            clock=time.monotonic,
            speculator=Speculator(self._costs) if self._costs else None,
        )
        self.backend = NativeBackend(
            engine,
            Grammars(self._codec, runner.vocab_size),
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
            on_frame=self._metrics.observe,
        )
        return self.backend

    def _service(self) -> EngineService:
        config = self._config
        return EngineService(
            self.backend,
            Served((config.name, *config.served_aliases), self._codec.fingerprint),
            piece=self._codec.piece,
            info=lambda: self._info,
            report=lambda: self._report(self.membership.state),
            is_draining=lambda: self.membership.is_draining,
            max_buffered_frames=config.stream_buffer_frames,
            max_buffered_bytes=config.stream_buffer_bytes,
        )

    def _model(self) -> inference_pb2.ModelInfo:
        return inference_pb2.ModelInfo(kind=inference_pb2.MODEL_KIND_GENERATIVE)

    def _features(self) -> tuple[engine_pb2.EngineFeature, ...]:
        return _FEATURES

    async def stop(self) -> None:
        """Take nothing new, finish what runs, leave, close."""
        await super().stop()
        if self.metrics_server is not None:
            await asyncio.to_thread(self.metrics_server.close)

    def _release(self) -> None:
        self._runner.close()


async def run(config: Config, make: Callable[[], WorkerProcess]) -> int:
    """Serve until a signal or the scheduler says stop. Returns the exit code."""
    try:
        process = make()
    except OSError as error:
        sys.stderr.write(
            f"{PROG}: cannot listen on --engine-metrics={config.engine_metrics}: {error}\n"
        )
        return 1
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


def load(config: Config) -> Callable[[], WorkerProcess]:
    """Load the model; returns what makes the process around it. Raises ValueError."""
    embeds = is_encoder(config.model_path)
    kind = "embedding" if embeds else "generative"
    if config.model_kind not in ("auto", kind):
        raise ValueError(
            f"--model-kind={config.model_kind}, but {config.model_path} holds a model that is {kind}"
        )
    codec = open_codec(config.model_path)
    if embeds:
        encoder = open_encoder(config, codec)
        return lambda: EmbeddingProcess(config, encoder, codec)
    runner = open_runner(
        config.runner,
        config.model_path,
        max_rows=config.num_rows,
        kv_tokens=config.num_kv_tokens,
        max_batch_tokens=config.token_budget,
        max_model_len=config.max_model_len,
        threads=config.num_threads,
        slots=config.slots,
        batch_invariant=config.batch_invariant,
    )
    costs = _costs(config, runner)
    return lambda: Process(config, runner, codec, costs)


def _costs(config: Config, runner: Runner) -> StepCosts | None:
    """What passes cost, when drafts are wanted. Where a row costs nearly a step of its own, as in llama.cpp's
    quantised kernels, drafts were measured not to help."""
    if config.speculation == "off" or (config.speculation == "auto" and runner.name != "native"):
        return None
    times = pass_times(runner)
    shown = ", ".join(f"{size}: {1e3 * seconds:.1f}" for size, seconds in times)
    log.info("drafts are verified where they pay", extra={"pass_ms_by_tokens": shown})
    return StepCosts(times) if len(times) > 1 else None


def main() -> None:
    """The process."""
    config = settings.load(Config, prog=PROG)
    telemetry.setup_logging("engine", config.log_level)
    try:
        make = load(config)
    except ValueError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        raise SystemExit(2) from error
    raise SystemExit(asyncio.run(run(config, make)))


if __name__ == "__main__":
    main()
