"""Known faults of other servers with sampling fields, n and prompts, against the real model.

Each test is named after the cases it holds off.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.door import Door
from tests.fakes.fuzz import CHAT, COMPLETION

HELLO = [{"role": "user", "content": "Say hello."}]


def first_token(door: Door, prompt: str) -> int:
    """The greedy first token of a completion."""
    told = door.complete(prompt, temperature=0, max_tokens=1)
    (token,) = door.tokens(told.text, add_special_tokens=False)
    return token


def test_b021_b133_a_banned_token_is_not_chosen_and_a_forced_one_always(door: Door) -> None:
    token = first_token(door, "The sky is")
    free = door.complete("The sky is", temperature=0, max_tokens=1)
    banned = door.complete("The sky is", temperature=0, max_tokens=1, logit_bias={str(token): -100})
    assert banned.text != free.text
    fields = {"temperature": 0, "max_tokens": 5, "logit_bias": {str(token): 100}}
    assert door.chat("What is your name?", **fields).text == free.text * 5


def test_b199_a_bias_outside_the_vocabulary_is_refused_and_kills_nobody(door: Door) -> None:
    for bias in ({"99999999": -100, "5": 5}, {"-1": 1}):
        assert "logit_bias" in door.refused(CHAT, messages=HELLO, logit_bias=bias, max_tokens=8)
    assert door.chat("Say hello.", max_tokens=4, temperature=0).finish_reason


def test_b024_b197_what_is_left_out_is_the_default_written_out(door: Door) -> None:
    ask = "Quote Shakespeare at length."
    chat = door.chat(ask, seed=3, max_tokens=30)
    assert chat == door.chat(ask, seed=3, max_tokens=30, temperature=0.7, top_p=1, top_k=-1, n=1)
    assert chat != door.chat(ask, seed=3, max_tokens=30, temperature=1.5)
    text = door.complete(ask, seed=3, max_tokens=30)
    assert text == door.complete(ask, seed=3, max_tokens=30, temperature=1, top_p=1, min_p=0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-12])
def test_b054_b229_the_coldest_temperatures_give_the_greedy_text(
    door: Door, temperature: float
) -> None:
    prompt = "The capital of France is"
    fields = {"max_tokens": 8, "logprobs": 1, "top_k": 50, "seed": 1}
    greedy = door.complete(prompt, temperature=0, **fields)
    cold = door.complete(prompt, temperature=temperature, **fields)
    assert cold.text == greedy.text != ""
    assert cold.logprobs and all(-9999 <= v <= 0 for v in cold.logprobs["token_logprobs"])


def test_b063_penalties_have_their_effect_on_the_chat_route(door: Door) -> None:
    ask = "Say ha 50 times"
    fields = {"temperature": 0, "max_tokens": 60}
    free = door.chat(ask, **fields).text
    for name, value in (("repetition", 1.5), ("frequency", 2.0), ("presence", 2.0)):
        assert door.chat(ask, **fields, **{f"{name}_penalty": value}).text != free
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": 0}
    assert door.chat(ask, **fields, **neutral).text == free
    outside = (("frequency", 2.1), ("presence", -2.1), ("repetition", 0), ("repetition", 2.1))
    for name, value in outside:
        wrong = {f"{name}_penalty": value}
        assert f"{name}_penalty" in door.refused(CHAT, messages=HELLO, **wrong)


def test_b088_a_seed_repeats_and_its_absence_does_not(door: Door) -> None:
    def say(seed: int | None) -> str:
        return door.complete("Once upon a time", seed=seed, temperature=1, max_tokens=20).text

    assert len({say(None) for _ in range(3)}) == 3
    assert say(7) == say(7) != say(8)
    over = {"prompt": "x", "seed": 2**64 + 7}
    assert "less than or equal to 9223372036854775807" in door.refused(COMPLETION, **over)


def test_b108_b220_every_choice_has_its_index_and_is_counted(door: Door) -> None:
    fields = {"messages": HELLO, "n": 3, "temperature": 1, "seed": 5, "max_tokens": 20}
    body = door.body(CHAT, **fields)
    choices = body["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert len({c["message"]["content"] for c in choices}) > 1
    # of_stream has checked one role and one end for each; the sum over all choices is the usage.
    answer = door.both(CHAT, **fields)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = door.chunks(CHAT, **fields, stream_options=usage)
    assert sorted(answer.choices) == [0, 1, 2] and last["usage"] == body["usage"]
    counts: dict[int, int] = {}
    for chunk in chunks:
        counts[chunk["choices"][0]["index"]] = chunk["usage"]["completion_tokens"]
    assert sum(counts.values()) == body["usage"]["completion_tokens"]


def test_b249_top_k_0_is_refused_and_off_means_all_candidates(door: Door) -> None:
    """In this dialect −1 is off, and 0 is none of the numbers that top_k may be."""
    assert "top_k" in door.refused(COMPLETION, prompt="A random word:", top_k=0)
    fields = {"top_k": -1, "temperature": 1.5, "max_tokens": 5}
    assert len({door.complete("A random word:", **fields).text for _ in range(8)}) > 1


def test_b282_choices_of_several_prompts_come_in_their_order(door: Door) -> None:
    prompts = ["One two three", "Alpha beta gamma", "Red green blue"]
    fields: dict[str, Any] = {"prompt": prompts, "max_tokens": 6, "temperature": 0.8, "seed": 2}
    body = door.body(COMPLETION, **fields, n=2, echo=True)
    assert [c["index"] for c in body["choices"]] == list(range(6))
    for choice in body["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // 2])
    assert body["usage"]["prompt_tokens"] == sum(len(door.tokens(p)) for p in prompts)
    door.both(COMPLETION, **fields, n=2, echo=True)


def test_b057_b135_a_prompt_beyond_the_context_is_refused_in_words_of_the_client(
    door: Door,
) -> None:
    long = [{"role": "user", "content": "a small grey cat sleeps near the warm stove. " * 20_000}]
    for stream in (False, True):
        message = door.refused(CHAT, messages=long, max_tokens=32, stream=stream)
        assert "maximum context length is 1024 tokens" in message
        assert "in the messages, 32 in the completion" in message
    words = [{"role": "user", "content": "word " * 200_000}]
    assert "maximum context" in door.refused(CHAT, messages=words, max_tokens=8, stream=True)
    assert door.chat("hi", max_tokens=2, temperature=0).finish_reason
