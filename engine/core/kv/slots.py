"""Rows with prefix reuse: finished rows stay until their room is needed, a new prompt starts from the
longest prefix that any row holds, running or not.

Knows which tokens are where and in what order rows were used; not what they are for. Every change of the
books goes with the same change of the runner's store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from engine.core.kv import RowStore, Seat
from engine.core.kv.tree import Node, longest_prefix, split

DIGEST_BLOCK = 64
"""Tokens per hashed block of a cached prefix."""


class SlotKv:
    """The books over a runner's rows."""

    def __init__(self, store: RowStore, *, num_rows: int, num_tokens: int) -> None:
        self.num_total = num_tokens
        self._num_rows = num_rows
        self._store = store
        self._roots: dict[str, Node] = {}
        self._empty = list(range(num_rows - 1, -1, -1))
        self._ends: dict[int, Node] = {}
        """Where each row that has a sequence or a cached prefix ends."""
        self._running: set[int] = set()
        self._used_at: dict[int, int] = {}
        """When each cached row was last of use, on `_now`'s scale."""
        self._now = 0
        self._num_resident = 0

    # --- numbers ---

    @property
    def num_resident(self) -> int:
        """Token positions in use, running and cached."""
        return self._num_resident

    @property
    def num_used(self) -> int:
        """Positions that running rows hold."""
        nodes = {id(n): n for row in self._running for n in self._ends[row].path()}
        return sum(len(node.token_ids) for node in nodes.values())

    @property
    def num_cached(self) -> int:
        """Positions that only cached rows hold."""
        return self._num_resident - self.num_used

    @property
    def num_free(self) -> int:
        """Positions that nothing holds."""
        return self.num_total - self._num_resident

    def room(self) -> int:
        """Tokens that `reserve` can give: everything that no running row holds."""
        return self.num_total - self.num_used

    # --- rows ---

    def match(self, token_ids: Sequence[int], salt: str) -> int:
        """How many leading tokens are resident somewhere."""
        root = self._roots.get(salt)
        return longest_prefix(root, token_ids)[1] if root else 0

    def acquire(self, token_ids: Sequence[int], salt: str, limit: int) -> Seat | None:
        """A row that starts with the longest resident prefix of at most `limit` tokens; None when all run."""
        root = self._root(salt)
        node, length = longest_prefix(
            root, token_ids[:limit] if limit < len(token_ids) else token_ids
        )
        length = min(length, limit)
        source = self._row_through(node) if length else None
        if source is None:
            length = 0
        elif source not in self._running and self._ends[source].depth == length:
            # A cached row that ends just here: nothing is lost by going on in it.
            self._run(source)
            return Seat(source, length)
        row = self._free_row(source)
        if row is None:
            return None
        if row == source:
            self._trim(row, length)
        else:
            self._ends[row] = root
            if source is not None:
                self._touch(source)
                self._copy(source, row, length)
        self._run(row)
        return Seat(row, length)

    def fork(self, row: int) -> int | None:
        """Another running row with the same tokens; None when there is none to have."""
        target = self._free_row(None)
        if target is not None:
            self._ends[target] = _root_of(self._ends[row])
            self._copy(row, target, self._ends[row].depth)
            self._run(target)
        return target

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Note that the runner has computed these tokens behind the row's end."""
        end = self._ends[row]
        if end.parent is None or end.num_rows > 1:
            self._ends[row] = Node(end, list(token_ids), 1)
        else:
            end.token_ids.extend(token_ids)
        self._num_resident += len(token_ids)

    def retract(self, row: int, num_tokens: int) -> None:
        """Forget the last tokens of a running row, in the runner's store too."""
        if num_tokens:
            self._trim(row, self._ends[row].depth - num_tokens)

    def release(self, row: int, *, keep: bool) -> None:
        """The sequence no longer needs the row. `keep`: its tokens stay until the room is needed."""
        self._running.remove(row)
        if keep and self._ends[row].parent is not None:
            self._touch(row)
        else:
            self._drop(row)

    def reserve(self, num_tokens: int) -> bool:
        """Make room for so many more tokens, at the cost of cached ones. False when running rows fill it."""
        while self.num_free < num_tokens:
            if not self._used_at:
                return False
            self._shrink(min(self._used_at, key=self._used_at.__getitem__), num_tokens)
        return True

    def digests(self, limit: int) -> list[int]:
        """Chained 64-bit hashes of the resident prefixes, one per whole block, the most recent rows first.

        Rows of a salt are left out: what they hold is nobody else's business.
        """
        found: dict[int, None] = {}
        recent = sorted(self._used_at, key=self._used_at.__getitem__, reverse=True)
        for row in [*sorted(self._running), *recent]:
            path = [*self._ends[row].path()]
            if path[-1] is not self._roots.get(""):  # a salted one
                continue
            token_ids = [t for node in reversed(path) for t in node.token_ids]
            for digest in block_digests(token_ids):
                if len(found) >= limit:
                    return list(found)
                found[digest] = None
        return list(found)

    # --- inside ---

    def _root(self, salt: str) -> Node:
        if salt not in self._roots:
            # Salts are the clients' to choose, so roots without rows must not pile up.
            live = {id(_root_of(end)) for end in self._ends.values()}
            self._roots = {s: root for s, root in self._roots.items() if id(root) in live}
            self._roots[salt] = Node(None, [], 0)
        return self._roots[salt]

    def _row_through(self, node: Node) -> int | None:
        """A row whose path goes through the node; a cached one that ends nearest to it, if there is one."""
        through = [row for row, end in self._ends.items() if any(n is node for n in end.path())]
        cached = [row for row in through if row not in self._running]
        if cached:
            return min(cached, key=lambda row: self._ends[row].depth)
        return through[0] if through else None

    def _free_row(self, source: int | None) -> int | None:
        """An empty row, or the cached one that was of use the longest time ago (`source`, if it is all)."""
        if self._empty:
            return self._empty.pop()
        others = [row for row in self._used_at if row != source]
        if others:
            row = min(others, key=self._used_at.__getitem__)
            self._drop(row)
            return self._empty.pop()
        return source if source in self._used_at else None

    def _run(self, row: int) -> None:
        self._running.add(row)
        self._used_at.pop(row, None)

    def _touch(self, row: int) -> None:
        if row not in self._running:
            self._now += 1
            self._used_at[row] = self._now

    def _copy(self, source: int, target: int, length: int) -> None:
        if length == 0:
            return
        path = [*self._ends[source].path()]
        left = length
        for node in reversed(path):
            size = len(node.token_ids)
            if left <= size and node.parent is not None:
                end = node if left == size else split(node, left)
                break
            left -= size
        for node in end.path():
            node.num_rows += 1
        self._ends[target] = end
        self._store.copy(source, target, length)

    def _trim(self, row: int, length: int) -> None:
        """Cut a row back to its first tokens, in the books and in the store."""
        end = self._ends[row]
        excess = end.depth - length
        while excess > 0:
            parent = end.parent
            assert parent is not None, "a root has no tokens to cut"
            if len(end.token_ids) > excess:
                if end.num_rows == 1:
                    del end.token_ids[-excess:]
                    self._num_resident -= excess
                else:
                    tail, end = end, split(end, len(end.token_ids) - excess)
                    tail.num_rows -= 1
                break
            excess -= len(end.token_ids)
            end.num_rows -= 1
            if end.num_rows == 0:
                self._num_resident -= len(end.token_ids)
                parent.children.remove(end)
            end = parent
        self._ends[row] = end
        self._store.trim(row, length)

    def _shrink(self, row: int, num_tokens: int) -> None:
        """Take room from a cached row: its own last tokens, or all of it when others share them."""
        end = self._ends[row]
        wanted = max(DIGEST_BLOCK, num_tokens - self.num_free)
        if end.num_rows == 1 and len(end.token_ids) > wanted:
            self._trim(row, end.depth - wanted)
        else:
            self._drop(row)

    def _drop(self, row: int) -> None:
        self._trim(row, 0)
        for node in self._ends.pop(row).path():
            assert node.parent is None, "a dropped row ends at its root"
        self._used_at.pop(row, None)
        self._empty.append(row)

    def check(self) -> None:
        """Compare every book with every other. For tests and for an idle engine."""
        rows: dict[int, int] = {}
        nodes: dict[int, Node] = {}
        roots = {id(root) for root in self._roots.values()}
        assert all(id(_root_of(end)) in roots for end in self._ends.values()), "a lost root"
        for end in self._ends.values():
            for node in end.path():
                if node.parent is not None:
                    rows[id(node)] = rows.get(id(node), 0) + 1
                    nodes[id(node)] = node
        for key, node in nodes.items():
            assert node.num_rows == rows[key], (node.num_rows, rows[key])
            assert node.token_ids, "an empty node"
            assert node.parent is not None and any(c is node for c in node.parent.children)
        waiting = list(self._roots.values())
        while waiting:
            for child in waiting.pop().children:
                assert id(child) in nodes, "a node without rows"
                waiting.append(child)
        assert sum(len(n.token_ids) for n in nodes.values()) == self._num_resident
        assert self.num_free + self.num_used + self.num_cached == self.num_total
        assert self.num_free >= 0, self.num_free
        assert set(self._ends) == self._running | set(self._used_at)
        assert not set(self._empty) & set(self._ends)
        assert len(set(self._empty)) == len(self._empty) == self._num_rows - len(self._ends), (
            "a lost row"
        )


def _root_of(node: Node) -> Node:
    *_, root = node.path()
    return root


def block_digests(token_ids: Sequence[int]) -> list[int]:
    """One hash per whole block of a prompt; each covers everything from the start up to its block."""
    data = np.asarray(token_ids, dtype="<u4").tobytes()
    size = 4 * DIGEST_BLOCK
    digests: list[int] = []
    chain = b""
    for at in range(0, len(data) - size + 1, size):
        chain = hashlib.blake2b(chain + data[at : at + size], digest_size=8).digest()
        digests.append(int.from_bytes(chain, "little"))
    return digests
