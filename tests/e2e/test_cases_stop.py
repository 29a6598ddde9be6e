"""Known faults of other servers with stop strings, ends of text and limits, against the real model.

Each test is named after the cases it holds off. A `guided_choice` of one text makes the model say exactly that.
"""

from __future__ import annotations

import itertools
import re

import pytest

from tests.fakes.agreement import Told
from tests.fakes.door import Door
from tests.fakes.fuzz import CHAT, COMPLETION


def says(text: str) -> dict[str, list[str]]:
    """Fields that make this the answer."""
    return {"guided_choice": [text]}


def test_b044_b051_b204_a_natural_end_is_stop_and_a_limit_is_length(door: Door) -> None:
    asked = "What is the capital of France? Answer in one sentence."
    free = door.stream_chat(asked, max_tokens=50, temperature=0)
    assert free == door.chat(asked, max_tokens=50, temperature=0)
    assert free.finish_reason == "stop" and free.text
    cut = door.stream_chat(asked, max_tokens=1, temperature=0)
    assert cut.finish_reason == "length"
    # of_stream has checked that exactly one chunk of each choice ends it.
    rivers = door.stream_chat("Name seven rivers.", max_tokens=60, temperature=0)
    assert rivers.text and rivers == door.chat("Name seven rivers.", max_tokens=60, temperature=0)


def test_b082_no_part_of_a_stop_string_is_streamed_before_the_rest_arrives(door: Door) -> None:
    fields = {**says("DEFGHIJKL"), "max_tokens": 64, "temperature": 0, "stop": ["DEFGH"]}
    whole = door.complete("The alphabet begins ABC", **fields)
    streamed = door.stream_completion("The alphabet begins ABC", **fields)
    assert streamed == whole
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("", "stop", "DEFGH")


def test_b087_a_control_token_as_stop_string_ends_at_the_turn(door: Door) -> None:
    told = door.chat("Hi", stop=["<|im_end|>"], max_tokens=200, temperature=0)
    assert told.finish_reason == "stop"
    assert "<|im_end|>" not in told.text and "assistant\n" not in told.text
    shown = door.chat(
        "Hi", stop=["<|im_end|>"], max_tokens=200, temperature=0, skip_special_tokens=False
    )
    assert shown.finish_reason == "stop" and shown.text == told.text


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["east south"], "north ", "east south"),
        (["out"], "north east s", "out"),
        (["west", "east"], "north ", "east"),
        (["zzz"], "north east south west", None),
    ],
)
def test_b098_b141_a_stop_string_may_span_tokens_or_lie_inside_one(
    door: Door, stop: list[str], text: str, reason: str | None
) -> None:
    fields = {**says("north east south west"), "temperature": 0, "max_tokens": 40, "stop": stop}
    told = door.stream_chat("Say it.", **fields)
    assert (told.text, told.stop_reason, told.finish_reason) == (text, reason, "stop")
    assert told == door.chat("Say it.", **fields)
    completed = door.complete("Say it.", **fields)
    assert (completed.text, completed.stop_reason) == (text, reason)


def test_b123_the_first_half_of_a_stop_word_is_held_back(door: Door) -> None:
    text = '{"q": 1}\nObs Observ Observation: done'
    fields = {**says(text), "temperature": 0, "max_tokens": 60, "stop": ["Observation:"]}
    told = door.stream_chat("Say it.", **fields)
    assert told.text == '{"q": 1}\nObs Observ ' and told.stop_reason == "Observation:"
    assert told == door.chat("Say it.", **fields)


def test_b137_b300_a_stop_string_ends_the_work_and_the_count(door: Door) -> None:
    fields = {**says("1 2 3 4 5 6 7 8 9"), "temperature": 0, "max_tokens": 60}
    free, cut = (
        door.body(CHAT, messages=[{"role": "user", "content": "Count."}], **fields, **more)
        for more in ({}, {"stop": ["5"]})
    )
    assert cut["choices"][0]["message"]["content"] == "1 2 3 4 "
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < free["usage"]["completion_tokens"]
    metrics = door._client.get("/metrics").text
    assert re.search(r"^vllm:num_requests_running\S* 0(\.0)?$", metrics, re.M), metrics


def test_b141_an_unguided_stop_string_cuts_where_the_free_text_has_it(door: Door) -> None:
    prompt = "a b c d e f g h i j"
    free = door.complete(prompt, temperature=0, max_tokens=32)
    for size in (2, 4, 7):
        stop = free.text[5 : 5 + size]
        cut = door.complete(prompt, temperature=0, max_tokens=32, stop=[stop])
        assert cut.text == free.text[: free.text.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_b156_a_stop_string_of_several_tokens_is_legal(door: Door) -> None:
    fields = {**says("one\n\n\ntwo"), "stop": "\n\n\n", "temperature": 0, "max_tokens": 50}
    told = door.chat("Say it.", **fields)
    assert told.text == "one" and told.stop_reason == "\n\n\n"
    assert told == door.stream_chat("Say it.", **fields)


def test_b183_text_that_might_begin_a_call_is_not_lost(door: Door) -> None:
    tool = {"type": "function", "function": {"name": "get_weather"}}
    fields = {**says("<tool then stop"), "tools": [tool], "temperature": 0, "max_tokens": 40}
    told = door.stream_chat("Write.", **fields, stop=["stop"])
    assert told.text == "<tool then " and not told.tool
    assert told == door.chat("Write.", **fields, stop=["stop"])


def test_b217_the_hold_back_is_that_of_the_dialect_and_loses_nothing(door: Door) -> None:
    """A chunk per token comes at once, also while its text is held back (spec of the dialect, 4.3)."""
    asked = _ask("Count to thirty in words.")
    fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "messages": asked}
    free = door.both(CHAT, **fields).choices[0]
    held = door.both(CHAT, **fields, stop=["@" * 40]).choices[0]
    assert held == free
    chunks = door.chunks(CHAT, **fields, stop=["@" * 40])
    assert len(chunks) == 1 + 30
    deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    sent = list(itertools.accumulate(map(len, deltas)))
    text = list(itertools.accumulate(len(t) for t in _token_texts(door, **fields)))
    # Of tokens that come in one delta the last has all the text, so it can be late, but never early.
    pairs = zip(sent[1:-1], text[:-1], strict=True)
    assert all(length <= max(0, whole - 39) for length, whole in pairs)
    assert 0 < sent[-2] < sent[-1] == len(free.text)


def test_b232_b255_no_returned_text_holds_a_stop_string(door: Door) -> None:
    words = ["the", "and", "I"]
    told = door.chat("Please compose a short song.", temperature=0, max_tokens=60, stop=words)
    assert told.finish_reason == "stop" and told.stop_reason in words
    assert not any(word in told.text for word in words)
    assert told == door.stream_chat(
        "Please compose a short song.", temperature=0, max_tokens=60, stop=words
    )


def test_b270_one_stop_string_and_a_list_of_one_are_the_same(door: Door) -> None:
    ask, fields = "Tell me a fact.", {"max_tokens": 50, "temperature": 0}
    one = door.chat(ask, stop=".", **fields)
    assert one == door.chat(ask, stop=["."], **fields)
    assert "." not in one.text and one.finish_reason in ("stop", "length")


def test_b300_a_stop_that_never_comes_ends_by_length_and_an_empty_one_is_refused(
    door: Door,
) -> None:
    never = door.chat("Count to 20.", stop=["@@never@@"], max_tokens=5, temperature=0)
    assert never.finish_reason == "length"
    asked = _ask("Hi")
    assert "stop cannot contain an empty string" in door.refused(CHAT, messages=asked, stop=[""])
    five = door.chat("Say it.", **says("a b c d e"), stop=["v", "w", "x", "y", "e"], max_tokens=9)
    assert (five.text, five.stop_reason) == ("a b c d ", "e")
    none = door.chat("Hi", stop=[], max_tokens=5, temperature=0)
    assert none == door.chat("Hi", max_tokens=5, temperature=0)


def test_b200_b281_a_cut_answer_says_length(door: Door) -> None:
    told = door.chat("Write 200 words.", max_tokens=20, temperature=0)
    assert told.finish_reason == "length"
    body = door.body(COMPLETION, prompt="Once", max_tokens=8, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 8
    assert body["choices"][0]["finish_reason"] == "length"
    # Without a limit of its own, the answer is cut by the context.
    long = "Write a very long story. " * 150
    body = door.body(CHAT, messages=_ask(long), ignore_eos=True, temperature=0)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 1024


def test_b016_b253_b267_ignore_eos_goes_on_to_the_limit(door: Door) -> None:
    for prompt in ("Hello. The end.", "The end."):
        body = door.body(COMPLETION, prompt=prompt, ignore_eos=True, max_tokens=50, temperature=0)
        assert body["usage"]["completion_tokens"] == 50
        assert body["choices"][0]["finish_reason"] == "length"
    told = door.chat("Say hi.", max_tokens=64, ignore_eos=True, temperature=0)
    assert told.finish_reason == "length"
    assert len(told.text) > len(door.chat("Say hi.", max_tokens=64, temperature=0).text)


def test_b060_every_stream_with_tools_ends_once(door: Door) -> None:
    tool = {"type": "function", "function": {"name": "get_weather"}}
    for seed in range(10):
        told = door.stream_chat(
            "What about the weather?", tools=[tool], temperature=1, seed=seed, max_tokens=8
        )
        assert told.finish_reason in ("stop", "length") and not told.tool


def _ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _token_texts(door: Door, **fields: object) -> list[str]:
    told: Told = door.both(CHAT, **fields, logprobs=True).choices[0]
    assert told.logprobs
    return [entry["token"] for entry in told.logprobs["content"]]
