"""How long until: the times that admission, Retry-After and the news for those that wait are made of.

All from what was measured; None, or the least harmful guess, before that.
"""

from __future__ import annotations

from scheduler.core.pool import Pool
from scheduler.core.rates import DrainRate

_REFILL = 0.1
"""Part of the queue that should have drained before a refused client comes back."""
_LONGEST_RETRY_S = 60.0


class Estimates:
    """The drain rates of all models, and what follows from them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._rates: dict[str, DrainRate] = {}

    def left(self, model: str, seat_s: float, num_prompt_tokens: int) -> None:
        """A request has freed its seats after that many seat-seconds."""
        self._rate(model).left(seat_s, num_prompt_tokens)

    def started(self, model: str, seconds: float) -> None:
        """A request that was placed on a full worker has shown its first token after so long."""
        self._rate(model).started(seconds)

    def start_s(self, model: str) -> float:
        """From a place on a full worker to the first token: its wait inside the worker and its prompt."""
        return self._rate(model).start_s

    def forget(self, model: str) -> None:
        """Nobody serves the model or waits for it."""
        self._rates.pop(model, None)

    def seat_s(self, model: str) -> float | None:
        """Mean seat-seconds of a request."""
        return self._rate(model).seat_s

    def eta_s(self, model: str, position: int) -> float | None:
        """Until the one at that position is placed."""
        rate = self._rate(model).requests_per_s(self._pool.serving(model).num_seats)
        return None if rate is None else position / rate

    def retry_after_s(self, model: str, num_queued: int) -> float:
        """Until a part of the queue has drained, so that not all the refused come for one place."""
        rate = self._rate(model).requests_per_s(self._pool.serving(model).num_seats)
        if rate is None:
            return 1.0
        return min(max(1.0, _REFILL * num_queued) / rate, _LONGEST_RETRY_S)

    def _rate(self, model: str) -> DrainRate:
        return self._rates.setdefault(model, DrainRate())
