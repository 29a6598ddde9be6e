"""What the long proofs share: their sizes, engines over real vocabularies, and runners made smaller.

`PROOF=full` in the environment runs them at the size that was promised; without it they stay short enough for
every run of the suite.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.speculation import Speculator, StepCosts
from engine.core.types import Request
from engine.runners import Runner, StepInput, open_runner
from tests.fakes.engine import Outcome, Ticks, drive
from tokenizer_svc.codec import Codec

FREE = StepCosts([(1, 1.0), (64, 1.0)])
"""Costs at which every draft pays, so that drafts are verified all the time."""


def size(bounded: int, full: int) -> int:
    """How often something is done."""
    return full if os.environ.get("PROOF") == "full" else bounded


def synthetic(model_path: Path, *, kv_tokens: int = 8192, max_model_len: int = 1024) -> Runner:
    """The runner without a model, over the default model's vocabulary."""
    return open_runner(
        "synthetic",
        str(model_path),
        max_rows=16,
        kv_tokens=kv_tokens,
        max_batch_tokens=256,
        max_model_len=max_model_len,
        threads=1,
    )


class Smaller:
    """A runner that admits to fewer KV positions than it has."""

    def __init__(self, runner: Runner, kv_tokens: int, max_model_len: int) -> None:
        self._runner = runner
        self.name = runner.name
        self.vocab_size = runner.vocab_size
        self.max_rows = runner.max_rows
        self.max_batch_tokens = runner.max_batch_tokens
        self.is_batch_invariant = runner.is_batch_invariant
        self.kv_tokens = kv_tokens
        self.max_model_len = max_model_len
        self.copy, self.trim, self.close = runner.copy, runner.trim, runner.close

    def forward(self, step: StepInput) -> NDArray[np.float32]:
        """See the protocol."""
        return self._runner.forward(step)


def new_engine(runner: Runner, codec: Codec, *, slots: int = 8, speculates: bool = True) -> Engine:
    """An engine that finds the runner empty, whatever another one left in it."""
    for row in range(runner.max_rows):
        runner.trim(row, 0)
    return Engine(
        runner,
        codec,
        slots=slots,
        token_budget=128,
        mixed_budget=64,
        clock=Ticks(),
        speculator=Speculator(FREE) if speculates else None,
    )


def serve(engine: Engine, grammars: Grammars, requests: Sequence[Request]) -> dict[int, Outcome]:
    """All of them at once, to their ends."""
    for request in requests:
        matcher = grammars.compile(request.constraint) if request.constraint else None
        engine.submit(request, matcher)
    return drive(engine, max_steps=100_000)
