"""One suite for every carrier of a tokenizer, and the two carriers against each other."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from candor.errors import InvalidArgument
from tests.fakes import tokenizer_svc as fakes
from tokenizer_svc.codec import Codec, open_codec
from tokenizer_svc.gguf_codec import LINEAR_SPLITTERS
from tokenizer_svc.text_stream import TextStream
from tokenizer_svc.vocabulary import Vocabulary, special_tokens_around

Make = Callable[[Path], Path]

CARRIERS: dict[str, Make] = {
    "bpe-gguf": lambda folder: fakes.bpe_gguf(folder / "tiny.gguf"),
    "bpe-folder": lambda folder: fakes.hf_folder(folder / "tiny"),
    "bpe-folder-with-bos": lambda folder: fakes.hf_folder(folder / "bos", bos_in_front=True),
    "spm-gguf": lambda folder: fakes.spm_gguf(folder / "spm.gguf"),
}

TEXTS = [
    "", " ", "a", "hello", " hello", "  two  spaces ", "\n\nx\r\n", "a\tb", "Key:Value",
    "👩‍🚀é漢字", "\x00nul", "don't", "1234567890", "def f(x):\r\n    return", "\u2028\u0301", "\ufffd",
]  # fmt: skip


@pytest.fixture(params=CARRIERS)
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> Codec:
    return open_codec(CARRIERS[request.param](tmp_path))


# --- every carrier -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_the_round_trip(codec: Codec, text: str) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    assert codec.decode(ids) == text
    assert all(0 <= i < codec.vocab_size for i in ids)
    assert (ids == []) == (text == "")


@pytest.mark.parametrize("text", TEXTS)
def test_special_tokens_are_put_around_exactly_when_asked_for(codec: Codec, text: str) -> None:
    plain = codec.encode(text, add_special_tokens=False)
    full = codec.encode(text, add_special_tokens=True)
    prefix = full[: len(full) - len(plain)]
    assert full == prefix + plain
    assert set(prefix) <= codec.special_ids
    assert codec.decode(full, skip_special_tokens=True) == text


def test_ids_that_do_not_exist_vanish(codec: Codec) -> None:
    (a,) = codec.encode("a", add_special_tokens=False)[-1:]
    outside = [codec.vocab_size, 2**32 - 1, -1]
    assert codec.decode([*outside, a, *outside]) == codec.decode([a])
    assert [codec.piece(i) for i in outside] == [b"", b"", b""]


def test_pieces_joined_are_the_text(codec: Codec) -> None:
    ids = codec.encode("hello w😀", add_special_tokens=False)
    joined = b"".join(codec.piece(i) for i in ids)
    assert joined.removeprefix(b" ").decode() == "hello w😀"
    assert codec.piece(ids[-1]) == codec.pieces[ids[-1]]


def test_half_a_character_is_one_replacement_character(codec: Codec) -> None:
    ids = codec.encode("a漢", add_special_tokens=False)
    assert codec.decode(ids[:-1]) == "a\ufffd"


def test_end_of_generation_ids_exist_and_are_special(codec: Codec) -> None:
    assert codec.eos_ids
    assert set(codec.eos_ids) <= codec.special_ids
    assert codec.special_tokens["eos_token"].encode() == codec.piece(codec.eos_ids[0])
    assert codec.bos_id is not None
    assert codec.special_tokens["bos_token"].encode() == codec.piece(codec.bos_id)


def test_a_special_token_in_the_text_becomes_the_token_unless_told_otherwise(codec: Codec) -> None:
    eos = codec.eos_ids[0]
    text = f"a{codec.special_tokens['eos_token']}\r\nb"
    assert codec.encode(text, parse_special=True).count(eos) == 1
    assert eos not in codec.encode(text, parse_special=False)
    assert codec.decode(codec.encode(text, False, parse_special=False)) == text


def test_truncation_keeps_special_tokens_and_the_end(codec: Codec) -> None:
    plain = codec.encode("hello hello hello", add_special_tokens=False)
    full = codec.encode("hello hello hello", add_special_tokens=True)
    added = len(full) - len(plain)
    for k in range(1, len(full) + 2):
        cut = codec.keep_last(full, k, has_special_tokens=True)
        assert len(cut) == min(k, len(full))
        assert cut == (full[:added] + plain[max(0, len(plain) - (k - added)) :])[:k]
        assert codec.keep_last(plain, k, has_special_tokens=False) == plain[-k:]
    assert codec.keep_last(plain, 0, has_special_tokens=False) == []
    assert codec.keep_last(full, 0, has_special_tokens=True) == []


def test_streams_equal_decoding_for_any_ids(codec: Codec) -> None:
    rng = random.Random(7)
    for _ in range(200):
        ids = [rng.randrange(codec.vocab_size + 2) for _ in range(rng.randrange(30))]
        for skip in (False, True):
            stream = TextStream(codec, skip)
            assert "".join(map(stream.push, ids)) + stream.flush() == codec.decode(ids, skip)


def test_a_megabyte_is_encoded_whole(codec: Codec) -> None:
    # The folders' own truncation and padding must not show either.
    for text in ("hello " * 170_000, "h" * 1_000_000):
        assert codec.decode(codec.encode(text, add_special_tokens=False)) == text


def test_several_threads_get_the_same_ids(codec: Codec) -> None:
    texts = [f"hello {n} <|im_end|> wörld {n}" * 20 for n in range(20)]
    expected = [codec.encode(text) for text in texts]
    seen: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: seen.append([codec.encode(t) for t in texts]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 4


def test_the_fingerprint_is_the_same_in_another_process(
    codec: Codec, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = CARRIERS[request.node.callspec.params["codec"]](tmp_path)
    code = "import sys; from tokenizer_svc.codec import open_codec; print(open_codec(sys.argv[1]).fingerprint)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == codec.fingerprint
    assert len(codec.fingerprint) == 64


# --- what is special to one --------------------------------------------------------------------------


def test_the_two_carriers_of_one_vocabulary_agree(tmp_path: Path) -> None:
    gguf, folder = (
        open_codec(CARRIERS["bpe-gguf"](tmp_path)),
        open_codec(CARRIERS["bpe-folder"](tmp_path)),
    )
    assert gguf.pieces == folder.pieces
    assert gguf.special_ids == folder.special_ids
    assert gguf.eos_ids == folder.eos_ids
    assert gguf.bos_id == folder.bos_id
    assert gguf.base_vocab_size == folder.base_vocab_size == gguf.vocab_size - len(fakes.MARKERS)
    assert gguf.chat_template == folder.chat_template == fakes.CHAT_TEMPLATE
    for text in [
        *TEXTS,
        "<|im_start|>user\nhello<|im_end|><|im_end|> hello",
        "<|im_<|im_end|>end|>",
    ]:
        for parse in (True, False):
            assert gguf.encode(text, parse_special=parse) == folder.encode(
                text, parse_special=parse
            )


def test_the_fingerprint_changes_with_vocabulary_and_template_only(tmp_path: Path) -> None:
    one = open_codec(fakes.bpe_gguf(tmp_path / "one.gguf")).fingerprint
    assert open_codec(fakes.bpe_gguf(tmp_path / "two.gguf")).fingerprint == one
    other_rule = fakes.bpe_gguf(tmp_path / "rule.gguf", pre="llama-bpe")
    assert open_codec(other_rule).fingerprint != one
    other_template = fakes.bpe_gguf(tmp_path / "template.gguf", template="{{ messages }}")
    assert open_codec(other_template).fingerprint != one
    folder = fakes.hf_folder(tmp_path / "folder")
    before = open_codec(folder).fingerprint
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert open_codec(folder).fingerprint != before


def test_a_template_file_in_the_folder_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = fakes.hf_folder(tmp_path / "folder")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert open_codec(folder).chat_template == "plain"
    (folder / "chat_template.jinja").write_text("from the file")
    assert open_codec(folder).chat_template == "from the file"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    assert open_codec(fakes.bpe_gguf(tmp_path / "a.gguf", template=None)).chat_template is None


def test_sentencepiece_strips_the_space_it_put_in_front(tmp_path: Path) -> None:
    codec = open_codec(fakes.spm_gguf(tmp_path / "spm.gguf"))
    ids = codec.encode("hello hello")
    assert isinstance(codec, Vocabulary)
    assert codec.prefix_ids == (codec.bos_id,)
    assert [codec.piece(i) for i in ids][:2] == [b"<s>", b" h"]
    assert codec.decode(ids) == "<s> hello hello"
    assert codec.decode(ids, skip_special_tokens=True) == "hello hello"


def test_special_tokens_have_to_be_around_a_text() -> None:
    assert special_tokens_around([5, 6], [1, 5, 6, 2, 3]) == ((1,), (2, 3))
    assert special_tokens_around([5], [5]) == ((), ())
    with pytest.raises(ValueError, match="not put around the text"):
        special_tokens_around([5, 6], [5, 1, 6])


def test_what_is_no_tokenizer_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a GGUF file nor a folder"):
        open_codec(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        open_codec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        open_codec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        open_codec(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        open_codec(text)


def test_a_folder_whose_decoder_is_unknown_is_refused(tmp_path: Path) -> None:
    folder = fakes.hf_folder(tmp_path / "folder")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="has decoder BPEDecoder; ByteLevel"):
        open_codec(folder)


def test_a_stretch_that_would_overrun_the_stack_is_refused(tmp_path: Path) -> None:
    codec = open_codec(fakes.bpe_gguf(tmp_path / "tekken.gguf", pre="tekken"))
    for text in (" " * 100_000, "a" * 100_000):
        with pytest.raises(InvalidArgument, match="a stretch of 100000 characters"):
            codec.encode(text)
    long_but_broken = "hello " * 20_000
    assert codec.decode(codec.encode(long_but_broken)) == long_but_broken
    assert len(codec.encode(" " * 8000)) == 8000


def test_the_splitting_rules_that_take_any_text_really_do(tmp_path: Path) -> None:
    # In a process of its own, since the proof of the contrary is a crash; with a small stack.
    code = """
import pathlib, sys, threading
from tests.fakes import tokenizer_svc as fakes
from tokenizer_svc.gguf_codec import LINEAR_SPLITTERS, GgufCodec

def work():
    for rule in sorted(LINEAR_SPLITTERS):
        codec = GgufCodec(fakes.bpe_gguf(pathlib.Path(sys.argv[1]), pre=rule))
        for stretch in ("a", "A", " ", "\\n", "!", "1", "漢", "\u0301", "!\\n"):
            assert codec.decode(codec.encode(stretch * 10_000)) == stretch * 10_000
        print(rule, flush=True)

threading.stack_size(1024 * 1024)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "any.gguf")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == sorted(LINEAR_SPLITTERS)


def test_a_text_that_would_take_the_library_minutes_is_refused(tmp_path: Path) -> None:
    codec = open_codec(fakes.spm_gguf(tmp_path / "spm.gguf"))
    with pytest.raises(InvalidArgument, match="1000000 characters that are not in this model's"):
        codec.encode("é" * 1_000_000)
    assert codec.decode(codec.encode("é" * 10_000, add_special_tokens=False)) == "é" * 10_000


def test_a_text_full_of_markers_takes_linear_time(model_path: Path) -> None:
    # Left to the library this is quadratic and takes many seconds.
    codec = open_codec(model_path)
    start = codec.piece(1).decode()
    assert codec.encode(start * 80_000) == [1] * 80_000


# --- the default models ------------------------------------------------------------------------------


def varied_texts() -> list[str]:
    """A few hundred texts that tokenizers disagree about when they can."""
    rng = random.Random(20240814)
    parts = [
        "The quick brown fox", " jumps", "don't", "we'll", " I'M", "'s", "123", "4", " 5678",
        "3.14", "٣٤", "½", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0",
        "\u3000", "\u2003", "é", "e\u0301", "ß", "漢字", "カタカナ", "한국어", "नमस्ते", "עברית",
        "مرحبا", "👩‍🚀", "🌍", "🇩🇪", "👍🏽", "\u200b", "\u200d", "\ufeff", "<|im_start|>",
        "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_", "start|>", "<", "|", ">",
        "```python\n", "def f(x):\r\n    return x**2", "{\"a\": [1, 2]}",
        "https://example.org/?q=a%20b", "_", "__init__", "CamelCase", "...", "!?", "—",
        "“quoted”", "$9.99", "50%", "a_b-c", "\x00", "\x7f", "\x1b[0m", "\ufffd", "𝔘𝔫𝔦", "ǅ",
        "ﬁ",
    ]  # fmt: skip
    return parts + ["".join(rng.choices(parts, k=rng.randint(2, 12))) for _ in range(400)]


def test_the_default_model_encodes_as_hugging_face_does(model_path: Path, tmp_path: Path) -> None:
    gguf = open_codec(model_path)
    reference = open_codec(fakes.hf_folder_from_gguf(model_path, tmp_path / "reference"))
    assert gguf.pieces == reference.pieces
    for text in varied_texts():
        ids = gguf.encode(text)
        assert ids == reference.encode(text), text
        assert gguf.decode(ids) == text
        assert gguf.encode(text, parse_special=False) == reference.encode(text, parse_special=False)


def test_the_default_model_is_described_rightly(model_path: Path) -> None:
    codec = open_codec(model_path)
    assert (codec.vocab_size, codec.base_vocab_size) == (49152, 49152)
    assert codec.special_ids == set(range(17))
    assert (codec.bos_id, codec.eos_ids[0]) == (1, 2)
    assert set(codec.eos_ids) == {0, 2, 4}
    assert codec.special_tokens["eos_token"] == "<|im_end|>"
    assert codec.chat_template is not None and "<|im_start|>" in codec.chat_template
    assert codec.encode("hello", add_special_tokens=True) == codec.encode("hello", False)


def test_line_endings_pass_unchanged(model_path: Path) -> None:
    codec = open_codec(model_path)
    windows, unix = codec.encode("def f(x):\r\n    return"), codec.encode("def f(x):\n    return")
    assert windows != unix
    assert codec.decode(windows) == "def f(x):\r\n    return"


def test_a_marker_is_recognised_whatever_follows(model_path: Path) -> None:
    codec = open_codec(model_path)
    ids = codec.encode("<jupyter_start>a\r\n<jupyter_text>\r\nb<jupyter_code>")
    assert [i for i in ids if i in codec.special_ids] == [11, 12, 13]


def test_the_embedding_model_puts_its_frame_around_and_is_not_cut() -> None:
    from candor.cli.models import ensure

    codec = open_codec(ensure("all-minilm-l6-v2"))
    ids = codec.encode("Hello, unbelievableness! " * 100)
    assert (codec.piece(ids[0]), codec.piece(ids[-1])) == (b" [CLS]", b" [SEP]")
    assert len(ids) == 502
    assert codec.decode(ids[:6], skip_special_tokens=True) == "hello , unbelievableness !"
    assert codec.keep_last(ids, 4, has_special_tokens=True) == [ids[0], *ids[-3:]]
    assert codec.chat_template is None and codec.eos_ids == ()
