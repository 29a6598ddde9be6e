"""Who holds how many KV positions, exactly: the books that every runner keeps about its store.

Knows rows, lengths and shared prefixes; knows nothing about models or where the numbers lie. Rows form a
tree of spans. A span is a run of positions that the same rows share, so its positions count once, and every
operation costs one visit per span, not per token:

    row 0 ──┐
            ├── [400 positions] ── root        row 0 and row 1 share 400, row 1 has 12 of its own
    row 1 ── [12 positions] ┘                  used = 412
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.runners import KvExhausted, StepInput


class Run(NamedTuple):
    """A row's neighbouring tokens in a flat batch: `size` of them from batch index `start`."""

    row: int
    start: int
    size: int
    position: int
    """Position of the first one, which is the row's length before the step."""


@dataclass(slots=True)
class _Span:
    parent: _Span | None
    length: int
    refs: int
    """Rows that end here plus spans that continue here."""


class KvBooks:
    """Lengths of all rows and the number of positions in use. Every misuse is a ValueError."""

    def __init__(self, max_rows: int, kv_tokens: int, max_model_len: int) -> None:
        for name, value in (
            ("max_rows", max_rows),
            ("kv_tokens", kv_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} is below 1")
        self.kv_tokens = kv_tokens
        self.used = 0
        """KV positions in use; a shared prefix counts once."""
        self.lengths = [0] * max_rows
        """Positions of each row, shared ones included."""
        self._max_model_len = max_model_len
        self._tails: list[_Span | None] = [None] * max_rows

    def check(self, step: StepInput, vocab_size: int, max_batch_tokens: int) -> list[Run]:
        """The step's runs, in batch order. Raises KvExhausted or ValueError; changes nothing."""
        total = len(step.token_ids)
        if not total or not total == len(step.positions) == len(step.rows) == len(
            step.wants_logits
        ):
            raise ValueError("a step has at least one token and four arrays of one length")
        if total > max_batch_tokens:
            raise ValueError(f"{total} tokens in a step, at most {max_batch_tokens}")
        if int(step.token_ids.min()) < 0 or int(step.token_ids.max()) >= vocab_size:
            raise ValueError(f"token ids must be between 0 and {vocab_size - 1}")
        runs = self._runs(step.rows.tolist(), step.positions.tolist())
        if self.used + total > self.kv_tokens:
            raise KvExhausted(f"{total} positions wanted, {self.kv_tokens - self.used} free")
        return runs

    def _runs(self, rows: Sequence[int], positions: Sequence[int]) -> list[Run]:
        runs: list[Run] = []
        seen: set[int] = set()
        start = 0
        for i, row in enumerate(rows):
            if i == 0 or row != rows[i - 1]:
                start = i
                if not 0 <= row < len(self.lengths) or row in seen:
                    raise ValueError(f"row {row} is out of range or not contiguous in the batch")
                seen.add(row)
                runs.append(Run(row, i, 1, self.lengths[row]))
            else:
                runs[-1] = runs[-1]._replace(size=i - start + 1)
            if positions[i] != self.lengths[row] + i - start:
                raise ValueError(
                    f"row {row} has {self.lengths[row]} tokens; position {positions[i]} does not follow"
                )
        for run in runs:
            if run.position + run.size > self._max_model_len:
                raise ValueError(
                    f"row {run.row} would have {run.position + run.size} tokens, "
                    f"at most {self._max_model_len}"
                )
        return runs

    def append(self, runs: Sequence[Run]) -> None:
        """Book a step that was computed."""
        for run in runs:
            tail = self._tails[run.row]
            if tail is None or tail.refs > 1:
                # The row's claim on the shared span passes to its own new one, so refs stay.
                tail = self._tails[run.row] = _Span(tail, 0, 1)
            tail.length += run.size
            self.lengths[run.row] += run.size
            self.used += run.size

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Let the empty row `target` share the first `num_tokens` positions of `source`."""
        self._check_row(source)
        self._check_row(target)
        if self.lengths[target]:
            raise ValueError(f"row {target} is not empty: it has {self.lengths[target]} tokens")
        if not 0 <= num_tokens <= self.lengths[source]:
            raise ValueError(f"row {source} has {self.lengths[source]} tokens, not {num_tokens}")
        if num_tokens == 0:
            return
        shared = self._span_ending_at(source, num_tokens)
        shared.refs += 1
        self._tails[target] = shared
        self.lengths[target] = num_tokens

    def trim(self, row: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` positions of `row`."""
        self._check_row(row)
        if not 0 <= num_tokens <= self.lengths[row]:
            raise ValueError(f"row {row} has {self.lengths[row]} tokens, not {num_tokens}")
        keep = self._span_ending_at(row, num_tokens) if num_tokens else None
        if keep is not None:
            keep.refs += 1
        span = self._tails[row]
        self._tails[row] = keep
        self.lengths[row] = num_tokens
        while span is not None:
            span.refs -= 1
            if span.refs:
                break
            self.used -= span.length
            span = span.parent

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.lengths):
            raise ValueError(f"row {row} is not one of the {len(self.lengths)} rows")

    def _span_ending_at(self, row: int, num_tokens: int) -> _Span:
        """The span whose last position is `num_tokens` - 1, cut out of a longer one if need be."""
        span, end = self._tails[row], self.lengths[row]
        while True:
            assert span is not None
            start = end - span.length
            if num_tokens > start:
                break
            span, end = span.parent, start
        if num_tokens == end:
            return span
        upper = _Span(span.parent, num_tokens - start, 1)
        span.parent, span.length = upper, end - num_tokens
        return upper


def wanted(step: StepInput) -> int:
    """Rows of logits that a step asks for."""
    return int(np.count_nonzero(step.wants_logits))
