"""How fast the backlog drains, measured on the requests that left. Knows no queue and no clock."""

from __future__ import annotations

_WEIGHT = 0.05
"""Of the newest request in the running means: about the last forty count."""


class DrainRate:
    """Of one model: the mean seat-seconds and prompt tokens of a request.

    By Little's law S seats release S / (seat-seconds per request) requests a second. Measured per seat, the
    estimate holds at once when a worker comes or goes, and an idle hour does not spoil it.
    """

    def __init__(self) -> None:
        self._seat_s: float | None = None
        self._tokens = 0.0
        self._start_s: float | None = None
        self._start_spread_s = 0.0

    def started(self, seconds: float) -> None:
        """A request that was placed on a full worker has shown its first token after so long."""
        if self._start_s is None:
            self._start_s = seconds
        else:
            error = seconds - self._start_s
            self._start_s += _WEIGHT * error
            self._start_spread_s += _WEIGHT * (abs(error) - self._start_spread_s)

    @property
    def start_s(self) -> float:
        """Time from a place on a full worker to the first token that nearly all keep; 0 while not measured."""
        return 0.0 if self._start_s is None else self._start_s + 2 * self._start_spread_s

    def left(self, seat_s: float, num_prompt_tokens: int) -> None:
        """A request has freed its seats after that many seat-seconds."""
        if self._seat_s is None:
            self._seat_s, self._tokens = seat_s, float(num_prompt_tokens)
        else:
            self._seat_s += _WEIGHT * (seat_s - self._seat_s)
            self._tokens += _WEIGHT * (num_prompt_tokens - self._tokens)

    @property
    def seat_s(self) -> float | None:
        """Mean seat-seconds of a request; None before anything was measured."""
        return self._seat_s

    def requests_per_s(self, num_seats: int) -> float | None:
        """Requests that `num_seats` busy seats finish in a second."""
        if self._seat_s is None or num_seats == 0:
            return None
        return num_seats / max(self._seat_s, 1e-6)

    def tokens_per_s(self, num_seats: int) -> float | None:
        """Prompt tokens of those requests."""
        rate = self.requests_per_s(num_seats)
        return None if rate is None else rate * self._tokens
