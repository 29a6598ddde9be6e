"""Counter-based randomness: Philox 4x64-10 (Salmon et al., SC'11), one uniform number per question.

There is no generator state. The number belongs to (seed, choice, position), so it does not matter when, in
which batch or on which worker it is asked for.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 64-bit numbers for a counter of four and a key of two 64-bit numbers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & _MASK, (p0 >> 64) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position` of `choice`."""
    word = philox((position, choice, 0, 0), (seed & _MASK, 0))[0]
    return (word >> 11) * 2.0**-53
