"""Starts one scheduler process."""

from __future__ import annotations

import asyncio
import logging
import random

from candor import rpc, settings, telemetry
from candor.v1 import engine_pb2_grpc, scheduler_pb2_grpc
from scheduler.clients import TokenizerClient
from scheduler.config import Config
from scheduler.core import ORDERS, POLICIES, Scheduler
from scheduler.dispatcher import Dispatcher
from scheduler.service import RegistryService, SchedulerService

log = logging.getLogger("scheduler")

SERVICES = ("candor.v1.SchedulerService", "candor.v1.RegistryService")
_FAREWELL_S = 1.0
"""For streams to carry their last events when everything has been ended."""


class Process:
    """A scheduler with its doors open; tests run it in their own process."""

    def __init__(self, config: Config, rng: random.Random) -> None:
        self._config = config
        machine = Scheduler(
            config.limits(),
            POLICIES[config.placement].make(),
            rng,
            order=ORDERS[config.order],
            tenants=config.tenant_limits(),
        )
        self.dispatcher = Dispatcher(
            machine,
            rng,
            client_buffer=config.client_buffer,
            worker_buffer=config.worker_buffer,
            connect_timeout_s=config.connect_timeout_s,
        )
        self._tokenizer = TokenizerClient(config.tokenizer, config.encode_timeout_s)
        self._server = rpc.Server(SERVICES)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
            SchedulerService(self.dispatcher, self._tokenizer, max_encoding=config.max_encoding),
            self._server.grpc,
        )
        engine_pb2_grpc.add_RegistryServiceServicer_to_server(
            RegistryService(self.dispatcher, lease_ms=config.lease_ms), self._server.grpc
        )

    async def start(self) -> int:
        """Open the doors; returns the port."""
        port = await self._server.start(self._config.scheduler)
        await self._server.set_serving(True)
        return port

    async def stop(self) -> None:
        """Refuse what is new, let what runs finish, close."""
        await self._server.set_serving(False)
        await self.dispatcher.stop(self._config.drain_grace_s)
        await self._server.stop(_FAREWELL_S)
        await self._tokenizer.close()


async def run(config: Config) -> None:
    """Serve until a signal says stop."""
    process = Process(config, random.Random())
    try:
        await process.start()
    except RuntimeError as error:
        raise SystemExit(f"scheduler: cannot listen on {config.scheduler}: {error}") from error
    log.info("serving", extra={"address": config.scheduler})
    signal = await rpc.wait_for_signal()
    log.info("stopping", extra={"signal": signal})
    await process.stop()


def main() -> None:
    """The process."""
    config = settings.load(Config, prog="python -m scheduler")
    telemetry.setup_logging("scheduler", config.log_level)
    asyncio.run(run(config))


if __name__ == "__main__":
    main()
