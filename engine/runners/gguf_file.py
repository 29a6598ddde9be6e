"""GGUF files: metadata, and tensors as float32 arrays.

Knows the container (format versions 2 and 3, little endian) and how llama.cpp packs blocks of 32 weights;
knows nothing about models. K-quants and the i-quants are refused by name: whoever serves those uses the
llama.cpp runner, which computes on them directly.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""GGUF value type → struct format."""
_STRING, _ARRAY = 8, 9
_MOST_ITEMS = 1 << 24
"""A count above this is a damaged file, not a model."""


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Blocks:
    """A quantised matrix [N, K]: weight = scale * level + least, per block of 32 along K."""

    levels: NDArray[np.uint8]
    """[N, K]"""
    scales: NDArray[np.float16]
    """[N, K / 32]"""
    leasts: NDArray[np.float16]
    """[N, K / 32]"""


class GgufFile:
    """An opened GGUF file. Raises ValueError, with the file's name, for anything that cannot be read."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if not self._path.is_file() or self._path.stat().st_size < 24:
            raise ValueError(f"{path} is not a GGUF file")
        self._data: Bytes = np.memmap(self._path, np.uint8, mode="r")
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it starts with {bytes(self._data[:4])!r}")
        self.meta: dict[str, Any] = {}
        """Metadata by key; arrays are lists."""
        try:
            self._tensors = self._read_head(_Cursor(self._data, 4))
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{path} is a damaged GGUF file: {error}") from error

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in file order."""
        return list(self._tensors)

    def tensor(self, name: str) -> Array:
        """One tensor as float32, rows first (the reverse of GGUF's own order)."""
        tensor = self._tensors[name]
        if tensor.kind not in _FORMATS:
            kind = _REFUSED.get(tensor.kind, f"number {tensor.kind}")
            known = ", ".join(f.name for f in _FORMATS.values())
            raise ValueError(
                f"{self._path}: tensor {name} has type {kind}; this reader knows {known}"
            )
        fmt = _FORMATS[tensor.kind]
        return fmt.decode(self._raw(name, tensor, fmt)).reshape(tensor.shape)

    def blocks(self, name: str) -> Blocks | None:
        """One tensor as it is quantised, exactly; None for a type that has no blocks of 32 weights."""
        tensor = self._tensors[name]
        levels = _LEVELS.get(tensor.kind)
        if levels is None:
            return None
        raw = self._raw(name, tensor, _FORMATS[tensor.kind])
        q, scale, least = levels(raw)
        rows, columns = tensor.shape[0], tensor.shape[-1]
        return Blocks(
            q.reshape(rows, columns),
            scale.astype(np.float16).reshape(rows, columns // 32),
            least.astype(np.float16).reshape(rows, columns // 32),
        )

    def _raw(self, name: str, tensor: _Tensor, fmt: _Format) -> Bytes:
        count = math.prod(tensor.shape)
        if count % fmt.block:
            raise ValueError(f"{self._path}: tensor {name} has {count} weights, no whole blocks")
        raw = self._data[tensor.start : tensor.start + count // fmt.block * fmt.size]
        if len(raw) != count // fmt.block * fmt.size:
            raise ValueError(f"{self._path} ends within tensor {name}")
        return raw.reshape(-1, fmt.size)

    def _read_head(self, at: _Cursor) -> dict[str, _Tensor]:
        version = at.number("<I")
        if version not in (2, 3):
            raise ValueError(f"{self._path} is GGUF version {version}; versions 2 and 3 are known")
        num_tensors, num_values = at.count(), at.count()
        for _ in range(num_values):
            key = at.text()
            self.meta[key] = at.value(at.number("<I"))
        found = []
        for _ in range(num_tensors):
            name = at.text()
            shape = tuple(at.count() for _ in range(at.number("<I")))
            found.append((name, shape[::-1], at.number("<I"), at.number("<Q")))
        align = self.meta.get("general.alignment", 32)
        start = -(-at.position // align) * align
        return {name: _Tensor(shape, kind, start + off) for name, shape, kind, off in found}


class _Cursor:
    """Reads values one after another; running off the end is a struct.error."""

    def __init__(self, data: Bytes, position: int) -> None:
        self._data = data.data
        self.position = position

    def number(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self._data, self.position)
        self.position += struct.calcsize(fmt)
        return value

    def count(self) -> int:
        value = int(self.number("<Q"))
        if value > _MOST_ITEMS:
            raise OverflowError(f"a count of {value}")
        return value

    def text(self) -> str:
        size = self.count()
        raw = bytes(self._data[self.position : self.position + size])
        self.position += size
        # Token texts of byte-level vocabularies need not be valid UTF-8.
        return raw.decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item = self.number("<I")
            size = self.count()
            if item in (_STRING, _ARRAY):
                return [self.value(item) for _ in range(size)]
            fmt = f"<{size}{_scalar(item)[1]}"
            values = struct.unpack_from(fmt, self._data, self.position)
            self.position += struct.calcsize(fmt)
            return list(values)
        return self.number(_scalar(kind))


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise OverflowError(f"value type {kind}")
    return _SCALARS[kind]


# How the blocks are packed. All hold 32 weights; d is the scale and m the least value, both float16;
# byte j of the 16 packed ones has weight j in its low and weight j + 16 in its high half:
#
#     Q4_0  d | 16 packed            Q4_1  d m | 16 packed
#     Q5_0  d | 4 fifth bits | 16    Q5_1  d m | 4 fifth bits | 16      Q8_0  d | 32 signed bytes


def _f16(blocks: Bytes, at: int) -> Array:
    """The float16 at byte `at` of every block, as a column."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> NDArray[np.uint8]:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifths(bits: Bytes, packed: Bytes) -> NDArray[np.uint8]:
    high = np.unpackbits(np.ascontiguousarray(bits), axis=1, bitorder="little")
    return np.asarray(_nibbles(packed) | high << 4, np.uint8)


def _q4_0(b: Bytes) -> Array:
    return _f16(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Array:
    return _f16(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _f16(b, 2)


def _q5_0(b: Bytes) -> Array:
    return _f16(b, 0) * (_fifths(b[:, 2:6], b[:, 6:]).astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Array:
    return _f16(b, 0) * _fifths(b[:, 4:8], b[:, 8:]).astype(np.float32) + _f16(b, 2)


def _q8_0(b: Bytes) -> Array:
    return _f16(b, 0) * b[:, 2:].copy().view(np.int8).astype(np.float32)


def _float32(b: Bytes) -> Array:
    return b.copy().view(np.float32)


def _float16(b: Bytes) -> Array:
    return b.copy().view(np.float16).astype(np.float32)


def bfloat16(b: Bytes) -> Array:
    """bfloat16 is the upper half of a float32."""
    return (b.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class _Format:
    name: str
    block: int
    """Weights of a block."""
    size: int
    """Bytes of a block."""
    decode: Callable[[Bytes], Array]


_FORMATS = {
    0: _Format("F32", 1, 4, _float32),
    1: _Format("F16", 1, 2, _float16),
    2: _Format("Q4_0", 32, 18, _q4_0),
    3: _Format("Q4_1", 32, 20, _q4_1),
    6: _Format("Q5_0", 32, 22, _q5_0),
    7: _Format("Q5_1", 32, 24, _q5_1),
    8: _Format("Q8_0", 32, 34, _q8_0),
    30: _Format("BF16", 1, 2, bfloat16),
}
"""ggml type number → how to read it."""

_Levels = tuple[NDArray[np.uint8], Array, Array]


def _around(levels: NDArray[Any], scale: Array, zero: int) -> _Levels:
    """Levels that count from `zero`: times a power of two, so the least value is exact in half precision."""
    return levels.astype(np.uint8), scale, -zero * scale


_LEVELS: dict[int, Callable[[Bytes], _Levels]] = {
    2: lambda b: _around(_nibbles(b[:, 2:]), _f16(b, 0), 8),
    3: lambda b: (_nibbles(b[:, 4:]), _f16(b, 0), _f16(b, 2)),
    6: lambda b: _around(_fifths(b[:, 2:6], b[:, 6:]), _f16(b, 0), 16),
    7: lambda b: (_fifths(b[:, 4:8], b[:, 8:]), _f16(b, 0), _f16(b, 2)),
    8: lambda b: _around(b[:, 2:].copy().view(np.int8).astype(np.int16) + 128, _f16(b, 0), 128),
}
"""ggml type number → unsigned levels, scale and least value of every block."""

_REFUSED = {
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
}
"""Frequent types that are not read here, for the message."""
