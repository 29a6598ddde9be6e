"""How fast the backlog drains, measured on the requests that left. Knows no queue and no clock."""

from __future__ import annotations

_WEIGHT = 0.1
"""Of the newest request in the running means: about the last twenty count."""


class DrainRate:
    """Of one model: the mean seat-seconds and prompt tokens of a request.

    By Little's law S seats release S / (seat-seconds per request) requests a second. Measured per seat, the
    estimate holds at once when a worker comes or goes, and an idle hour does not spoil it.
    """

    def __init__(self) -> None:
        self._seat_s: float | None = None
        self._tokens = 0.0

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
