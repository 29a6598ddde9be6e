"""Starts one tokenizer process."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

from candor import rpc, settings, telemetry
from candor.v1 import tokenizer_pb2_grpc
from tokenizer_svc.catalog import Catalog
from tokenizer_svc.config import Config
from tokenizer_svc.service import TokenizerService

log = logging.getLogger("tokenizer_svc")

PROG = "python -m tokenizer_svc"
SERVICES = ("candor.v1.TokenizerService",)
_STACK_BYTES = 256 * 1024 * 1024
"""Of each thread; reserved, not used. For some vocabularies the library splits texts with a recursive
matcher that goes as deep as a run of letters is long, and an overrun would end the process."""


class Process:
    """A tokenizer service with its door open; tests run it in their own process."""

    def __init__(self, config: Config, catalog: Catalog) -> None:
        self._config = config
        self._service = TokenizerService(catalog, config)
        self._server = rpc.Server(SERVICES)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self._service, self._server.grpc)

    async def start(self) -> int:
        """Open the door; returns the port."""
        port = await self._server.start(self._config.tokenizer)
        await self._server.set_serving(True)
        return port

    async def stop(self) -> None:
        """Refuse what is new, let what runs finish, close."""
        await self._server.stop(self._config.drain_grace_s)
        await self._service.close()


async def run(config: Config, catalog: Catalog) -> None:
    """Serve until a signal says stop."""
    process = Process(config, catalog)
    try:
        await process.start()
    except RuntimeError as error:
        raise SystemExit(f"{PROG}: cannot listen on {config.tokenizer}: {error}") from error
    models = {model.name: model.codec.fingerprint for model in catalog}
    log.info("serving", extra={"address": config.tokenizer, "models": models})
    signal = await rpc.wait_for_signal()
    log.info("stopping", extra={"signal": signal})
    await process.stop()


def main() -> None:
    """The process."""
    config = settings.load(Config, prog=PROG)
    telemetry.setup_logging("tokenizer", config.log_level)
    threading.stack_size(_STACK_BYTES)
    try:
        # Loaded before the door opens, so that a health check tells the truth.
        catalog = Catalog(config.model_paths(), config.template_limits())
    except ValueError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        raise SystemExit(2) from error
    asyncio.run(run(config, catalog))


if __name__ == "__main__":
    main()
