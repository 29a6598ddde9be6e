"""A vocabulary as data: what each token id stands for, which ids are special, how ids become text.

Both carriers fill this in once, at load; decoding, truncation and streaming then work the same for every
model. How text becomes ids is not known here.

Decoding is nothing but joined bytes. Hugging Face's decoders may also rewrite the result (no space before a
full stop); that rule is left out on purpose, because text that was already streamed cannot be rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Vocabulary:
    """Token ids and their meaning; never changes after loading."""

    pieces: Sequence[bytes]
    """Raw bytes per token id, special tokens with the text they are written as. Ids without a token: b""."""
    base_vocab_size: int
    """Number of ids without added tokens (chat markers and padding behind the trained vocabulary)."""
    special_ids: frozenset[int]
    """Control tokens: hidden when special tokens are skipped."""
    eos_ids: tuple[int, ...]
    """Every id that ends generation, the tokenizer's own EOS first."""
    bos_id: int | None
    prefix_ids: tuple[int, ...]
    """What `add_special_tokens` puts in front of a text."""
    suffix_ids: tuple[int, ...]
    """What `add_special_tokens` puts behind a text."""
    strips_leading_space: bool
    """Whether a decoded text loses its first character if that is a space (SentencePiece, WordPiece)."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` ... → text, as chat templates name them; only those that exist."""
    chat_template: str | None
    fingerprint: str
    """SHA-256 of everything that decides which ids a text or a conversation becomes."""

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        return len(self.pieces)

    def piece(self, token_id: int) -> bytes:
        """The bytes of one id; nothing for an id that does not exist."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids that do not exist vanish."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.piece(i) for i in ids if i not in hidden)
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def keep_last(self, ids: list[int], k: int, *, has_special_tokens: bool) -> list[int]:
        """At most `k` of `ids`, cut from the left.

        `has_special_tokens` tells that `ids` were encoded with them; those stay in their places, and
        ordinary tokens go (BOS + the last k − 1).
        """
        if len(ids) <= k:
            return ids
        if not has_special_tokens:
            return ids[len(ids) - k :]
        prefix, suffix = list(self.prefix_ids), list(self.suffix_ids)
        room = k - len(prefix) - len(suffix)
        if room <= 0:
            return (prefix + suffix)[:k]
        end = len(ids) - len(suffix)
        return prefix + ids[end - room : end] + suffix


def special_tokens_around(
    plain: Sequence[int], full: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What was put in front of and behind `plain` to make `full`. Raises ValueError when it is not inside."""
    for start in range(len(full) - len(plain) + 1):
        if list(full[start : start + len(plain)]) == list(plain):
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise ValueError("the tokenizer's special tokens are not put around the text but into it")
