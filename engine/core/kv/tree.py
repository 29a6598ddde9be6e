"""The runs of tokens that rows hold, as a forest: rows that got a prefix by copying share its nodes.

A row is the path from a root to the node at which it ends; every row ends at the end of a node. A node counts
the rows that go through it and vanishes with the last one. Two rows that computed the same tokens each on
their own have two branches, as the store holds these tokens twice.

        (root of a salt)
          └─ "You are a helpful"  rows 0 1 2
               ├─ " assistant"    rows 0 1      row 1 ends here: it was copied from row 0
               │    └─ " named"   row  0
               └─ " poet"         row  2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Node:
    """A run of tokens. `num_rows`: rows whose path goes through it, those that end here included."""

    __slots__ = ("children", "num_rows", "parent", "token_ids")

    def __init__(self, parent: Node | None, token_ids: list[int], num_rows: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.children: list[Node] = []
        self.num_rows = num_rows
        if parent is not None:
            parent.children.append(self)

    @property
    def depth(self) -> int:
        """Tokens from the root to the end of this node."""
        return sum(len(node.token_ids) for node in self.path())

    def path(self) -> Iterator[Node]:
        """This node, its parent, and so on up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


def longest_prefix(root: Node, token_ids: Sequence[int]) -> tuple[Node, int]:
    """The node in which the longest common prefix ends, and that prefix's length."""
    best, best_length = root, 0
    waiting = [(root, 0)]
    while waiting:
        node, start = waiting.pop()
        for child in node.children:
            if start < len(token_ids) and child.token_ids[0] == token_ids[start]:
                same = common_length(child.token_ids, token_ids, start)
                if start + same > best_length:
                    best, best_length = child, start + same
                if same == len(child.token_ids):
                    waiting.append((child, start + same))
    return best, best_length


def common_length(run: Sequence[int], token_ids: Sequence[int], start: int) -> int:
    """How many tokens of `run` equal those of `token_ids` from `start` on."""
    size = min(len(run), len(token_ids) - start)
    step, done = 64, 0
    while done < size:
        # Whole slices compare at C speed; only the slice that differs is looked at token by token.
        until = min(done + step, size)
        if run[done:until] == token_ids[start + done : start + until]:
            done = until
        elif step > 1:
            step = max(1, step // 8)
        else:
            break
    return done


def split(node: Node, length: int) -> Node:
    """Cut a node behind its first `length` tokens; returns the front part, which keeps all its rows.

    The tail becomes its child and stays the same object, so rows that end there need no change.
    """
    parent = node.parent
    assert parent is not None and 0 < length < len(node.token_ids), (length, len(node.token_ids))
    parent.children.remove(node)
    front = Node(parent, node.token_ids[:length], node.num_rows)
    node.token_ids = node.token_ids[length:]
    node.parent = front
    front.children.append(node)
    return front
