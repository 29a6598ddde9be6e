"""How fast the engine prefills and decodes, as running averages over busy time."""

from __future__ import annotations

import math

from engine.core.types import StepStats

_MEMORY_S = 5.0
"""Busy seconds after which a measurement weighs a third of what it did."""


class Rates:
    """Tokens per second; None before anything was measured."""

    def __init__(self) -> None:
        self.prefill: float | None = None
        self.decode: float | None = None

    def add(self, stats: StepStats) -> None:
        """Take a step into account. The time of a mixed step is divided by tokens."""
        prefill = stats.num_prefill_tokens
        decode = stats.num_decode_tokens + stats.num_accepted_tokens
        if prefill + decode == 0 or stats.total_s <= 0:
            return
        rate = (prefill + decode) / stats.total_s
        if prefill:
            share = prefill / (prefill + decode)
            self.prefill = _blend(self.prefill, rate, stats.total_s * share)
        if decode:
            # What decodes together counts together: the rate is that of the whole batch.
            share = decode / (prefill + decode)
            self.decode = _blend(self.decode, rate, stats.total_s * share)


def _blend(old: float | None, new: float, busy_s: float) -> float:
    if old is None:
        return new
    keep = math.exp(-busy_s / _MEMORY_S)
    return keep * old + (1 - keep) * new
