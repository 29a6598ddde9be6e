"""A worker's membership: it attaches to the scheduler, reports that it gets on, and leaves in order.

Knows the registry's side of the contract. What is reported is asked for each time; that a step is stuck shows
by itself, as the reports then carry the same step number and no idleness, so the lease is not renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterable, Callable

import grpc

from candor import rpc
from candor.v1 import engine_pb2, engine_pb2_grpc

log = logging.getLogger("engine.worker")

_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.2, 5.0
_ACCEPT_TIMEOUT_S = 10.0
_LEAST_REPORT_S = 0.01


class Membership:
    """Whether this worker takes requests, and who is told."""

    def __init__(
        self,
        scheduler: str,
        info: engine_pb2.WorkerInfo,
        report: Callable[[engine_pb2.WorkerState], engine_pb2.Report],
    ) -> None:
        """`report` makes a report for a state."""
        self.state: engine_pb2.WorkerState = engine_pb2.WORKER_STATE_READY
        self.wants_to_leave = asyncio.Event()
        """Set when the scheduler asks for it or `drain` was called."""
        self.is_attached = False
        self._scheduler = scheduler
        self._info = info
        self._report = report
        self._changed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.state == engine_pb2.WORKER_STATE_DRAINING

    def drain(self) -> None:
        """Take nothing new; tell the scheduler at once."""
        self.state = engine_pb2.WORKER_STATE_DRAINING
        self._changed.set()
        self.wants_to_leave.set()

    def tell(self) -> None:
        """Report at once, not when it is due."""
        self._changed.set()

    async def keep(self) -> None:
        """Stay attached for ever, whatever the scheduler does."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            was_attached = False
            try:
                await self._attend()
                why = "the scheduler ended the stream"
            except grpc.aio.AioRpcError as error:
                why = str(rpc.from_rpc_error(error))
            except TimeoutError:
                why = "no answer to the registration"
            finally:
                was_attached, self.is_attached = self.is_attached, False
            if was_attached:
                backoff_s = _FIRST_BACKOFF_S
            log.warning(
                "not attached", extra={"scheduler": self._scheduler, "why": why, "retry": backoff_s}
            )
            # Spread out, so that the workers of a returning scheduler do not all call at once.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)

    async def _attend(self) -> None:
        """One registration, from the first message to the end of the stream."""
        async with rpc.connect(self._scheduler) as channel:
            call = engine_pb2_grpc.RegistryServiceStub(channel).Attach()
            try:
                await call.write(engine_pb2.AttachRequest(register=self._info))
                async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                    lease_s = await self._accepted(call)
                self.is_attached = True
                log.info("attached", extra={"scheduler": self._scheduler, "lease_s": lease_s})
                reporter = asyncio.create_task(self._report_on(call, lease_s), name="reports")
                try:
                    await self._listen(call)
                finally:
                    reporter.cancel()
                    with contextlib.suppress(
                        asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError
                    ):
                        await reporter
            finally:
                call.cancel()

    async def _accepted(self, call: AsyncIterable[engine_pb2.AttachResponse]) -> float:
        async for response in call:
            kind = response.WhichOneof("kind")
            if kind == "accepted":
                return response.accepted.lease_ms / 1000
            if kind == "drain":
                self.drain()
        raise TimeoutError

    async def _listen(self, call: AsyncIterable[engine_pb2.AttachResponse]) -> None:
        async for response in call:
            if response.WhichOneof("kind") == "drain":
                log.info("the scheduler asks to leave")
                self.drain()

    async def _report_on(
        self,
        call: grpc.aio.StreamStreamCall[engine_pb2.AttachRequest, engine_pb2.AttachResponse],
        lease_s: float,
    ) -> None:
        every_s = max(_LEAST_REPORT_S, lease_s / 3)
        while True:
            self._changed.clear()
            await call.write(engine_pb2.AttachRequest(report=self._report(self.state)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._changed.wait()
