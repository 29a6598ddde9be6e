"""Start one gateway: settings, signals, server."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop

from candor.settings import SettingError, load
from candor.telemetry import setup_logging
from gateway.config import Config

PROG = "python -m gateway"


def main() -> None:
    """Run until SIGTERM or SIGINT; exits 2 on a wrong setting, 1 when the address is taken."""
    config = load(Config, prog=PROG)
    setup_logging("gateway", config.log_level)
    # Their lines say less than ours and come once per request or connection.
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_serve(config)))


async def _serve(config: Config) -> int:
    from gateway.app import make_server  # after the settings: a wrong one is told at once

    log = logging.getLogger("gateway")
    try:
        server = make_server(config)
    except SettingError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.drain)
    log.info("listening", extra={"http": config.http, "dialect": config.dialect})
    await server.serve()
    log.info("stopped")
    return 0


if __name__ == "__main__":
    main()
