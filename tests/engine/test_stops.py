"""Ends and hold-back: by hand, and against an unstreamed reading of the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.stops import Stopper, StopRules
from engine.core.types import FinishReason, StoppingParams
from tests.fakes.engine import EOS, EXTRA_EOS, MARKER, ByteCodec
from tokenizer_svc.text_stream import TextStream

CODEC = ByteCodec()
SPECIAL = {CODEC.pieces[i].decode(): i for i in CODEC.special_ids}


@dataclass
class Run:
    """What was shown token by token, and how it ended."""

    deltas: list[str]
    reason: FinishReason | None
    cause: int | str | None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


class Pieces:
    """A text stream whose tokens are whole strings."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def peek_text(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def rules(params: StoppingParams, *, room: int = 1000, skip: bool = True) -> StopRules:
    return StopRules.of(
        params,
        eos_ids=CODEC.eos_ids,
        special_tokens=SPECIAL,
        skip_special_tokens=skip,
        room=room,
    )


def feed(
    tokens: Sequence[int], params: StoppingParams, *, room: int = 1000, skip: bool = True
) -> Run:
    stopper = Stopper(rules(params, room=room, skip=skip), TextStream(CODEC, skip))
    deltas: list[str] = []
    for token in tokens:
        verdict = stopper.push(token)
        deltas.append(verdict.text)
        if verdict.reason is not None:
            return Run(deltas, verdict.reason, verdict.cause)
    return Run(deltas, None, None)


def feed_pieces(pieces: Sequence[str], params: StoppingParams) -> Run:
    stopper = Stopper(rules(params), Pieces(pieces))
    deltas: list[str] = []
    for token in range(len(pieces)):
        verdict = stopper.push(token)
        deltas.append(verdict.text)
        if verdict.reason is not None:
            return Run(deltas, verdict.reason, verdict.cause)
    return Run(deltas, None, None)


def whole(pieces: Sequence[str], params: StoppingParams) -> tuple[str, str | None]:
    """The text and the stop string, read without any streaming: the rules as they are written down."""
    text = ""
    for count, piece in enumerate(pieces, start=1):
        text += piece
        if count < params.min_tokens or not piece:
            continue
        for stop in params.stop:
            at = text.find(stop, max(0, len(text) - len(piece) - len(stop)))
            if at >= 0:
                end = at + len(stop) if params.include_stop_str_in_output else at
                return text[:end], stop
        if count == params.max_tokens:
            break
    return text, None


pieces = st.lists(st.text("ab", max_size=4), min_size=1, max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3, unique=True)


@settings(max_examples=1500, deadline=None)
@given(pieces, stops, st.booleans(), st.integers(0, 6), st.booleans())
def test_joined_deltas_are_the_unstreamed_text(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int, holds_longest: bool
) -> None:
    params = StoppingParams(
        max_tokens=len(pieces),
        min_tokens=min(min_tokens, len(pieces)),
        stop=tuple(stops),
        include_stop_str_in_output=include,
        hold_back_longest_stop=holds_longest,
    )
    text, stop = whole(pieces, params)
    run = feed_pieces(pieces, params)
    assert (run.text, run.cause) == (text, stop)
    assert run.reason is (FinishReason.STOP if stop else FinishReason.LENGTH)


@settings(max_examples=500, deadline=None)
@given(pieces, stops)
def test_only_what_can_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    run = feed_pieces([*pieces, "c"], StoppingParams(max_tokens=99, stop=tuple(stops)))
    seen = shown = ""
    for piece, delta in zip(pieces, run.deltas, strict=False):
        seen, shown = seen + piece, shown + delta
        held = seen[len(shown) :]
        if run.reason is None:
            assert not held or any(stop.startswith(held) for stop in stops)
    if run.reason is None:
        assert run.text == seen + "c", "a letter that begins no stop string frees everything"


@given(st.lists(st.integers(0, 255), max_size=30))
def test_text_is_the_decoding_of_all_bytes(data: list[int]) -> None:
    run = feed([*data, ord("x")], StoppingParams(max_tokens=len(data) + 1))
    assert run.text == bytes([*data, ord("x")]).decode(errors="replace")


def test_half_a_character_at_the_end_is_shown_as_one_replacement() -> None:
    half = list("é".encode())[:1]
    assert feed([65, *half], StoppingParams(max_tokens=2)).text == "A\ufffd"
    assert feed([65, *half, EOS], StoppingParams(max_tokens=9)).text == "A\ufffd"


def test_end_of_sequence_ends_without_a_cause() -> None:
    run = feed([65, EOS], StoppingParams(max_tokens=9, stop_token_ids=(EOS,)))
    assert (run.text, run.reason, run.cause) == ("A", FinishReason.STOP, None)


def test_further_ends_of_the_model_are_causes() -> None:
    assert feed([65, EXTRA_EOS], StoppingParams()).cause == EXTRA_EOS
    ignored = feed([65, EXTRA_EOS, EOS, 66], StoppingParams(ignore_eos=True, max_tokens=4))
    assert (ignored.text, ignored.reason) == ("AB", FinishReason.LENGTH)


def test_ignored_end_of_sequence_can_be_a_stop_token() -> None:
    run = feed([65, EOS], StoppingParams(ignore_eos=True, stop_token_ids=(EOS,)))
    assert (run.reason, run.cause) == (FinishReason.STOP, EOS)


def test_a_stop_token_takes_its_text_with_it_unless_it_is_wanted() -> None:
    assert feed([65, 66], StoppingParams(stop_token_ids=(66,))).text == "A"
    kept = StoppingParams(stop_token_ids=(66,), include_stop_str_in_output=True)
    assert feed([65, 66], kept).text == "AB"
    shown = feed([65, EOS], StoppingParams(include_stop_str_in_output=True), skip=False)
    assert shown.text == "A</s>"


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    assert feed([65, EOS], StoppingParams(max_tokens=2)).reason is FinishReason.STOP
    assert feed([65, 66], StoppingParams(max_tokens=2, stop=("B",))).cause == "B"
    assert feed([65, 66], StoppingParams(max_tokens=2)).reason is FinishReason.LENGTH


def test_the_context_is_a_length() -> None:
    run = feed([65, 66, 67], StoppingParams(), room=2)
    assert (run.text, run.reason) == ("AB", FinishReason.LENGTH)


def test_the_first_stop_string_of_the_list_wins() -> None:
    run = feed(list(b"xSTOPy"), StoppingParams(stop=("TOP", "STOP")))
    assert (run.text, run.cause) == ("xS", "TOP")


def test_a_stop_string_over_several_tokens_and_inside_one() -> None:
    split = feed_pieces(
        ["north ", "ea", "st so", "uth", " west"], StoppingParams(stop=("east south",))
    )
    assert split.text == "north "
    inside = feed_pieces(["a", "n outh west"], StoppingParams(stop=("out",)))
    assert inside.text == "an "
    kept = StoppingParams(stop=("out",), include_stop_str_in_output=True)
    assert feed_pieces(["a", "n outh west"], kept).text == "an out"


def test_no_part_of_a_matched_stop_string_was_shown() -> None:
    run = feed(list(b"abc###xyz"), StoppingParams(stop=("###",)))
    assert run.deltas[:6] == ["a", "b", "c", "", "", ""] and run.text == "abc"


def test_a_false_start_is_shown_as_soon_as_it_is_one() -> None:
    run = feed(list(b"a##b"), StoppingParams(stop=("###",), max_tokens=9))
    assert run.deltas == ["a", "", "", "##b"]


def test_a_long_stop_string_delays_nothing_that_it_cannot_begin_with() -> None:
    run = feed(list(b"hello"), StoppingParams(stop=("Z" * 50,), max_tokens=9))
    assert run.deltas == ["h", "e", "l", "l", "o"]


def test_the_longest_stop_string_delays_everything_when_that_is_wanted() -> None:
    params = StoppingParams(stop=("Z" * 4,), max_tokens=6, hold_back_longest_stop=True)
    assert feed(list(b"hello!"), params).deltas == ["", "", "", "h", "e", "llo!"]


def test_min_tokens_shuts_every_check() -> None:
    params = StoppingParams(min_tokens=4, max_tokens=9, stop=("B",), stop_token_ids=(67,))
    run = feed([EOS, 66, 67, 68, 66], params)
    assert (run.text, run.cause) == ("BCD", "B")
    # A stop string that was completed just before the first check is inside its window.
    edge = feed([65, 66, 68], StoppingParams(min_tokens=3, max_tokens=9, stop=("B",)))
    assert (edge.text, edge.cause) == ("A", "B")


@pytest.mark.parametrize("include", [False, True])
def test_a_special_tokens_name_stops_at_the_token(include: bool) -> None:
    params = StoppingParams(stop=("zz", "<|marker|>"), include_stop_str_in_output=include)
    run = feed([65, ord("z"), MARKER, 66], params)
    assert (run.text, run.reason, run.cause) == ("Az", FinishReason.STOP, "<|marker|>")


def test_a_special_tokens_name_is_text_where_special_tokens_are_shown() -> None:
    run = feed([65, MARKER, 66], StoppingParams(stop=("<|mark",)), skip=False)
    assert (run.text, run.cause) == ("A", "<|mark")
    spelled = feed(list(b"A<|marker|>B"), StoppingParams(stop=("<|marker|>",)))
    assert spelled.text == "A"
