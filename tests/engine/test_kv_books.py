"""The KV books: exact against a plain count of cells, and misuse refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runners import KvExhausted
from engine.runners.kv_books import KvBooks, Run
from tests.fakes.runners import step

ROWS, KV, LENGTH = 5, 60, 40


class CountedCells:
    """The same rules the slow way: each row is a list of cells, a copy shares them."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.made = 0

    def append(self, row: int, size: int) -> None:
        self.rows[row] += range(self.made, self.made + size)
        self.made += size

    @property
    def used(self) -> int:
        return len({cell for row in self.rows for cell in row})


def append(books: KvBooks, row: int, size: int) -> None:
    tokens = step((row, books.lengths[row], [1] * size))
    books.append(books.check(tokens, 10, 100))


@given(
    st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, ROWS - 1)] * 2, st.integers(0, LENGTH)))
)
def test_counts_like_cells(operations: Sequence[tuple[int, int, int, int]]) -> None:
    books, cells = KvBooks(ROWS, KV, LENGTH), CountedCells()
    for kind, row, other, number in operations:
        length = books.lengths[row]
        if kind == 0:
            size = min(number, LENGTH - length)
            if size and books.used + size > KV:
                with pytest.raises(KvExhausted):
                    append(books, row, size)
            elif size:
                append(books, row, size)
                cells.append(row, size)
        elif kind == 1:
            size = min(number, length)
            books.trim(row, size)
            del cells.rows[row][size:]
        elif row != other:
            size = min(number, length)
            books.trim(other, 0)
            books.copy(row, other, size)
            cells.rows[other] = cells.rows[row][:size]
        assert books.lengths == [len(r) for r in cells.rows]
        assert books.used == cells.used
    for row in range(ROWS):
        books.trim(row, 0)
    assert books.used == 0


def test_a_check_books_nothing() -> None:
    books = KvBooks(ROWS, KV, LENGTH)
    runs = books.check(step((3, 0, [1, 2]), (0, 0, [3])), 10, 100)
    assert runs == [
        Run(row=3, start=0, size=2, position=0),
        Run(row=0, start=2, size=1, position=0),
    ]
    assert books.used == 0 and books.lengths == [0] * ROWS


def test_a_wrong_step_is_refused() -> None:
    books = KvBooks(ROWS, KV, LENGTH)
    append(books, 0, 5)
    good = step((0, 5, [1, 2]), (1, 0, [3]))
    short = dataclasses.replace(good, rows=good.rows[:2])
    for message, bad in {
        "four arrays": short,
        "between 0 and 9": step((0, 5, [10])),
        "row 0 has 5 tokens; position 6": step((0, 6, [1])),
        "position 7 does not follow": dataclasses.replace(
            good, positions=np.array([5, 7, 0], np.int32)
        ),
        "row 7 is out of range": step((7, 0, [1])),
        "row 0 is out of range or not contiguous": step((0, 5, [1]), (1, 0, [1]), (0, 6, [1])),
        "101 tokens in a step": step((0, 5, [1] * 101)),
        "would have 41 tokens": step((0, 5, [1] * 36)),
    }.items():
        with pytest.raises(ValueError, match=message):
            books.check(bad, 10, 100)
    with pytest.raises(ValueError, match="at least one token"):
        books.check(step((0, 5, []), wants="none"), 10, 100)
    assert len(books.check(good, 10, 100)) == 2


def test_a_wrong_copy_or_trim_is_refused() -> None:
    books = KvBooks(ROWS, KV, LENGTH)
    append(books, 0, 5)
    append(books, 1, 1)
    with pytest.raises(ValueError, match="row 1 is not empty"):
        books.copy(0, 1, 2)
    with pytest.raises(ValueError, match="row 0 has 5 tokens, not 6"):
        books.copy(0, 2, 6)
    with pytest.raises(ValueError, match="row 0 has 5 tokens, not 6"):
        books.trim(0, 6)
    with pytest.raises(ValueError, match="row -1 is not one of the 5 rows"):
        books.trim(-1, 0)
    with pytest.raises(ValueError, match="row 5 is not one of the 5 rows"):
        books.copy(0, 5, 1)
    assert books.used == 6
