"""Which worker has which prompt prefixes cached, as far as the scheduler can know.

Prefixes are chains of hashes, one per block of 64 tokens. They are noted at dispatch, bounded per worker like
the worker's own memory, and corrected by what workers report. Knows digests and worker numbers, no tokens.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

BLOCK_TOKENS = 64
"""Tokens per hashed block; the workers hash the same."""
MAX_PROMPT_BLOCKS = 512
"""Of one prompt that are looked at: 32,768 tokens. What is cached beyond is a welcome surprise."""
MAX_REPORTED_BLOCKS = 512
"""A report of so many digests may be cut short: it proves what is there, not what is not."""


def block_digests(token_ids: Iterable[int], salt: str = "") -> tuple[int, ...]:
    """One 64-bit hash per whole block; each covers everything from the start up to its block.

    Prompts of different salts have no digest in common.
    """
    data = array("I", token_ids)
    if sys.byteorder == "big":
        data.byteswap()
    raw, size = data.tobytes(), data.itemsize * BLOCK_TOKENS
    end = min(len(raw) // size, MAX_PROMPT_BLOCKS) * size
    digests = []
    chain = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
    for at in range(0, end, size):
        chain = hashlib.blake2b(chain + raw[at : at + size], digest_size=8).digest()
        digests.append(int.from_bytes(chain, "little"))
    return tuple(digests)


class PrefixIndex:
    """Digest → the workers that hold it, as a bit mask of worker numbers.

    What a worker holds is closed under prefixes: a block is always used later than the blocks behind it, so
    that forgetting the least recently used never opens a gap. That allows binary search.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        self._caches: dict[int, OrderedDict[int, bool]] = {}
        """Per worker number: digest → whether it is of a salt, least recently used first."""

    def touch(self, number: int, digests: Sequence[int], *, is_salted: bool, capacity: int) -> None:
        """The worker is given a prompt: it will hold these blocks, at the cost of older ones."""
        cache, holders, bit = self._cache(number), self._holders, 1 << number
        for digest in reversed(digests):
            if digest in cache:
                cache.move_to_end(digest)
            else:
                cache[digest] = is_salted
                holders[digest] = holders.get(digest, 0) | bit
        limit = min(capacity, self._max_blocks) if capacity else self._max_blocks
        while len(cache) > limit:
            self._unhold(cache.popitem(last=False)[0], bit)

    def correct(self, number: int, reported: Sequence[int], running: Iterable[int]) -> None:
        """Take the worker's word: adds what it names and, when the list is whole, drops what it does not.

        `running` are the digests of requests placed on it, which may be too new to be named. Those of salts are
        never named.
        """
        cache, bit = self._cache(number), 1 << number
        if len(reported) < MAX_REPORTED_BLOCKS:
            keep = {*reported, *running}
            gone = [d for d, is_salted in cache.items() if not is_salted and d not in keep]
            for digest in gone:
                del cache[digest]
                self._unhold(digest, bit)
        for digest in reversed(reported):
            if digest not in cache and len(cache) < self._max_blocks:
                cache[digest] = False
                cache.move_to_end(digest, last=False)
                self._holders[digest] = self._holders.get(digest, 0) | bit

    def drop(self, number: int) -> None:
        """The worker is gone; its number may be given to another."""
        for digest in self._caches.pop(number, ()):
            self._unhold(digest, 1 << number)

    @property
    def masks(self) -> Mapping[int, int]:
        """Digest → workers that hold it, for those who look up very many."""
        return self._holders

    def longest(self, digests: Sequence[int], mask: int) -> int:
        """Leading blocks that some worker of the mask holds."""
        holders = self._holders
        if not digests or not holders.get(digests[0], 0) & mask:
            return 0
        low, high = 1, len(digests)
        while low < high:
            middle = (low + high + 1) // 2
            if holders.get(digests[middle - 1], 0) & mask:
                low = middle
            else:
                high = middle - 1
        return low

    def holders(self, digests: Sequence[int], num_blocks: int) -> int:
        """The workers that hold so many leading blocks, as a mask."""
        return self._holders.get(digests[num_blocks - 1], 0)

    @property
    def num_blocks(self) -> int:
        """Blocks noted, over all workers."""
        return sum(map(len, self._caches.values()))

    def check(self) -> None:
        """Compare both books. For tests."""
        holders: dict[int, int] = {}
        for number, cache in self._caches.items():
            assert len(cache) <= self._max_blocks
            for digest in cache:
                holders[digest] = holders.get(digest, 0) | 1 << number
        assert holders == self._holders

    def _cache(self, number: int) -> OrderedDict[int, bool]:
        return self._caches.setdefault(number, OrderedDict())

    def _unhold(self, digest: int, bit: int) -> None:
        left = self._holders[digest] & ~bit
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]
