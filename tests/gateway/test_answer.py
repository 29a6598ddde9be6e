"""From events to pieces: order, counting, ranking, exactly one ending."""

from __future__ import annotations

import pytest

from candor import errors
from gateway.dialects.vllm05.answer import Assembly, PromptFacts
from gateway.events import ChoiceEnd, Delta, Finished, Tagged, TokenLogprobs
from gateway.spec import GenerationSpec


def delta(choice: int, text: str, end: ChoiceEnd | None = None, count: int = 1) -> Delta:
    return Delta(choice, tuple(range(count)), text, (), end)


def end(reason: str = "length", score: float = 0.0, by: int | str | None = None) -> ChoiceEnd:
    return ChoiceEnd(reason, by, score)


def told(assembly: Assembly, *events: Delta | Finished, prompt: int = 0) -> list[tuple[int, str]]:
    return [
        (piece.choice.index, piece.text)
        for event in events
        for piece in assembly.feed(Tagged(prompt, event))
    ]


def assembly(num_prompts: int = 1, **spec: object) -> Assembly:
    prompts = [PromptFacts(num_tokens=4) for _ in range(num_prompts)]
    spec.setdefault("best_of", spec.get("n", 1))
    return Assembly(GenerationSpec(**spec), prompts)  # type: ignore[arg-type]


def test_pieces_come_in_the_order_of_the_deltas() -> None:
    a = assembly(n=2)
    said = told(a, delta(1, "x"), delta(0, "a"), delta(1, "y", end()), delta(0, "b", end()))
    assert said == [(1, "x"), (0, "a"), (1, "y"), (0, "b")]
    assert told(a, Finished(0)) == []
    assert a.num_completion_tokens == 4


def test_index_counts_prompts_times_n() -> None:
    a = assembly(num_prompts=3, n=2)
    assert told(a, delta(1, "x"), prompt=2) == [(5, "x")]


def test_a_joined_delta_is_one_piece_per_token_with_the_text_last() -> None:
    a = assembly()
    pieces = list(a.feed(Tagged(0, delta(0, "abc", end("stop"), count=3))))
    assert [(p.text, p.num_tokens, p.end is not None) for p in pieces] == [
        ("", 1, False),
        ("", 2, False),
        ("abc", 3, True),
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("abcd", ["ab", "", "cd"]), ("abc", ["", "", "abc"]), ("", ["", "", ""])],
    ids=["as the tokens say", "cut", "held back"],
)
def test_a_joined_delta_is_split_where_its_tokens_spell_its_text(
    text: str, pieces: list[str]
) -> None:
    entries = tuple(TokenLogprobs((i,), (0.0,), (1,), (t,)) for i, t in enumerate(("ab", "", "cd")))
    joined = Delta(0, (0, 1, 2), text, entries, None)
    got = list(assembly().feed(Tagged(0, joined)))
    assert [piece.text for piece in got] == pieces
    assert [piece.logprobs for piece in got] == list(entries)


def test_a_finished_choice_says_nothing_more() -> None:
    a = assembly()
    assert told(a, delta(0, "a", end()), delta(0, "b"), delta(0, "c", end())) == [(0, "a")]
    assert a.num_completion_tokens == 1


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_internal_reasons_never_reach_the_client(reason: str) -> None:
    with pytest.raises(errors.Internal, match=reason):
        told(assembly(), delta(0, "a", end(reason)))


def test_an_answer_without_a_finish_reason_is_an_error() -> None:
    with pytest.raises(errors.Internal, match="without a finish reason"):
        told(assembly(n=2), delta(0, "a", end()), delta(1, "b"), Finished(0))


def test_best_of_keeps_the_likeliest_and_counts_only_them() -> None:
    a = assembly(n=2, best_of=3)
    events = [
        delta(0, "a"),
        delta(1, "b"),
        delta(2, "c"),
        delta(0, "A", end(score=-3.0)),
        delta(1, "B", end(score=-1.0)),
        delta(2, "C", end("stop", score=-2.0)),
    ]
    assert told(a, *events) == []
    assert told(a, Finished(0)) == [(0, "b"), (0, "B"), (1, "c"), (1, "C")]
    assert a.num_completion_tokens == 4
    assert [c.end.finish_reason for c in a.choices if c.end] == ["length", "stop"]


def test_equal_scores_keep_the_order_of_the_candidates() -> None:
    a = assembly(n=1, best_of=2)
    assert told(a, delta(1, "b", end()), delta(0, "a", end()), Finished(0)) == [(0, "a")]


def test_a_beam_is_scored_by_its_length_without_the_end_token() -> None:
    # 4 prompt tokens. Beam 0: 4+2 tokens, -6 -> -1.0. Beam 1: 4+3-1 (EOS), -5.4 -> -0.9.
    a = assembly(n=1, best_of=2, use_beam_search=True, length_penalty=1.0)
    events = [
        delta(0, "aa", end("length", score=-6.0), count=2),
        delta(1, "bbb", end("stop", score=-5.4), count=3),
    ]
    assert told(a, *events, Finished(0))[-1] == (0, "bbb")
    # The same two when length counts for nothing.
    b = assembly(n=1, best_of=2, use_beam_search=True, length_penalty=0.0)
    low = [delta(0, "a", end(score=-1.0)), delta(1, "b", end(score=-2.0))]
    assert told(b, *low, Finished(0)) == [(0, "a")]


def test_every_prompt_is_ranked_on_its_own() -> None:
    a = assembly(num_prompts=2, n=1, best_of=2)
    told(a, delta(0, "a", end(score=-1)), delta(1, "b", end(score=-2)), prompt=0)
    told(a, delta(0, "c", end(score=-2)), delta(1, "d", end(score=-1)), prompt=1)
    assert told(a, Finished(0), prompt=1) == [(1, "d")]
    assert told(a, Finished(0), prompt=0) == [(0, "a")]
    assert a.num_prompt_tokens == 8
