"""Streaming text: the joined stream is the decoded whole, and no character comes in halves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_svc.codec import open_codec
from tokenizer_svc.text_stream import TextStream
from tokenizer_svc.vocabulary import Vocabulary

_EMOJI = "👩‍🚀".encode()
_PIECES = [
    *(bytes([b]) for b in range(256)),
    b"ab", b" c", b" ", b"  ", b".", b" \xf0\x9f", b"\x98\x80", b"\xe7\x95", b"\xe7\x95\x8c x",
    "é".encode(), "\ufffd".encode(), b"a\xff", b"\xff\xfeb", b"<s>", b"</s>", b"",
    *(_EMOJI[n : n + 2] for n in range(0, len(_EMOJI), 2)),
]  # fmt: skip
_SPECIAL = frozenset((_PIECES.index(b"<s>"), _PIECES.index(b"</s>")))


def vocabulary(strips_leading_space: bool = False) -> Vocabulary:
    return Vocabulary(
        pieces=_PIECES,
        base_vocab_size=len(_PIECES),
        special_ids=_SPECIAL,
        eos_ids=(),
        bos_id=None,
        prefix_ids=(),
        suffix_ids=(),
        strips_leading_space=strips_leading_space,
        chat_template=None,
        fingerprint="",
    )


def ids_of(*pieces: bytes) -> list[int]:
    return [_PIECES.index(piece) for piece in pieces]


@given(
    ids=st.lists(st.integers(0, len(_PIECES) + 2), max_size=80),
    skip=st.booleans(),
    strips=st.booleans(),
)
def test_the_joined_stream_is_the_decoded_whole(ids: list[int], skip: bool, strips: bool) -> None:
    vocab = vocabulary(strips)
    stream = TextStream(vocab, skip_special_tokens=skip)
    parts = []
    for i in ids:
        peeked = stream.peek_text(i)
        assert stream.peek_text(i) == peeked  # looking changes nothing
        parts.append(stream.push(i))
        assert parts[-1] == peeked
    assert "".join(parts) + stream.flush() == vocab.decode(ids, skip)


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_valid_text_never_shows_a_replacement_character(text: str, cuts: list[int]) -> None:
    text = text.replace("\ufffd", "")
    stream = TextStream(vocabulary())
    parts = [stream.push(b) for b in text.encode()]
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) == text and stream.flush() == ""


@given(st.lists(st.integers(0, 255), max_size=600))
def test_what_is_held_back_is_bounded(data: list[int]) -> None:
    stream = TextStream(vocabulary())
    for b in data:
        stream.push(b)
        assert len(stream.held_bytes) <= 64


def test_a_character_of_several_tokens_comes_whole_with_the_last() -> None:
    stream = TextStream(vocabulary())
    first, second = ids_of(b" \xf0\x9f", b"\x98\x80")
    assert [stream.push(first), stream.push(second)] == ["", " 😀"]


def test_a_bad_byte_comes_out_with_the_next_text() -> None:
    stream = TextStream(vocabulary())
    assert [stream.push(0xFF), stream.push(ord("x"))] == ["", "\ufffdx"]


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    stream = TextStream(vocabulary())
    (cut,) = ids_of(b" \xf0\x9f")
    assert [stream.push(ord("a")), stream.push(cut)] == ["a", ""]
    assert stream.held_bytes == b" \xf0\x9f"
    assert stream.flush() == " \ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_shown_or_skipped() -> None:
    ids = ids_of(b"<s>", b"ab", b"</s>")
    shown, hidden = TextStream(vocabulary(), False), TextStream(vocabulary(), True)
    assert [shown.push(i) for i in ids] == ["<s>", "ab", "</s>"]
    assert [hidden.push(i) for i in ids] == ["", "ab", ""]


def test_partial_characters_between_spaces_come_once() -> None:
    # Cumulative text 'B 界<part>' → 'B 界x<part>' → 'B 界xy', as bytes that arrive out of step.
    stream = TextStream(vocabulary())
    pieces = [b"\xe7\x95", b"\x8c", b"x", b" ", b"\xe7\x95", b"\x8c"]
    text = "".join(stream.push(i) for i in [ord("B"), ord(" "), *ids_of(*pieces)])
    assert text == "B 界x 界"


def test_spaces_before_punctuation_stay_because_they_were_sent() -> None:
    ids = ids_of(b"  ", b"  ", b".", b" ", b",", b" ", b"!")
    stream = TextStream(vocabulary())
    assert "".join(stream.push(i) for i in ids) == "    . , !" == vocabulary().decode(ids)


def test_a_leading_space_is_stripped_once_where_the_vocabulary_says_so() -> None:
    ids = ids_of(b" c", b" c")
    stream = TextStream(vocabulary(strips_leading_space=True))
    assert [stream.peek_text(ids[0]), stream.push(ids[0]), stream.push(ids[1])] == ["c", "c", " c"]
    plain = TextStream(vocabulary())
    assert plain.push(ids[0]) == " c"


@pytest.mark.parametrize(
    "text", ["👩‍🚀🌍é漢", "  two  spaces ", "the process\r\n\tof 123", "a\ufffdb"]
)
def test_the_default_model_streams_what_it_decodes(text: str, model_path: Path) -> None:
    codec = open_codec(model_path)
    ids = codec.encode(text)
    stream = TextStream(codec)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) == text == codec.decode(ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in part for part in parts)
