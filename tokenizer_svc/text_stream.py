"""Text of a growing token sequence, piece by piece, never half a character.

One invariant: the texts of all `push` calls and the final `flush`, joined, are `decode(all ids)`. What is
held back: everything since the last point at which the text did not end in U+FFFD, because such an end may
still become a character. Knows bytes, not stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_MAX_HELD_BYTES = 64
"""A character takes four bytes. A model that writes nonsense must not stall its stream for ever."""


class StreamVocabulary(Protocol):
    """The part of a codec that streaming needs."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """Raw bytes per token id."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids hidden when special tokens are skipped."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether a decoded text loses its first character if that is a space."""
        ...


class TextStream:
    """The text of one sequence of tokens while it grows."""

    __slots__ = ("_at_start", "_hidden", "_pending", "_pieces")

    def __init__(self, vocabulary: StreamVocabulary, skip_special_tokens: bool = True) -> None:
        self._pieces = vocabulary.pieces
        self._hidden = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._at_start = vocabulary.strips_leading_space
        self._pending = b""

    def push(self, token_id: int) -> str:
        """Take one more token; returns the text to add, "" while it may be half a character."""
        piece = self._piece(token_id)
        text, self._pending = _advance(self._pending + self._without_leading_space(piece))
        if piece:
            self._at_start = False
        return text

    def peek_text(self, token_id: int) -> str:
        """The text that `push(token_id)` would return; changes nothing."""
        piece = self._without_leading_space(self._piece(token_id))
        return _advance(self._pending + piece)[0]

    def flush(self) -> str:
        """The text still held back, incomplete characters as U+FFFD. The sequence ends here."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    @property
    def held_bytes(self) -> bytes:
        """What `flush` would show: bytes that do not end in a whole character yet."""
        return self._pending

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._hidden or not 0 <= token_id < len(self._pieces):
            return b""
        return self._pieces[token_id]

    def _without_leading_space(self, piece: bytes) -> bytes:
        return piece[1:] if self._at_start and piece.startswith(b" ") else piece


def _advance(pending: bytes) -> tuple[str, bytes]:
    """(text to show, bytes to hold)."""
    text, used = codecs.utf_8_decode(pending, "replace", False)
    may_become_text = used < len(pending) or text.endswith("\ufffd")
    if may_become_text and len(pending) <= _MAX_HELD_BYTES:
        return "", pending
    return text, pending[used:]
