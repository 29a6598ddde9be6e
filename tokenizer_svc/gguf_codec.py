"""The tokenizer inside a GGUF file, worked by llama.cpp.

Knows how to get a `Vocabulary` out of the file and how to have llama.cpp encode a text; loads no weights.

Byte-level BPE texts are cut at special tokens here rather than in the library: leftmost, then longest match,
as Hugging Face does it, in linear time (the library's own cutting takes seconds for a text full of markers).
The pieces between two markers are independent for these vocabularies. SentencePiece ones are not cut: there
the library lets a marker decide about the space behind it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from candor.errors import InvalidArgument
from tokenizer_svc import llama_abi
from tokenizer_svc.gguf_header import raw_metadata
from tokenizer_svc.vocabulary import Vocabulary, special_tokens_around

# llama.cpp's token attributes (bits) and vocabulary types.
_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 8, 16, 32
_LSTRIP, _RSTRIP, _SINGLE_WORD = 128, 256, 512
_NO_VOCAB, _SPM, _BPE, _WPM, _UGM = 0, 1, 2, 3, 4

_MAX_TEXT_BYTES = 2**31 - 64
"""The C interface counts bytes in 32 bits."""
_SHORT_BYTES = 64
"""Stretches up to this are remembered: role names and line ends between markers come in every prompt, and
each trip into the library costs 30 µs before it looks at the text. Longer ones are private and rarely
repeat."""

LINEAR_SPLITTERS = frozenset({
    "gpt-2", "smollm", "llama3", "llama-bpe", "qwen2", "qwen35", "starcoder", "refact", "command-r",
    "olmo", "dbrx", "chatglm-bpe", "stablelm2", "jais", "codeshell", "exaone", "minerva-7b", "mpt",
    "phi-2", "kimi-k2", "hunyuan", "chameleon", "trillion", "pixtral", "falcon3", "glm4",
    "solar-open",
})  # fmt: skip
"""Vocabularies (`tokenizer.ggml.pre`) whose splitting rule does not recurse in this build: any text will do.
For the others a regular expression recurses once per character of a stretch, and running out of stack ends
the process: 24,000 spaces do that with eight megabytes."""
_STACK_BYTES_PER_CHARACTER = 1000
"""At most 520 were seen; a rule may join two stretches."""
_DEFAULT_STACK_BYTES = 8 * 1024 * 1024
_MAX_UNKNOWN_CHARACTERS = 100_000
"""For SentencePiece vocabularies: each character without a token of its own makes the library copy all ids
so far, so that a megabyte of them takes over a minute."""
_STRETCH = re.compile(r"\S+|\s+")


class GgufCodec(Vocabulary):
    """Encodes and decodes with the vocabulary of one GGUF file."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError when the file is no model or has no vocabulary."""
        self._lib, self._ffi = llama_abi.lib(), llama_abi.ffi
        model = llama_abi.load_model(path, vocab_only=True)
        self._model = self._ffi.gc(model, self._lib.llama_model_free)
        self._vocab = self._lib.llama_model_get_vocab(model)
        self._kind = int(self._lib.llama_vocab_type(self._vocab))
        if self._kind == _NO_VOCAB:
            raise ValueError(f"{path} has no vocabulary")
        size = self._lib.llama_vocab_n_tokens(self._vocab)
        attributes = [int(self._lib.llama_vocab_get_attr(self._vocab, i)) for i in range(size)]
        pieces = self._read_pieces(size)
        rule = llama_abi.meta(model, "tokenizer.ggml.pre")
        self._is_recursive = self._kind == _BPE and rule not in LINEAR_SPLITTERS
        self._tokenize_short = functools.lru_cache(maxsize=4096)(self._tokenize)
        self._splitters = self._make_splitters(pieces, attributes)
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        described = list(enumerate(zip(texts, attributes, strict=True)))
        self._letters = {t for _, (t, a) in described if len(t) == 1 and not a & _BYTE}
        self._ids_of = {t: i for i, (t, a) in described if a & (_CONTROL | _USER_DEFINED)}
        prefix, suffix = special_tokens_around(
            self._tokenize(b"a", False, False), self._tokenize(b"a", True, False)
        )
        template = self._lib.llama_model_chat_template(model, self._ffi.NULL)
        super().__init__(
            pieces=pieces,
            base_vocab_size=_base_size(attributes),
            special_ids=frozenset(
                i for i, attribute in enumerate(attributes) if attribute & (_CONTROL | _UNKNOWN)
            ),
            eos_ids=self._read_eos_ids(size),
            bos_id=_existing(self._lib.llama_vocab_bos(self._vocab)),
            prefix_ids=prefix,
            suffix_ids=suffix,
            strips_leading_space=self._strips_leading_space(),
            special_tokens=self._read_special_tokens(pieces),
            chat_template=(
                None if template == self._ffi.NULL else self._ffi.string(template).decode("utf-8")
            ),
            fingerprint=_fingerprint(path),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The token ids of `text`. Releases the interpreter lock while the library works.

        `parse_special`: text that spells a control token becomes that token. Raises InvalidArgument for
        a text that this vocabulary cannot take.
        """
        if self._is_recursive:
            _check_stretches(text)
        elif self._kind != _BPE:
            self._check_letters(text)
        splitter = self._splitters[parse_special] if self._splitters else None
        if splitter is None:
            return list(self._tokenize(text.encode(), add_special_tokens, parse_special))
        ids: list[int] = list(self.prefix_ids) if add_special_tokens else []
        # A pattern with one group splits into text, marker, text, marker ... text.
        for number, stretch in enumerate(splitter.split(text)):
            if number % 2:
                ids.append(self._ids_of[stretch])
            elif stretch:
                data = stretch.encode()
                tokenize = self._tokenize_short if len(data) <= _SHORT_BYTES else self._tokenize
                ids += tokenize(data, False, False)
        if add_special_tokens:
            ids += self.suffix_ids
        return ids

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        if len(data) > _MAX_TEXT_BYTES:
            raise ValueError(f"text of {len(data)} bytes; {_MAX_TEXT_BYTES} can be encoded at once")
        # No vocabulary makes more tokens than bytes, but for the few it adds; the answer tells if one did.
        room = len(data) + 16
        while True:
            buf = self._ffi.new("llama_token[]", room)
            count = self._lib.llama_tokenize(
                self._vocab, data, len(data), buf, room, add_special, parse_special
            )
            if count >= 0:
                return tuple(self._ffi.unpack(buf, count))
            room = -count

    def _check_letters(self, text: str) -> None:
        """Refuse a text that would take the library minutes."""
        if len(text) <= _MAX_UNKNOWN_CHARACTERS:
            return
        unknown = sum(n for letter, n in Counter(text).items() if letter not in self._letters)
        if unknown > _MAX_UNKNOWN_CHARACTERS:
            raise InvalidArgument(
                f"the text has {unknown} characters that are not in this model's vocabulary; its "
                f"tokenizer can take {_MAX_UNKNOWN_CHARACTERS}",
                reason="TEXT_TOO_LARGE",
            )

    def _make_splitters(
        self, pieces: list[bytes], attributes: list[int]
    ) -> dict[bool, re.Pattern[str]] | None:
        """Per `parse_special`: what finds markers. None when the library has to find them."""
        greedy = _LSTRIP | _RSTRIP | _SINGLE_WORD
        always = [p for p, a in zip(pieces, attributes, strict=True) if a & _USER_DEFINED and p]
        control = [p for p, a in zip(pieces, attributes, strict=True) if a & _CONTROL and p]
        marked = any(a & greedy for a in attributes if a & (_CONTROL | _USER_DEFINED))
        if self._kind != _BPE or marked:
            return None
        return {True: _alternatives(always + control), False: _alternatives(always)}

    def _read_pieces(self, size: int) -> list[bytes]:
        pieces = []
        room = 256
        buf = self._ffi.new("char[]", room)
        for i in range(size):
            length = self._lib.llama_token_to_piece(self._vocab, i, buf, room, 0, True)
            if length < 0:
                room = -length
                buf = self._ffi.new("char[]", room)
                length = self._lib.llama_token_to_piece(self._vocab, i, buf, room, 0, True)
            pieces.append(bytes(self._ffi.buffer(buf, length)))
        return pieces

    def _read_eos_ids(self, size: int) -> tuple[int, ...]:
        own = _existing(self._lib.llama_vocab_eos(self._vocab))
        ends = [i for i in range(size) if self._lib.llama_vocab_is_eog(self._vocab, i)]
        return tuple(([] if own is None else [own]) + [i for i in ends if i != own])

    def _read_special_tokens(self, pieces: list[bytes]) -> dict[str, str]:
        found = {
            "bos_token": _existing(self._lib.llama_vocab_bos(self._vocab)),
            "eos_token": _existing(self._lib.llama_vocab_eos(self._vocab)),
            "pad_token": _existing(self._lib.llama_vocab_pad(self._vocab)),
        }
        unknown = llama_abi.meta(self._model, "tokenizer.ggml.unknown_token_id")
        found["unk_token"] = None if unknown is None else _existing(int(unknown))
        return {n: pieces[i].decode("utf-8", "replace") for n, i in found.items() if i is not None}

    def _strips_leading_space(self) -> bool:
        if self._kind == _WPM:
            return True
        prefix = llama_abi.meta(self._model, "tokenizer.ggml.add_space_prefix")
        return self._kind in (_SPM, _UGM) and prefix != "false"


def _check_stretches(text: str) -> None:
    """Refuse a text that would overrun the stack of this thread."""
    room = (threading.stack_size() or _DEFAULT_STACK_BYTES) // _STACK_BYTES_PER_CHARACTER
    if len(text) <= room:
        return
    longest = max(len(match[0]) for match in _STRETCH.finditer(text))
    if longest > room:
        raise InvalidArgument(
            f"the text has a stretch of {longest} characters without (or of nothing but) white space; "
            f"this model's tokenizer can take {room}",
            reason="TEXT_TOO_LARGE",
        )


def _alternatives(texts: list[bytes]) -> re.Pattern[str]:
    words = sorted((t.decode("utf-8", "replace") for t in texts), key=len, reverse=True)
    # Without markers: a pattern that matches nowhere.
    return re.compile("(" + "|".join(map(re.escape, words)) + ")" if words else r"([^\s\S])")


def _existing(token_id: Any) -> int | None:
    return int(token_id) if token_id >= 0 else None


def _base_size(attributes: list[int]) -> int:
    """Added tokens come behind the trained vocabulary; control tokens inside it belong to it."""
    size = len(attributes)
    while size and attributes[size - 1] & (_CONTROL | _USER_DEFINED | _UNUSED):
        size -= 1
    return size


def _fingerprint(path: str | Path) -> str:
    digest = hashlib.sha256(b"gguf")
    for key, value in sorted(raw_metadata(path).items()):
        if key.startswith("tokenizer."):
            name = key.encode()
            digest.update(b"%d:%b%d:" % (len(name), name, len(value)) + value)
    return digest.hexdigest()
