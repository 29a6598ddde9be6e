"""The runners alone, in this process: tokens per second, and how near the machine's own limits they come.

A step reads every weight once and multiplies it with each row. It cannot be faster than its weight bytes over
the memory's bandwidth, nor than its multiply-adds over the processor's float32 rate; both are measured here,
in the same call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.runners import Runner, StepInput, open_runner

ROUNDS, STEPS = 6, 6


def measure(path: Path, threads: int, console: Console) -> None:
    """Print one table: rows at a time, each runner's speed, and the native one's share of the limit."""
    runners = {
        name: open_runner(
            name,
            str(path),
            max_rows=32,
            kv_tokens=4096,
            max_batch_tokens=512,
            max_model_len=1024,
            threads=threads,
        )
        for name in ("native", "llamacpp")
    }
    bandwidth, rate = _bandwidth(), _float32_rate()
    native = runners["native"]
    weights, multiplies = _size(native)
    console.print(
        f"memory read {bandwidth / 1e9:.1f} GB/s, float32 products {rate / 1e9:.0f} GFLOP/s;"
        f" native weights {weights / 1e6:.0f} MB, {multiplies / 1e6:.0f} M multiply-adds a token",
        highlight=False,
    )
    table = Table("rows", "native tokens/s", "llamacpp tokens/s", "ratio", "native, of the limit")
    for rows in (1, 2, 4, 8, 16):
        best = _best(runners, partial(_decode, rows=rows))
        limit = max(weights / bandwidth, 2 * multiplies * rows / rate)
        table.add_row(
            str(rows),
            f"{rows / best['native']:.0f}",
            f"{rows / best['llamacpp']:.0f}",
            f"{best['llamacpp'] / best['native']:.2f}",
            f"{limit / best['native']:.0%}",
        )
    for tokens in (128, 512):
        best = _best(runners, partial(_prefill, tokens=tokens))
        limit = max(weights / bandwidth, 2 * multiplies * tokens / rate)
        table.add_row(
            f"prefill {tokens}",
            f"{tokens / best['native']:.0f}",
            f"{tokens / best['llamacpp']:.0f}",
            f"{best['llamacpp'] / best['native']:.2f}",
            f"{limit / best['native']:.0%}",
        )
    console.print(table)
    for runner in runners.values():
        runner.close()


def _best(runners: dict[str, Runner], once: Callable[[Runner], float]) -> dict[str, float]:
    """The fastest of several turns, the runners taking turns so that noise meets both."""
    best = dict.fromkeys(runners, float("inf"))
    for _ in range(ROUNDS):
        for name, runner in runners.items():
            best[name] = min(best[name], once(runner))
    return best


def _decode(runner: Runner, rows: int) -> float:
    """Seconds of the fastest of a few decode steps with `rows` rows."""
    every = np.arange(rows, dtype=np.int32)
    ids, wants, best = np.full(rows, 100, np.int32), np.ones(rows, np.bool_), float("inf")
    for position in range(STEPS):
        began = time.perf_counter()
        runner.forward(StepInput(ids, np.full(rows, position, np.int32), every, wants))
        best = min(best, time.perf_counter() - began)
    for row in range(rows):
        runner.trim(row, 0)
    return best


def _prefill(runner: Runner, tokens: int) -> float:
    ids = np.random.default_rng(1).integers(100, 1000, tokens).astype(np.int32)
    places = np.arange(tokens, dtype=np.int32)
    began = time.perf_counter()
    runner.forward(StepInput(ids, places, np.zeros(tokens, np.int32), places == tokens - 1))
    took = time.perf_counter() - began
    runner.trim(0, 0)
    return took


def _size(runner: Runner) -> tuple[int, int]:
    """Bytes of the native runner's weights, and multiply-adds of one token."""
    packed = runner._weights  # type: ignore[attr-defined]
    arrays = [packed.qkv, packed.out, packed.gate_up, packed.down, packed.head]
    weights = sum(int(array.nbytes) for array in arrays)
    # A level is a byte with 1/8 byte of scales; a half float is two bytes.
    is_byte = packed.down.shape[-1] != 2 * packed.ffn * _columns()
    return weights, round(weights / (1.125 if is_byte else 2))


def _columns() -> int:
    from engine.runners.kernels import NB

    return NB


def _bandwidth() -> float:
    """Bytes per second that all threads together read from memory."""
    from numba import njit, prange

    @njit(parallel=True, fastmath=True)
    def total(a):  # type: ignore[no-untyped-def]
        s = np.float32(0)
        for i in prange(a.size):
            s += a[i]
        return s

    a = np.ones(64_000_000, np.float32)
    total(a)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        total(a)
        best = min(best, time.perf_counter() - began)
    return float(a.nbytes / best)


def _float32_rate() -> float:
    """Floating point operations per second of a large product."""
    a = np.ones((1536, 1536), np.float32)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return float(2 * 1536**3 / best)
