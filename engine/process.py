"""What every worker process does around its backend: the door, the registration, the way out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from abc import ABC, abstractmethod
from typing import Protocol

from candor import rpc
from candor.v1 import engine_pb2, engine_pb2_grpc, inference_pb2
from engine import translate
from engine.backends import Description, Progress
from engine.config import Config
from engine.worker import Membership
from tokenizer_svc.codec import Codec

SERVICES = ("candor.v1.EngineService",)
API_MAJOR, API_MINOR = 1, 0
_FAREWELL_S = 1.0
"""For streams to carry their last events once everything has ended."""


class Working(Protocol):
    """The side of a backend that a process looks after."""

    description: Description

    def progress(self) -> Progress:
        """How it is doing now."""
        ...

    async def wait_idle(self) -> None:
        """Return once no request is open."""
        ...

    def close(self) -> bool:
        """Stop for good. False when a pass does not come back."""
        ...


class WorkerProcess(ABC):
    """A worker with its door open; tests run it in their own process. Made on the event loop."""

    def __init__(self, config: Config, codec: Codec) -> None:
        self._config = config
        self._codec = codec
        self.died = asyncio.Event()
        """Set when the backend cannot go on."""
        self._working = self._open_backend()
        self._info = self._describe(config.address)
        self.membership = Membership(config.scheduler, self._info, self._report)
        self._server = rpc.Server(SERVICES)
        self._attached: asyncio.Task[None] | None = None
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self._service(), self._server.grpc)

    @abstractmethod
    def _open_backend(self) -> Working:
        """The backend; called once."""

    @abstractmethod
    def _service(self) -> engine_pb2_grpc.EngineServiceServicer:
        """The door's handlers, on top of the backend."""

    @abstractmethod
    def _model(self) -> inference_pb2.ModelInfo:
        """Kind, limits and features of the model; name, aliases and fingerprint are filled in."""

    @abstractmethod
    def _features(self) -> tuple[engine_pb2.EngineFeature, ...]:
        """What the worker can do beyond the plain."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the backend worked with, once it has stopped."""

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
                await self._working.wait_idle()
        if self._attached is not None:
            self._attached.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._attached
        await self._server.stop(_FAREWELL_S)
        if await asyncio.to_thread(self._working.close):
            self._release()

    def _die(self) -> None:
        self.died.set()

    def _describe(self, address: str) -> engine_pb2.WorkerInfo:
        config, description, model = self._config, self._working.description, self._model()
        model.name = config.name
        model.aliases[:] = config.served_aliases
        model.tokenizer_fingerprint = self._codec.fingerprint
        model.max_model_len = description.max_model_len
        model.vocab_size = description.vocab_size
        return engine_pb2.WorkerInfo(
            worker_id=config.seat,
            instance_id=uuid.uuid4().hex,
            address=address,
            pid=os.getpid(),
            card=config.card,
            model=model,
            slots=description.slots,
            kv_tokens=description.kv_tokens,
            backend=description.backend,
            runner=description.runner,
            api_major=API_MAJOR,
            api_minor=API_MINOR,
            features=self._features(),
        )

    def _report(self, state: engine_pb2.WorkerState) -> engine_pb2.Report:
        return translate.report_to_pb(self._working.progress(), state)
