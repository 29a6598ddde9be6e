"""Known faults of other servers with log probabilities, against the real model.

Each test is named after the cases it holds off.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.fakes.door import Door
from tests.fakes.fuzz import CHAT, COMPLETION

HELLO = [{"role": "user", "content": "Say hello."}]


def lists_of(choice: dict[str, Any]) -> dict[str, list[Any]]:
    """The four parallel lists of a completion's choice, which must be whole."""
    lists: dict[str, list[Any]] = choice["logprobs"]
    assert set(lists) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert len({len(values) for values in lists.values()}) == 1
    return lists


def joined(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The same over the chunks of a stream; every one with a token has them."""
    found: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in lists_of(chunk["choices"][0]).items():
            found.setdefault(name, []).extend(values)
    return found


def test_b066_b151_streamed_chat_logprobs_are_those_of_the_whole_answer(door: Door) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6, "temperature": 0}
    told = door.stream_chat("Say hello.", **fields)
    assert told == door.chat("Say hello.", **fields)
    assert told.logprobs and len(told.logprobs["content"]) == 6
    # Tokens whose text is held back keep their place too.
    held = door.stream_chat("Say hello.", **fields, stop=["@" * 30])
    assert held.logprobs == told.logprobs


def test_b149_b174_b291_completions_have_lists_streamed_or_not(door: Door) -> None:
    fields = {"prompt": "Once upon a time", "logprobs": 2, "max_tokens": 5, "temperature": 0}
    whole = door.body(COMPLETION, **fields)["choices"][0]
    assert whole["finish_reason"] == "length" and len(lists_of(whole)["tokens"]) == 5
    assert joined(door.chunks(COMPLETION, **fields)) == lists_of(whole)
    code = door.body(COMPLETION, prompt="def hello(", logprobs=1, max_tokens=20)["choices"][0]
    assert code["finish_reason"] in ("stop", "length") and lists_of(code)["tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "The capital of France is"},
        {"prompt": ["One two", "Red green"]},
        {"prompt": "The sky is", "n": 2, "temperature": 1, "seed": 3},
    ],
    ids=["plain", "prompts", "n"],
)
def test_b215_b221_text_offset_begins_at_0_and_goes_on(door: Door, fields: dict[str, Any]) -> None:
    fields = {"temperature": 0, **fields, "logprobs": 1, "max_tokens": 10, "ignore_eos": True}
    body = door.body(COMPLETION, **fields)
    chunks = door.chunks(COMPLETION, **fields)
    for choice in body["choices"]:
        lists, offset = lists_of(choice), 0
        for token, found in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert found == offset
            offset += len(token)
        mine = [c for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert joined(mine)["text_offset"] == lists["text_offset"]


def test_b224_b238_echoed_prompts_are_scored_and_offsets_go_through(door: Door) -> None:
    prompt = "Hello my name"
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 8, "temperature": 0}
    body = door.body(COMPLETION, **fields)
    choice, usage = body["choices"][0], body["usage"]
    lists = lists_of(choice)
    assert len(lists["tokens"]) == usage["prompt_tokens"] + usage["completion_tokens"]
    assert lists["token_logprobs"][0] is None and None not in lists["token_logprobs"][1:]
    assert "".join(lists["tokens"]) == choice["text"] and choice["text"].startswith(prompt)
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert joined(door.chunks(COMPLETION, **fields)) == lists


def test_b259_an_echo_under_top_k_1_has_numbers_only(door: Door) -> None:
    fields = {"echo": True, "logprobs": 1, "temperature": 1, "top_k": 1, "max_tokens": 4}
    body = door.body(COMPLETION, prompt="seven green lamps on a shelf", **fields)
    first, *others = lists_of(body["choices"][0])["token_logprobs"]
    assert first is None and all(-9999.0 <= value <= 0 for value in others)
    assert -9999.0 in others  # what top_k has masked is told, not left out


def test_b075_b132_masked_alternatives_are_numbers(door: Door) -> None:
    cold = {"temperature": 0.02, "top_p": 0.4, "max_tokens": 50, "logprobs": 5, "seed": 1}
    sharp = {"temperature": 0, "top_k": 1, "max_tokens": 1, "logprobs": 10}
    masked = {"temperature": 1, "top_k": 1, "max_tokens": 1, "logprobs": 10, "seed": 1}
    for prompt, fields in (("List the planets:", cold), ("foo", sharp), ("foo", masked)):
        lists = lists_of(door.body(COMPLETION, prompt=prompt, **fields)["choices"][0])
        assert all(-9999.0 <= value <= 0 for value in lists["token_logprobs"])
        for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True):
            assert 1 <= len(top) <= fields["logprobs"] + 1 and token in top
            assert all(-9999.0 <= value <= 0 for value in top.values())


def test_b134_under_a_guide_the_alternatives_are_numbers_too(door: Door) -> None:
    schema = {
        **{"type": "object", "required": ["yes"], "additionalProperties": False},
        "properties": {"yes": {"type": "boolean"}},
    }
    fields = {"logprobs": True, "top_logprobs": 20, "max_tokens": 20, "temperature": 0}
    told = door.chat("Is the sky blue? Answer JSON.", guided_json=schema, **fields)
    assert told.logprobs and told.finish_reason == "stop"
    for entry in told.logprobs["content"]:
        assert len(entry["top_logprobs"]) <= 20
        for top in (entry, *entry["top_logprobs"]):
            assert -9999.0 <= top["logprob"] <= 0


def test_b157_b246_bytes_are_those_of_the_text(door: Door) -> None:
    """A character of several tokens arrives with its last token; the others have no text and no bytes."""
    text = "水 👩‍🚀 é"
    told = door.chat("Say it.", logprobs=True, guided_choice=[text], max_tokens=40, temperature=0)
    assert told.text == text and told.logprobs
    entries = told.logprobs["content"]
    assert all(0 <= byte <= 255 for entry in entries for byte in entry["bytes"])
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["bytes"] != [239, 191, 189]


def test_b198_prompt_logprobs_of_any_legal_depth(door: Door) -> None:
    for depth in (9, 10):
        fields = {"prompt_logprobs": depth, "max_tokens": 1, "temperature": 0}
        body = door.body(COMPLETION, prompt="The new rule would", **fields)
        first, *others = body["choices"][0]["prompt_logprobs"]
        assert first is None and len(others) + 1 == body["usage"]["prompt_tokens"]
        for position in others:
            assert len(position) in (depth, depth + 1)
            ranks = sorted(entry["rank"] for entry in position.values())
            assert ranks[:depth] == list(range(1, depth + 1))
    refused = {"prompt": "The new rule would", "prompt_logprobs": 1_000_000, "max_tokens": 1}
    assert "more than 20 logprobs" in door.refused(COMPLETION, **refused)
    assert door.complete("x", max_tokens=1, temperature=0).finish_reason == "length"


def test_b203_the_sampled_token_is_among_distinct_alternatives(door: Door) -> None:
    ask = "Write a sentence with curly quotes: “like this”."
    told = door.chat(ask, logprobs=True, top_logprobs=5, max_tokens=40, temperature=0)
    assert told.logprobs
    for entry in told.logprobs["content"]:
        own, *others = entry["top_logprobs"]
        assert (own["token"], own["logprob"]) == (entry["token"], entry["logprob"])
        assert len(others) == 4
        # Parts of characters have no text of their own in this dialect; all others are told apart.
        texts = [top["token"] for top in entry["top_logprobs"] if top["token"]]
        assert len(texts) == len(set(texts))
        for top in entry["top_logprobs"]:
            assert bytes(top["bytes"]).decode() == top["token"]


def test_b050_prompt_logprobs_are_the_same_from_a_cached_prefix(door: Door) -> None:
    shared = "The quick brown fox jumps over the lazy dog while the band plays on and on. " * 4
    one, other = shared + "Then it rained.", shared + "Nobody knew why the sun was green."

    def scores(prompt: str) -> list[float]:
        fields = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
        body = door.body(COMPLETION, prompt=prompt, **fields)
        _, *positions = body["choices"][0]["prompt_logprobs"]
        return [next(iter(p.values()))["logprob"] for p in positions]

    num_shared = len(door.tokens(shared.rstrip())) - 1
    first, second, again, later = scores(one), scores(other), scores(one), scores(other)
    assert first == again and second == later
    assert first[:num_shared] == second[:num_shared]
    assert first[num_shared:] != second[num_shared:]


def test_b147_a_long_echo_twice_is_the_same_and_of_full_length(door: Door) -> None:
    fields = {"prompt": "word " * 600, "echo": True, "logprobs": 1, "max_tokens": 1}
    bodies = [door.body(COMPLETION, **fields, temperature=0) for _ in range(2)]
    lists = [lists_of(body["choices"][0]) for body in bodies]
    assert lists[0] == lists[1]
    assert len(lists[0]["tokens"]) == bodies[0]["usage"]["total_tokens"]
    assert all(math.isfinite(value) for value in lists[0]["token_logprobs"][1:])


def test_b126_a_warm_cache_changes_neither_text_nor_numbers(door: Door) -> None:
    asked = [{"role": "user", "content": "lorem " * 400}]
    fields = {"messages": asked, "temperature": 0, "max_tokens": 16, "logprobs": True}
    cold, *warm = (door.body(CHAT, **fields) for _ in range(4))
    for body in warm:
        assert body["choices"] == cold["choices"] and body["usage"] == cold["usage"]
