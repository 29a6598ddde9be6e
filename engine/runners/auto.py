"""Chooses a runner for a model on this machine: by what each can load, then by the clock.

Knows nothing of how they compute. Processors differ too much to assume anything: few-row products of float32
weights beat quantised kernels on one and lose on another.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.runners import Runner, StepInput

log = logging.getLogger("engine.runners.auto")

PROMPT_TOKENS, TIMED_STEPS = 16, 6
MARGIN = 1.3
"""How much slower the native runner may be and still be taken: its answers do not depend on the batch, and a
noisy moment must not change which runner, and so which answers, the next start gives."""
MEMORY_SHARE = 0.5
"""Most of the free memory that float32 weights may take."""
FLOAT32_PER_FILE_BYTE = 8.0
"""A 4-bit file grows about eightfold as float32, the worst case."""


def choose(
    model_path: str, slots: int, load: Callable[[str], Runner], *, batch_invariant: bool = False
) -> Runner:
    """The loaded runner that decodes `slots` rows fastest, or the native one within MARGIN of it.

    `load` opens one by name. Only models of a family that the native runner knows, and small enough for it,
    are timed: the others get llamacpp. With `batch_invariant` it is native or none. Raises ValueError when
    not even llamacpp takes the file.
    """
    if batch_invariant:
        return _picked(load("native"), "numbers that do not depend on the batch are asked for")
    needed = _size(Path(model_path)) * FLOAT32_PER_FILE_BYTE
    if needed > MEMORY_SHARE * _free_memory():
        return _picked(load("llamacpp"), f"float32 weights would take {needed / 1e9:.1f} GB")
    try:
        native = load("native")
    except ValueError as reason:
        return _picked(load("llamacpp"), str(reason))
    try:
        other = load("llamacpp")
    except ValueError as reason:
        return _picked(native, str(reason))
    times = {runner.name: _step_s(runner, slots) for runner in (native, other)}
    is_native = times["native"] <= MARGIN * times["llamacpp"]
    fastest, slowest = (native, other) if is_native else (other, native)
    slowest.close()
    shown = ", ".join(f"{name} {slots / s:.0f} tokens/s" for name, s in times.items())
    return _picked(fastest, f"{slots} rows: {shown}")


def _picked(runner: Runner, reason: str) -> Runner:
    log.info("runner %s picked: %s", runner.name, reason)
    return runner


def _step_s(runner: Runner, slots: int) -> float:
    """Median seconds of one decode step with every slot busy."""
    rows = np.arange(min(slots, runner.max_rows), dtype=np.int32)
    ids = np.arange(PROMPT_TOKENS, dtype=np.int32) % runner.vocab_size
    places = np.arange(PROMPT_TOKENS, dtype=np.int32)
    last = places == PROMPT_TOKENS - 1
    for row in range(len(rows)):
        runner.forward(StepInput(ids, places, np.full(PROMPT_TOKENS, row, np.int32), last))
    ones, everything = np.zeros(len(rows), np.int32), np.ones(len(rows), np.bool_)
    times = []
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + TIMED_STEPS):
        began = time.perf_counter()
        at = np.full(len(rows), position, np.int32)
        runner.forward(StepInput(ones, at, rows, everything))
        times.append(time.perf_counter() - began)
    for row in range(len(rows)):
        runner.trim(row, 0)
    return float(np.median(times))


def _size(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
