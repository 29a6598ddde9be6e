"""Which tokens' keys and values exist in which row of the runner, and who may have them.

The interface; `slots` is the implementation for runners with rows of their own (llama.cpp's shape). Books
are exact: free + used + cached = total, where a prefix that several rows share counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class RowStore(Protocol):
    """The part of a runner that moves KV about."""

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Make the empty row `target` start with the first `num_tokens` of `source`."""
        ...

    def trim(self, row: int, num_tokens: int) -> None:
        """Forget everything of `row` behind its first `num_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class Seat:
    """A row that a sequence has, and how many of its tokens are there already."""

    row: int
    num_cached: int


class Kv(Protocol):
    """What the batcher needs of a KV store."""

    num_total: int

    def match(self, token_ids: Sequence[int], salt: str) -> int:
        """How many leading tokens are resident somewhere."""
        ...

    def acquire(self, token_ids: Sequence[int], salt: str, limit: int) -> Seat | None:
        """A row that starts with the longest resident prefix of at most `limit` tokens; None when all run."""
        ...

    def fork(self, row: int) -> int | None:
        """Another running row with the same tokens; None when there is none to have."""
        ...

    def reserve(self, num_tokens: int) -> bool:
        """Make room for so many more tokens, at the cost of cached ones. False when running rows fill it."""
        ...

    def room(self) -> int:
        """Tokens that `reserve` can give."""
        ...

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Note that the runner has computed these tokens behind the row's end."""
        ...

    def retract(self, row: int, num_tokens: int) -> None:
        """Forget the last tokens of a running row, in the runner's store too."""
        ...

    def release(self, row: int, *, keep: bool) -> None:
        """The sequence no longer needs the row. `keep`: its tokens stay until the room is needed."""
        ...
