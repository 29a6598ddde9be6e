"""Text ↔ token ids: one protocol, two carriers.

`open_codec` picks the carrier from what lies at a path: a GGUF file (llama.cpp does the work) or a folder
with a `tokenizer.json` (Hugging Face's `tokenizers` does). What a token id means is in `vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Codec(Protocol):
    """A loaded tokenizer. Safe to use from several threads at once."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """Raw bytes per token id, special tokens with the text they are written as."""
        ...

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        ...

    @property
    def base_vocab_size(self) -> int:
        """Number of ids without added tokens."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: hidden when special tokens are skipped."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends generation, the tokenizer's own EOS first."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where there is one."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What `add_special_tokens` puts in front of a text."""
        ...

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """What it puts behind a text."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether a decoded text loses its first character if that is a space."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` ... → text, as chat templates name them."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for two codecs exactly if they turn the same text or conversation into the same ids."""
        ...

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The token ids of `text`.

        `parse_special`: text that spells a control token becomes that token, as Hugging Face has it. It is
        on for prompts and for what a chat template writes, off for what messages spell (see `markers`).
        """
        ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids that do not exist vanish."""
        ...

    def piece(self, token_id: int) -> bytes:
        """The bytes of one id; nothing for an id that does not exist."""
        ...

    def keep_last(self, ids: list[int], k: int, *, has_special_tokens: bool) -> list[int]:
        """At most `k` of `ids`, ordinary tokens cut from the left."""
        ...


def open_codec(path: str | Path) -> Codec:
    """Load the tokenizer at `path`. Raises ValueError when there is none that can be used."""
    path = Path(path)
    if path.is_dir():
        from tokenizer_svc.hf_codec import HfCodec

        return HfCodec(path)
    if path.is_file():
        from tokenizer_svc.gguf_codec import GgufCodec

        return GgufCodec(path)
    raise ValueError(f"{path} is neither a GGUF file nor a folder with a tokenizer.json")
