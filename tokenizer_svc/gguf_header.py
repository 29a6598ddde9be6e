"""The metadata at the head of a GGUF file, as raw bytes per key.

Needed for the fingerprint only: llama.cpp's C interface does not give out arrays (tokens, merges, scores).
Values are not interpreted, just delimited.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

# GGUF value type → bytes; 8 is a string, 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_U32, _U64, _ARRAY_HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")


def raw_metadata(path: str | Path) -> dict[str, bytes]:
    """Key → the value's bytes as they lie in the file. Raises ValueError for a damaged head."""
    with (
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        try:
            return dict(_entries(data))
        except (struct.error, KeyError) as error:
            raise ValueError(f"{path} has a damaged GGUF head") from error


def _entries(data: mmap.mmap) -> Iterator[tuple[str, bytes]]:
    (count,), at = _U64.unpack_from(data, 16), 24
    for _ in range(count):
        (length,) = _U64.unpack_from(data, at)
        key = data[at + 8 : at + 8 + length].decode("utf-8", "replace")
        start = at + 8 + length
        (kind,) = _U32.unpack_from(data, start)
        at = _end_of_value(data, start + 4, kind)
        if at > len(data):
            raise struct.error("value reaches beyond the file")
        yield key, data[start:at]


def _end_of_value(data: mmap.mmap, at: int, kind: int) -> int:
    if kind == _STRING:
        (length,) = _U64.unpack_from(data, at)
        return at + 8 + int(length)
    if kind != _ARRAY:
        return at + _SIZES[kind]
    item, count = _ARRAY_HEAD.unpack_from(data, at)
    at += _ARRAY_HEAD.size
    if item in _SIZES:
        return at + int(count) * _SIZES[item]
    for _ in range(count):
        at = _end_of_value(data, at, item)
    return at
