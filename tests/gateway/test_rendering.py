"""The bytes of answers, by hand: golden transcripts, key order, both logprobs shapes, usage rules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.vllm05.answer import Assembly, PromptFacts
from gateway.dialects.vllm05.chat import ChatBody, ChatStream, ChatStyle
from gateway.dialects.vllm05.completions import (
    CompletionBody,
    CompletionEvent,
    CompletionStream,
    CompletionStyle,
)
from gateway.dialects.vllm05.heading import Heading, UsageRule
from gateway.dialects.vllm05.logprobs import CompletionLogprobs, chat_entry, prompt_maps
from gateway.events import ChoiceEnd, Delta, Finished, PromptLogprobs, Tagged, TokenLogprobs
from gateway.spec import GenerationSpec

HEADING = Heading(id="chat-0", created=1700000000, model="m")
HEAD = '{"id":"chat-0","object":"chat.completion.chunk","created":1700000000,"model":"m"'
TEXT_HEAD = '{"id":"chat-0","object":"text_completion","created":1700000000,"model":"m"'
STOP = ChoiceEnd("stop", None, 0.0)
LENGTH = ChoiceEnd("length", None, 0.0)


class Options(NamedTuple):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = True


def say(choice: int, text: str, end: ChoiceEnd | None = None, *lp: TokenLogprobs) -> Tagged:
    return Tagged(0, Delta(choice, (7,), text, lp, end))


DONE = Tagged(0, Finished(0))


def prompts(count: int = 1, **facts: Any) -> list[PromptFacts]:
    return [PromptFacts(num_tokens=5, **facts) for _ in range(count)]


def assemble(n: int = 1, count: int = 1, best_of: int | None = None, **facts: Any) -> Assembly:
    return Assembly(GenerationSpec(n=n, best_of=best_of or n), prompts(count, **facts))


def chat_stream(
    events: Sequence[Tagged], style: ChatStyle, rule: UsageRule, **kwargs: Any
) -> bytes:
    stream = ChatStream(HEADING, assemble(**kwargs), style, rule)
    return b"".join([stream.feed([e]) for e in events]) + stream.finish()


def text_stream(
    events: Sequence[Tagged], style: CompletionStyle, rule: UsageRule, **kwargs: Any
) -> bytes:
    stream = CompletionStream(HEADING, assemble(**kwargs), style, rule)
    return b"".join([stream.feed([e]) for e in events]) + stream.finish()


def chunks(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"data: [DONE]\n\n")
    events = data.decode().split("\n\n")[:-2]
    assert all(e.startswith("data: ") for e in events)
    return [json.loads(e[6:]) for e in events]


NO_USAGE = UsageRule.of(None, always_shown=False)
NO_USAGE_TEXT = UsageRule.of(None, always_shown=True)


# --- golden transcripts ------------------------------------------------------------------------------


def chat_chunk(delta: str, tail: str = "") -> str:
    choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{tail or "null"}}}'
    return f'data: {HEAD},"choices":[{choice}]}}\n\n'


def text_chunk(text: str, reasons: str) -> str:
    choice = f'{{"index":0,"text":{text},"logprobs":null,"finish_reason":{reasons}}}'
    return f'data: {TEXT_HEAD},"choices":[{choice}],"usage":null}}\n\n'


def test_a_plain_chat_stream_to_the_byte() -> None:
    events = [say(0, "Grüß "), say(0, '"Gott"\n', STOP), DONE]
    assert chat_stream(events, ChatStyle("assistant"), NO_USAGE).decode() == (
        chat_chunk('{"role":"assistant"}')
        + chat_chunk('{"content":"Grüß "}')
        + chat_chunk('{"content":"\\"Gott\\"\\n"}', '"stop","stop_reason":null')
        + "data: [DONE]\n\n"
    )


def test_a_plain_completion_stream_to_the_byte() -> None:
    events = [say(0, "a"), say(0, "", ChoiceEnd("stop", "x", 0.0)), DONE]
    assert text_stream(events, CompletionStyle(), NO_USAGE_TEXT).decode() == (
        text_chunk('"a"', 'null,"stop_reason":null')
        + text_chunk('""', '"stop","stop_reason":"x"')
        + "data: [DONE]\n\n"
    )


def test_a_chat_body_to_the_byte() -> None:
    body = ChatBody(HEADING, assemble(), ChatStyle("assistant"))
    body.feed([say(0, "a"), say(0, "b", ChoiceEnd("stop", 42, 0.0)), DONE])
    assert body.finish().decode() == (
        '{"id":"chat-0","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,'
        '"message":{"role":"assistant","content":"ab","tool_calls":[]},"logprobs":null,"finish_reason":"stop",'
        '"stop_reason":42}],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2},'
        '"prompt_logprobs":null}'
    )


def test_a_completion_body_to_the_byte() -> None:
    body = CompletionBody(HEADING, assemble(), CompletionStyle())
    body.feed([say(0, "a", LENGTH), DONE])
    assert body.finish().decode() == (
        f'{TEXT_HEAD},"choices":[{{"index":0,"text":"a","logprobs":null,"finish_reason":"length",'
        '"stop_reason":null,"prompt_logprobs":null}],"usage":{"prompt_tokens":5,"total_tokens":6,'
        '"completion_tokens":1}}'
    )


# --- chat --------------------------------------------------------------------------------------------


def test_all_role_chunks_come_first_then_the_echo() -> None:
    style = ChatStyle("bot", echo="so far")
    got = chunks(chat_stream([say(1, "x", STOP), say(0, "y", STOP), DONE], style, NO_USAGE, n=2))
    said = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in got]
    assert said == [
        (0, {"role": "bot"}),
        (1, {"role": "bot"}),
        (0, {"content": "so far"}),
        (1, {"content": "so far"}),
        (1, {"content": "x"}),
        (0, {"content": "y"}),
    ]


def test_a_named_tool_has_id_type_and_name_once() -> None:
    style = ChatStyle("assistant", tool_name="get_it")
    got = chunks(chat_stream([say(0, '{"a"'), say(0, ":1}", STOP), DONE], style, NO_USAGE))
    first, second = (c["choices"][0]["delta"]["tool_calls"][0] for c in got[1:])
    assert re.fullmatch(r"chatcmpl-tool-[0-9a-f]{32}", first.pop("id"))
    assert first == {
        "index": 0,
        "type": "function",
        "function": {"name": "get_it", "arguments": '{"a"'},
    }
    assert second == {"index": 0, "function": {"arguments": ":1}"}}
    assert got[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_named_tool_in_a_body() -> None:
    body = ChatBody(HEADING, assemble(), ChatStyle("assistant", tool_name="f"))
    body.feed([say(0, "{}", STOP), DONE])
    message = json.loads(body.finish())["choices"][0]["message"]
    assert message["content"] == ""
    assert list(message["tool_calls"][0]) == ["id", "type", "function"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_ranked_chat_streams_the_winners_token_by_token() -> None:
    events = [
        say(0, "a"),
        say(1, "b"),
        say(0, "A", ChoiceEnd("stop", None, -5.0)),
        say(1, "B", ChoiceEnd("length", None, -1.0)),
        DONE,
    ]
    rule = UsageRule.of(Options(continuous_usage_stats=False), always_shown=False)
    got = chunks(chat_stream(events, ChatStyle("assistant"), rule, best_of=2))
    deltas = [c["choices"][0]["delta"] for c in got[:-1]]
    assert deltas == [{"role": "assistant"}, {"content": "b"}, {"content": "B"}]
    assert got[-1]["usage"]["completion_tokens"] == 2


def test_the_role_chunk_of_a_ranked_chat_does_not_wait_for_the_winner() -> None:
    stream = ChatStream(HEADING, assemble(best_of=2), ChatStyle("assistant"), NO_USAGE)
    assert b'"role":"assistant"' in stream.feed([say(0, "a")])


# --- usage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "keys", "has_final"),
    [
        (None, ["absent", "absent", "absent"], False),
        (Options(), [0, 1, 2], True),
        (Options(True, False), [None, None, None], True),
        (Options(True, None), [None, None, None], True),
        (Options(False), ["absent", "absent", "absent"], False),
        (Options(None), ["absent", "absent", "absent"], False),
    ],
)
def test_chat_usage_rules(options: Options | None, keys: list[Any], has_final: bool) -> None:
    rule = UsageRule.of(options, always_shown=False)
    got = chunks(chat_stream([say(0, "a"), say(0, "b", STOP), DONE], ChatStyle("assistant"), rule))
    shown = [c.get("usage", "absent") for c in got[:3]]
    assert [u["completion_tokens"] if isinstance(u, dict) else u for u in shown] == keys
    assert len(got) == 3 + has_final
    if has_final:
        assert list(got[-1]) == ["id", "object", "created", "model", "choices", "usage"]
        assert got[-1]["choices"] == []
        assert got[-1]["usage"] == {
            "prompt_tokens": 5,
            "total_tokens": 7,
            "completion_tokens": 2,
        }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, [None, None]),
        (Options(), [1, 2]),
        (Options(True, False), [None, None]),
        (Options(False), [None, None]),
    ],
)
def test_completion_usage_rules(options: Options | None, expected: list[Any]) -> None:
    rule = UsageRule.of(options, always_shown=True)
    got = chunks(text_stream([say(0, "a"), say(0, "b", STOP), DONE], CompletionStyle(), rule))
    shown = [c["usage"] for c in got[:2]]
    assert [u and u["completion_tokens"] for u in shown] == expected


def test_the_last_usage_sums_over_choices_and_prompts() -> None:
    rule = UsageRule.of(Options(), always_shown=True)
    events = [Tagged(p, Delta(c, (1,), "t", (), LENGTH)) for p in range(2) for c in range(2)] + [
        Tagged(p, Finished(0)) for p in range(2)
    ]
    got = chunks(text_stream(events, CompletionStyle(), rule, n=2, count=2))
    assert [c["choices"][0]["index"] for c in got[:-1]] == [0, 1, 2, 3]
    assert all(c["usage"]["prompt_tokens"] == 5 for c in got[:-1])
    assert got[-1]["usage"] == {"prompt_tokens": 10, "total_tokens": 14, "completion_tokens": 4}


# --- logprobs ----------------------------------------------------------------------------------------

SAMPLED_OUTSIDE = TokenLogprobs((9, 1, 2), (-5.0, -0.1, -math.inf), (40, 1, 2), ("z", "a", "ä"))


def test_chat_logprobs_are_the_first_k_with_the_sampled_token_first() -> None:
    entry = chat_entry(SAMPLED_OUTSIDE, 2, as_ids=False)
    assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
    assert entry["token"] == "z" and entry["bytes"] == [122]
    assert [t["token"] for t in entry["top_logprobs"]] == ["z", "a"]
    assert chat_entry(SAMPLED_OUTSIDE, 3, as_ids=False)["top_logprobs"][2] == {
        "token": "ä",
        "logprob": -9999.0,
        "bytes": [195, 164],
    }
    assert chat_entry(SAMPLED_OUTSIDE, 0, as_ids=False)["top_logprobs"] == []


def test_token_ids_instead_of_texts() -> None:
    entry = chat_entry(SAMPLED_OUTSIDE, 1, as_ids=True)
    assert entry["token"] == "token_id:9" and entry["bytes"] == [122]
    assert entry["top_logprobs"][0]["bytes"] == list(b"token_id:9")
    lists = CompletionLogprobs(0, 1, as_ids=True)
    lists.add(SAMPLED_OUTSIDE)
    lists.add(SAMPLED_OUTSIDE)
    assert lists.as_json()["tokens"] == ["token_id:9", "token_id:9"]
    assert lists.as_json()["text_offset"] == [0, 10]


def test_completion_lists_hold_k_plus_one_and_collapse_equal_texts() -> None:
    lists = CompletionLogprobs(3, 1, as_ids=False)
    lists.add(SAMPLED_OUTSIDE)
    lists.add(TokenLogprobs((1, 2), (-0.5, -0.7), (1, 2), ("a", "a")))
    assert lists.as_json() == {
        "text_offset": [3, 4],
        "token_logprobs": [-5.0, -0.5],
        "tokens": ["z", "a"],
        "top_logprobs": [{"z": -5.0, "a": -0.1}, {"a": -0.7}],
    }


def test_prompt_logprobs_never_hold_an_infinity() -> None:
    maps = prompt_maps([None, SAMPLED_OUTSIDE])
    assert maps is not None and maps[0] is None
    assert maps[1] == {
        "9": {"logprob": -5.0, "rank": 40, "decoded_token": "z"},
        "1": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        "2": {"logprob": -9999.0, "rank": 2, "decoded_token": "ä"},
    }


def test_echo_with_logprobs_puts_the_prompt_in_front_once_per_choice() -> None:
    facts: Any = {"text": "<s>hi", "token_ids": (1, 2), "first_token": "<s>"}
    hi = TokenLogprobs((2,), (-1.0,), (1,), ("hi",))
    out = TokenLogprobs((7,), (-2.0,), (1,), ("!",))
    style = CompletionStyle(echo=True, logprobs=0)
    events = [
        Tagged(0, PromptLogprobs((None, hi))),
        *(say(c, "!", None, out) for c in range(2)),
        *(say(c, "!", LENGTH, out) for c in range(2)),
        DONE,
    ]
    body = CompletionBody(HEADING, assemble(n=2, **facts), style)
    body.feed(events)
    whole = json.loads(body.finish())
    for choice in whole["choices"]:
        assert choice["text"] == "<s>hi!!"
        assert choice["logprobs"]["tokens"] == ["<s>", "hi", "!", "!"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -2.0]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 3, 5, 6]
        assert choice["prompt_logprobs"][1]["2"]["decoded_token"] == "hi"
    got = chunks(text_stream(events, style, NO_USAGE_TEXT, n=2, **facts))
    assert [c["choices"][0]["text"] for c in got] == ["<s>hi!", "<s>hi!", "!", "!"]
    assert got[0]["choices"][0]["logprobs"]["tokens"] == ["<s>", "hi", "!"]
    assert got[2]["choices"][0]["logprobs"]["text_offset"] == [6]


def test_echo_of_the_prompt_alone() -> None:
    style = CompletionStyle(echo=True, is_prompt_only=True, logprobs=0)
    facts: Any = {"text": "hi", "token_ids": (2,), "first_token": "hi"}
    out = TokenLogprobs((7,), (-2.0,), (1,), ("!",))
    body = CompletionBody(HEADING, assemble(**facts), style)
    body.feed([Tagged(0, PromptLogprobs((None,))), say(0, "!", LENGTH, out), DONE])
    whole = json.loads(body.finish())
    assert whole["choices"][0]["text"] == "hi"
    assert whole["choices"][0]["logprobs"]["tokens"] == ["hi"]
    assert whole["usage"]["completion_tokens"] == 1


def test_text_offset_in_a_stream_follows_what_was_sent() -> None:
    first = TokenLogprobs((1,), (-1.0,), (1,), ("ab",))
    style = CompletionStyle(logprobs=0)
    # The text of the first token is held back and comes with the second.
    events = [say(0, "", None, first), say(0, "abab", LENGTH, first), DONE]
    got = chunks(text_stream(events, style, NO_USAGE_TEXT))
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in got] == [[0], [0]]


# --- streamed equals unstreamed ----------------------------------------------------------------------


def logprob_entry(text: str) -> TokenLogprobs:
    return TokenLogprobs((1, 2, 3), (-0.5, -1.5, -math.inf), (2, 1, 3), (text, "b", "c"))


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, int, list[Tagged]]:
    """A random interleaving of n choices with text, and the numbers behind it."""
    n = draw(st.integers(1, 3))
    best_of = draw(st.integers(n, 4))
    lengths = [draw(st.integers(1, 5)) for _ in range(best_of)]
    queue = [c for c, length in enumerate(lengths) for _ in range(length)]
    order = draw(st.permutations(queue))
    left = list(lengths)
    events = []
    for choice in order:
        left[choice] -= 1
        text = draw(st.text(max_size=4))
        end = None
        if left[choice] == 0:
            cause = draw(st.sampled_from([None, 7, "stop"]))
            end = ChoiceEnd("stop" if cause else "length", cause, -float(choice % 3))
        events.append(Tagged(0, Delta(choice, (1,), text, (logprob_entry(text),), end)))
    return n, best_of, [*events, DONE]


@settings(max_examples=200, deadline=None)
@given(
    script=scripts(),
    k=st.sampled_from([None, 0, 2]),
    tool=st.booleans(),
    echo=st.sampled_from(["", "before"]),
    options=st.sampled_from([None, Options(), Options(True, False)]),
)
def test_a_chat_stream_adds_up_to_the_body(
    script: tuple[int, int, list[Tagged]],
    k: int | None,
    tool: bool,
    echo: str,
    options: Options | None,
) -> None:
    n, best_of, events = script
    style = ChatStyle("assistant", echo=echo, tool_name="f" if tool else None, top_logprobs=k)
    body = ChatBody(HEADING, assemble(n, best_of=best_of), style)
    body.feed(events)
    whole = json.loads(body.finish())
    rule = UsageRule.of(options, always_shown=False)
    got = chunks(chat_stream(events, style, rule, n=n, best_of=best_of))
    if options is not None:
        assert got.pop()["usage"] == whole["usage"]
    texts = [""] * n
    arguments = [""] * n
    entries: list[list[Any]] = [[] for _ in range(n)]
    ends: dict[int, tuple[Any, Any]] = {}
    for chunk in got:
        (choice,) = chunk["choices"]
        index, change = choice["index"], choice["delta"]
        assert index not in ends, "a finished choice spoke again"
        texts[index] += change.get("content", "")
        for call in change.get("tool_calls", ()):
            arguments[index] += call["function"]["arguments"]
        entries[index] += (choice["logprobs"] or {"content": []})["content"]
        if choice["finish_reason"] is not None:
            ends[index] = (choice["finish_reason"], choice["stop_reason"])
        else:
            assert "stop_reason" not in choice
    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        assert texts[index] == message["content"]
        calls = message["tool_calls"]
        assert arguments[index] == (calls[0]["function"]["arguments"] if calls else "")
        assert ends[index] == (choice["finish_reason"], choice["stop_reason"])
        assert (choice["logprobs"] or {"content": []})["content"] == entries[index]
    tokens = sum(1 for c in got if set(c["choices"][0]["delta"]) - {"role"}) - n * bool(echo)
    assert tokens == whole["usage"]["completion_tokens"]


@settings(max_examples=200, deadline=None)
@given(script=scripts(), k=st.sampled_from([None, 0, 1]), echo=st.booleans())
def test_a_completion_stream_adds_up_to_the_body(
    script: tuple[int, int, list[Tagged]], k: int | None, echo: bool
) -> None:
    n, best_of, events = script
    facts: Any = {"text": "p" if echo else ""}
    style = CompletionStyle(echo=echo, logprobs=k)
    body = CompletionBody(HEADING, assemble(n, best_of=best_of, **facts), style)
    body.feed(events)
    whole = json.loads(body.finish())
    got = chunks(text_stream(events, style, NO_USAGE_TEXT, n=n, best_of=best_of, **facts))
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in got if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if k is not None:
            tops = [t for c in mine for t in c["logprobs"]["top_logprobs"]]
            assert tops == choice["logprobs"]["top_logprobs"]


def test_a_ranked_completion_streams_as_one_event_with_the_whole_body() -> None:
    single = CompletionEvent(HEADING, assemble(best_of=2), CompletionStyle())
    events = [say(0, "a", ChoiceEnd("stop", None, -2.0)), say(1, "b", STOP), DONE]
    assert single.feed(events) == b""
    (only,) = chunks(single.finish())
    assert only["choices"][0]["text"] == "b"
    assert only["usage"]["completion_tokens"] == 1
