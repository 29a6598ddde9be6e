"""Embeddings by an encoder: passes on threads, each for all open requests together.

Each thread computes a pass of its own. Threads that share one wait for each other at every product: on busy
processors that was measured to take five times as long. A pass is the unit of progress: reports count them, and
a request that was given up is in none that begins later. Who is in a pass is decided by
`engine.core.passes`. Knows nothing of gRPC or text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from candor import errors
from engine.backends import Description, Load, Progress
from engine.core.passes import Job, Passes, Pick, TextLimits, check_inputs
from engine.core.rates import Rates
from engine.core.types import EngineLoad, StepStats, Totals

log = logging.getLogger("engine.embedding")


class Encoder(Protocol):
    """What turns token ids into vectors. Several threads call it at the same time."""

    name: str
    embedding_size: int
    vocab_size: int
    max_model_len: int

    def embed(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Vectors [len(sequences), embedding_size]."""
        ...


class EmbeddingBackend:
    """Runs an encoder for several callers. Made on the event loop, where all of its state lives."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        slots: int,
        token_budget: int,
        threads: int,
        limits: TextLimits,
        max_requests: int,
        max_tokens: int,
        on_death: Callable[[], None],
    ) -> None:
        """`slots`: what the scheduler may place here at a time. `token_budget`: most tokens of a pass.

        `threads`: passes at the same time. `max_requests` and `max_tokens`: open at a time; more are refused.
        `on_death`: no pass will follow.
        """
        self.description = Description(
            backend="embedding",
            runner=encoder.name,
            slots=slots,
            kv_tokens=0,
            max_model_len=limits.max_input_tokens,
            vocab_size=limits.vocab_size,
            is_batch_invariant=False,
        )
        self._encoder = encoder
        self._limits = limits
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._on_death = on_death
        self._passes = Passes(token_budget)
        self._waiting: dict[Job, asyncio.Future[None]] = {}
        self._has_work, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._step_seq, self._step_unix_ms = 0, round(time.time() * 1000)
        self._totals, self._rates = Totals(), Rates()
        self._num_passes = 0
        """Being computed now."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encoder")
        self._loop = asyncio.get_running_loop()
        self._workers = [self._loop.create_task(self._work()) for _ in range(threads)]

    async def embed(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Vectors in the order of the inputs. Cancelled, it is in no further pass.

        Raises InvalidArgument for inputs that cannot be, ResourceExhausted when too much waits already.
        """
        check_inputs(inputs, self._limits)
        size = self._encoder.embedding_size
        job = Job(inputs, np.empty((len(inputs), size), np.float32))
        self._check_room(job)
        self._passes.add(job)
        self._waiting[job] = self._loop.create_future()
        self._has_work.set()
        self._is_idle.clear()
        try:
            await self._waiting[job]
            return job.vectors
        finally:
            del self._waiting[job]
            self._passes.drop(job)
            if not self._waiting:
                self._is_idle.set()

    def _check_room(self, job: Job) -> None:
        requests, tokens = self._passes.num_open, self._passes.num_tokens + job.num_tokens
        if requests >= self._max_requests:
            full = f"has {requests} requests and takes no more than {self._max_requests}"
        # One request may be larger than the bound: alone it is let in.
        elif requests and tokens > self._max_tokens:
            full = f"would hold {tokens} tokens and takes no more than {self._max_tokens}"
        else:
            return
        raise errors.ResourceExhausted(f"this worker {full}", retry_after_s=1.0)

    async def _work(self) -> None:
        try:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                while picks := self._passes.plan():
                    await self._pass(picks)
        except Exception:
            log.exception("the embedding loop died")
            for waiting in self._waiting.values():
                _fail(waiting, errors.Internal("the worker's loop died"))
            self._on_death()

    async def _pass(self, picks: Sequence[Pick]) -> None:
        sequences = [job.inputs[index] for job, index in picks]
        began = time.monotonic()
        self._num_passes += 1
        share = self._num_passes
        try:
            vectors = await self._loop.run_in_executor(
                self._threads, self._encoder.embed, sequences
            )
        except Exception:
            # A fault of ours, and of these requests only: the encoder keeps nothing between passes.
            log.exception("a pass failed")
            for job in {job for job, _ in picks}:
                self._passes.drop(job)
                if (waiting := self._waiting.get(job)) is not None:
                    _fail(waiting, errors.Internal("a pass failed"))
            return
        finally:
            self._num_passes -= 1
        # Passes beside it had their part of the time.
        self._count(sum(map(len, sequences)), (time.monotonic() - began) / share)
        for job in self._passes.deliver(picks, vectors):
            waiting = self._waiting.get(job)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _count(self, num_tokens: int, took_s: float) -> None:
        self._step_seq += 1
        self._step_unix_ms = round(time.time() * 1000)
        self._totals.prompt_tokens += num_tokens
        self._rates.add(
            StepStats(step_seq=self._step_seq, num_prefill_tokens=num_tokens, forward_s=took_s)
        )

    def progress(self) -> Progress:
        """How it is doing now."""
        num_open = self._passes.num_open
        running = min(num_open, self.description.slots)
        load = EngineLoad(num_running=running, num_waiting=num_open - running, totals=self._totals)
        return Progress(
            step_seq=self._step_seq,
            step_unix_ms=self._step_unix_ms,
            is_idle=not num_open,
            load=Load(load, self._rates.prefill, None),
        )

    async def wait_idle(self) -> None:
        """Return once no request is open."""
        await self._is_idle.wait()

    def close(self) -> bool:
        """Stop for good, after the passes that are being computed."""
        for worker in self._workers:
            self._loop.call_soon_threadsafe(worker.cancel)
        self._threads.shutdown(cancel_futures=True)
        return True


def _fail(waiting: asyncio.Future[None], error: errors.CandorError) -> None:
    if not waiting.done():
        waiting.set_exception(error)
