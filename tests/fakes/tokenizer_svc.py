"""Small tokenizers made on the spot: a model folder, and GGUF files of both families of vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFWriter, TokenType

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_alphabet() -> list[str]:
    """The 256 letters of byte-level BPE, by byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(sorted(set(ByteLevel.alphabet()) - {chr(b) for b in printable}))
    return [chr(b) if b in printable else next(moved) for b in range(256)]


def bpe_tokens() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a tiny byte-level vocabulary; the markers are not in it."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ w", "ð Ł", "Ġ ðŁ", "ĺ Ģ"]
    return byte_alphabet() + [m.replace(" ", "") for m in merges], merges


def hf_folder(folder: Path, *, eos: str = "<|im_end|>", bos_in_front: bool = False) -> Path:
    """A model folder with a byte-level BPE tokenizer, its markers added behind the vocabulary."""
    tokens, merges = bpe_tokens()
    folder.mkdir(parents=True, exist_ok=True)
    added = [
        {"id": len(tokens) + n, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for n, text in enumerate(MARKERS)
    ]
    processor: dict[str, Any] | None = None
    if bos_in_front:
        bos = {"SpecialToken": {"id": MARKERS[1], "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {
                MARKERS[1]: {"id": MARKERS[1], "ids": [len(tokens) + 1], "tokens": [MARKERS[1]]}
            },
        }
    _write(folder / "tokenizer.json", _bpe_json(tokens, merges, added, processor))
    config = {
        "bos_token": MARKERS[1],
        "eos_token": {"content": eos},
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": [len(tokens), len(tokens) + 2]})
    return folder


def hf_folder_from_gguf(gguf: Path, folder: Path) -> Path:
    """The default model's vocabulary as a Hugging Face folder: the reference for its encoding."""
    fields = GGUFReader(gguf).fields
    value = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    tokens, kinds = value["tokenizer.ggml.tokens"], value["tokenizer.ggml.token_type"]
    added = [
        {"id": i, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    described = _bpe_json(tokens, value["tokenizer.ggml.merges"], added, None)
    digits = {"type": "Digits", "individual_digits": True}
    described["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, described["pre_tokenizer"]],
    }
    _write(folder / "tokenizer.json", described)
    config = {
        "bos_token": tokens[value["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[value["tokenizer.ggml.eos_token_id"]],
        "chat_template": value["tokenizer.chat_template"],
    }
    _write(folder / "tokenizer_config.json", config)
    return folder


def bpe_gguf(path: Path, *, pre: str = "gpt-2", template: str | None = CHAT_TEMPLATE) -> Path:
    """A GGUF file with the same tiny vocabulary and no weights."""
    tokens, merges = bpe_tokens()
    writer = _gguf(path)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *MARKERS])
    writer.add_token_types([TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(MARKERS))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) + 1)
    writer.add_eos_token_id(len(tokens) + 2)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    return _finish(writer, path)


def spm_gguf(path: Path) -> Path:
    """A GGUF file with a tiny SentencePiece vocabulary: BOS in front, a space in front, byte tokens."""
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "▁h",
        "he",
        "ll",
        "hell",
        "▁hell",
        "▁hello",
        "▁w",
        "w",
        "r",
        "d",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(words)
    writer = _gguf(path)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([0.0] * 259 + [-float(20 - len(word)) for word in words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return _finish(writer, path)


def _gguf(path: Path) -> GGUFWriter:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _bpe_json(
    tokens: list[str], merges: list[str], added: list[dict[str, Any]], processor: Any
) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        # What training leaves behind; a server must not cut or pad by it.
        "truncation": {
            "direction": "Right",
            "max_length": 8,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": processor,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
