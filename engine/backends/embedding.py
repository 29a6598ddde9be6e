"""Embeddings on a thread: one batch of sequences after another through an encoder.

A batch is the unit of progress; between batches a request that was given up is dropped. Knows nothing of
gRPC or text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from candor import errors
from engine.backends import Description, Load, Progress
from engine.core.rates import Rates
from engine.core.types import EngineLoad, StepStats, Totals

BATCH_SEQUENCES = 32
"""Sequences of one pass; a long request is cut so that it can be given up between passes."""
_LAST_PASS_S = 10.0


class Encoder(Protocol):
    """What turns token ids into vectors."""

    name: str
    embedding_size: int
    vocab_size: int
    max_model_len: int

    def embed(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Vectors [len(sequences), embedding_size]."""
        ...


class EmbeddingBackend:
    """Runs an encoder for several callers, one pass at a time, in the order they came."""

    def __init__(self, encoder: Encoder, *, slots: int, max_requests: int) -> None:
        """`slots`: what the scheduler may place here at a time. `max_requests`: open ones, at most."""
        self.description = Description(
            backend="embedding",
            runner=encoder.name,
            slots=slots,
            kv_tokens=encoder.max_model_len * slots,
            max_model_len=encoder.max_model_len,
            vocab_size=encoder.vocab_size,
            is_batch_invariant=False,
        )
        self._encoder = encoder
        self._max_requests = max_requests
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._turn = asyncio.Lock()
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._step_seq, self._step_unix_ms = 0, round(time.time() * 1000)
        self._totals, self._rates = Totals(), Rates()

    async def embed(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Vectors in order. Raises ResourceExhausted when too many wait, InvalidArgument for bad ids."""
        self._check(sequences)
        if self._num_open >= self._max_requests:
            raise errors.ResourceExhausted(
                f"this worker has {self._num_open} requests and takes no more than"
                f" {self._max_requests}",
                retry_after_s=1.0,
            )
        self._num_open += 1
        self._is_idle.clear()
        try:
            parts = []
            for start in range(0, len(sequences), BATCH_SEQUENCES):
                async with self._turn:
                    parts.append(await self._pass(sequences[start : start + BATCH_SEQUENCES]))
            return np.concatenate(parts)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_idle.set()

    async def _pass(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        # Shielded: a caller that gives up must not let the next one in beside a pass that still runs.
        running = loop.run_in_executor(self._thread, self._encoder.embed, sequences)
        try:
            vectors = await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
        tokens = sum(map(len, sequences))
        self._step_seq += 1
        self._step_unix_ms = round(time.time() * 1000)
        self._totals.prompt_tokens += tokens
        self._rates.add(
            StepStats(
                step_seq=self._step_seq,
                num_prefill_tokens=tokens,
                forward_s=time.monotonic() - began,
            )
        )
        return vectors

    def _check(self, sequences: Sequence[Sequence[int]]) -> None:
        limit, vocab = self._encoder.max_model_len, self._encoder.vocab_size
        if not sequences:
            raise errors.InvalidArgument("there is nothing to embed", field="inputs")
        for index, ids in enumerate(sequences):
            where = f"inputs[{index}]"
            if not ids:
                raise errors.InvalidArgument(f"{where} has no tokens", field=where)
            if len(ids) > limit:
                raise errors.InvalidArgument(
                    f"{where} has {len(ids)} tokens, the model takes {limit}", field=where
                )
            if max(ids) >= vocab:
                raise errors.InvalidArgument(
                    f"{where} has token {max(ids)}, the vocabulary has {vocab}", field=where
                )

    def progress(self) -> Progress:
        """How it is doing now."""
        running = min(self._num_open, self.description.slots)
        load = EngineLoad(
            num_running=running,
            num_waiting=self._num_open - running,
            kv_total_tokens=self.description.kv_tokens,
            totals=self._totals,
        )
        return Progress(
            step_seq=self._step_seq,
            step_unix_ms=self._step_unix_ms,
            is_idle=not self._num_open,
            load=Load(load, self._rates.prefill, None),
        )

    async def wait_idle(self) -> None:
        """Return once no request is open."""
        await self._is_idle.wait()

    def close(self) -> bool:
        """Stop for good, after the pass that is being computed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        return True
