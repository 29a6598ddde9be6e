"""The tokenizer of a Hugging Face model folder, worked by the `tokenizers` library.

Knows the files of such a folder and how its decoders write tokens down as bytes. Of the decoders it knows
byte-level BPE, SentencePiece's (with byte fall-back) and WordPiece; a folder with another one is refused
rather than decoded wrongly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from tokenizer_svc.vocabulary import Vocabulary, special_tokens_around

_LARGE_CHARACTERS = 2048
"""From here on the batch entry is used, because it releases the interpreter lock."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEMPLATE_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class HfCodec(Vocabulary):
    """Encodes and decodes with the `tokenizer.json` of one folder."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError when the folder has no tokenizer that can be used."""
        folder = Path(folder)
        source = _read(folder / "tokenizer.json")
        if source is None:
            raise ValueError(f"{folder} has no tokenizer.json")
        # How the training pipeline cut and padded its batches is no business of a server.
        tokenizer_json = _load_json(source, folder / "tokenizer.json") | {
            "truncation": None,
            "padding": None,
        }
        canonical = json.dumps(tokenizer_json, sort_keys=True, ensure_ascii=False)
        self._parsing = _open(canonical, folder)
        self._plain = _open(canonical, folder)
        # A switch of the whole tokenizer, so that "as plain text" needs a second one.
        self._plain.encode_special_tokens = True
        config = _load_optional(folder / "tokenizer_config.json")
        added = self._parsing.get_added_tokens_decoder()
        ids = self._parsing.get_vocab(with_added_tokens=True)
        write, write_added, strips = _writer(tokenizer_json.get("decoder"), folder)
        pieces = [b""] * (max(ids.values(), default=-1) + 1)
        for token, i in ids.items():
            pieces[i] = write_added(token) if i in added else write(token)
        named = dict(_special_tokens(config))
        template = _template(folder, config)
        eos_ids = tuple(_eos_ids(folder, ids.get(named.get("eos_token", ""))))
        prefix, suffix = special_tokens_around(
            self._parsing.encode("a", add_special_tokens=False).ids,
            self._parsing.encode("a", add_special_tokens=True).ids,
        )
        digest = hashlib.sha256(b"hf")
        for part in (canonical, template or "", repr(sorted(named.items()))):
            digest.update(b"%d:" % len(part.encode()) + part.encode())
        super().__init__(
            pieces=pieces,
            base_vocab_size=self._parsing.get_vocab_size(with_added_tokens=False),
            special_ids=frozenset(i for i, token in added.items() if token.special),
            eos_ids=eos_ids,
            bos_id=ids.get(named.get("bos_token", "")),
            prefix_ids=prefix,
            suffix_ids=suffix,
            strips_leading_space=strips,
            special_tokens=named,
            chat_template=template,
            fingerprint=digest.hexdigest(),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The token ids of `text`. `parse_special`: text that spells a control token becomes it."""
        tokenizer = self._parsing if parse_special else self._plain
        if len(text) < _LARGE_CHARACTERS:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)


def _open(source: str, folder: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from error


# --- files -------------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _load_json(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _load_optional(path: Path) -> dict[str, Any]:
    text = _read(path)
    return {} if text is None else _load_json(text, path)


def _special_tokens(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _TEMPLATE_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield name, text


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    own_file = _read(folder / "chat_template.jinja")
    if own_file is not None:
        return own_file
    value = config.get("chat_template")
    if isinstance(value, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _eos_ids(folder: Path, own: int | None) -> list[int]:
    ids = [] if own is None else [own]
    for file in ("generation_config.json", "config.json"):
        value = _load_optional(folder / file).get("eos_token_id")
        more = value if isinstance(value, list) else [value]
        ids += [i for i in more if isinstance(i, int) and i not in ids]
    return ids


# --- tokens as bytes ---------------------------------------------------------------------------------


_Write = Callable[[str], bytes]


def _writer(decoder: Any, folder: Path) -> tuple[_Write, _Write, bool]:
    """How a token and an added token are written as bytes, and whether a text loses its leading space."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"]: step for step in steps if step}
    if "ByteLevel" in kinds:
        return _byte_level, str.encode, False
    if "WordPiece" in kinds:
        prefix = kinds["WordPiece"].get("prefix", "##")

        def write(token: str) -> bytes:
            return _word_piece(token, prefix)

        return write, write, True
    if "Metaspace" in kinds:
        return (
            _sentence_piece,
            str.encode,
            kinds["Metaspace"].get("prepend_scheme", "always") != "never",
        )
    if "ByteFallback" in kinds:
        return _sentence_piece, str.encode, kinds.get("Strip", {}).get("start", 0) > 0
    names = ", ".join(kinds) or "none"
    raise ValueError(
        f"{folder / 'tokenizer.json'} has decoder {names}; "
        "ByteLevel, WordPiece, Metaspace and ByteFallback are known"
    )


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest moves above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    return alphabet | {chr(256 + n): b for n, b in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[c] for c in token)
    except KeyError:
        return token.encode()  # outside the alphabet: a token written as itself


def _sentence_piece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()


def _word_piece(token: str, prefix: str) -> bytes:
    return token[len(prefix) :].encode() if token.startswith(prefix) else b" " + token.encode()
