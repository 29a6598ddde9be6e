"""What a forward pass of a loaded runner costs by its number of tokens, by the clock."""

from __future__ import annotations

import time

import numpy as np

from engine.runners import Runner, StepInput

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT_TOKENS = 16
ROUNDS = 3


def pass_times(runner: Runner) -> list[tuple[int, float]]:
    """(tokens, median seconds) for small passes, in a row of the empty runner that is empty again afterwards.

    None at all where the context and one more token do not fit.
    """
    room = min(runner.max_batch_tokens, runner.max_model_len, runner.kv_tokens) - CONTEXT_TOKENS
    sizes = [size for size in SIZES if size <= room]
    if not sizes:
        return []
    _pass(runner, 0, CONTEXT_TOKENS)
    found = [
        (size, float(np.median([_timed(runner, size) for _ in range(ROUNDS)]))) for size in sizes
    ]
    runner.trim(0, 0)
    return found


def _timed(runner: Runner, size: int) -> float:
    began = time.perf_counter()
    _pass(runner, CONTEXT_TOKENS, size)
    spent = time.perf_counter() - began
    runner.trim(0, CONTEXT_TOKENS)
    return spent


def _pass(runner: Runner, start: int, size: int) -> None:
    index = np.arange(size, dtype=np.int32)
    zero = np.zeros(size, np.int32)
    every = np.ones(size, np.bool_)
    runner.forward(StepInput(index % np.int32(runner.vocab_size), start + index, zero, every))
