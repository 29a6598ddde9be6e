"""Random requests over the dialect's fields, and both forms of an answer brought to one form.

Knows how a body and a stream of chunks say the same thing; says itself only what each of them said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.fakes.fuzz import CHAT, COMPLETION, GRAMMAR, SCHEMA, TOOL

Body = dict[str, Any]


@dataclass
class Told:
    """One choice, as a client has it in the end."""

    text: str = ""
    role: str = ""
    arguments: str = ""
    tool: tuple[str, ...] = ()
    """Type and name of the tool call; empty without one."""
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_tokens: int | None = None
    """As the last running usage of the choice says; only a stream says it."""


@dataclass
class Answer:
    """All of it."""

    choices: dict[int, Told] = field(default_factory=dict)
    usage: dict[str, int] | None = None

    @property
    def num_logprobs(self) -> int:
        """Token entries over all choices."""
        return sum(
            len(next(iter(c.logprobs.values()))) for c in self.choices.values() if c.logprobs
        )


def of_body(body: Body) -> Answer:
    """What an unstreamed response says."""
    answer = Answer(usage=body["usage"])
    for choice in body["choices"]:
        told = Told(finish_reason=choice["finish_reason"], stop_reason=choice["stop_reason"])
        told.logprobs = choice["logprobs"]
        if "message" in choice:
            message = choice["message"]
            told.role, told.text = message["role"], message["content"]
            for call in message["tool_calls"]:
                told.tool = (call["type"], call["function"]["name"])
                told.arguments = call["function"]["arguments"]
        else:
            told.text = choice["text"]
        assert choice["index"] not in answer.choices
        answer.choices[choice["index"]] = told
    return answer


def of_stream(events: Iterable[str]) -> Answer:
    """What the events of a stream say together. Fails where a stream breaks its own rules."""
    *chunks, done = events
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert len({(c["id"], c["created"], c["model"]) for c in parsed}) == 1
    if "prompt_logprobs" in (parsed[0]["choices"] or [{}])[0]:
        # Ranked completions come as one event that holds the whole body.
        (whole,) = parsed
        return of_body(whole)
    answer = Answer()
    for chunk in parsed:
        if not chunk["choices"]:
            assert answer.usage is None
            answer.usage = chunk["usage"]
            continue
        (choice,) = chunk["choices"]
        told = answer.choices.setdefault(choice["index"], Told())
        assert told.finish_reason is None, "a choice goes on behind its end"
        if "delta" in choice:
            _add_delta(told, choice["delta"])
            assert ("stop_reason" in choice) == (choice["finish_reason"] is not None)
        else:
            told.text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            told.logprobs = told.logprobs or {}
            told.logprobs.setdefault(name, []).extend(values)
        told.finish_reason = choice["finish_reason"]
        told.stop_reason = choice.get("stop_reason")
        if chunk.get("usage"):
            told.num_tokens = chunk["usage"]["completion_tokens"]
    assert all(c.finish_reason for c in answer.choices.values())
    return answer


def _add_delta(told: Told, delta: Body) -> None:
    if "role" in delta:
        assert not told.role and set(delta) == {"role"}, "the role comes first, once and alone"
        told.role = delta["role"]
    assert told.role, "a delta before the role"
    told.text += delta.get("content", "")
    for call in delta.get("tool_calls", ()):
        assert call["index"] == 0
        if "id" in call:
            assert not told.tool and call["id"].startswith("chatcmpl-tool-")
            told.tool = (call["type"], call["function"]["name"])
        told.arguments += call["function"]["arguments"]


# --- requests -----------------------------------------------------------------------------------------

_TEXTS = st.one_of(
    st.sampled_from(
        ["Once upon a time", "a", " two  spaces ", "1, 2, 3,", "漢字 and 👩‍🚀", "\n\n"]
    ),
    st.text(min_size=1, max_size=12),
)
_IDS = st.lists(st.integers(3, 49_000), min_size=1, max_size=6)
_STOPS = st.lists(
    st.sampled_from(["e", " a", "th", "ing", "zq", ".", ",", " the", "s t", "o", "in"]),
    min_size=1,
    max_size=3,
)
_GUIDES: st.SearchStrategy[Body] = st.sampled_from(
    [
        {"guided_regex": "[a-z]{2,6}( [a-z]{2,6}){0,3}"},
        {"guided_regex": "(yes|no|perhaps)\\."},
        {"guided_choice": ["happy", "sad", "so so", "sadly"]},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": ""},
        {"guided_grammar": GRAMMAR},
        {"response_format": {"type": "json_object"}},
    ]
)
_SHARED: dict[str, st.SearchStrategy[Any]] = {
    "top_p": st.sampled_from([1, 0.9, 0.4, None]),
    "top_k": st.sampled_from([-1, 1, 5, 40]),
    "min_p": st.sampled_from([0, 0.02, 0.3]),
    "frequency_penalty": st.sampled_from([0, 0.7, -1, None]),
    "presence_penalty": st.sampled_from([0, 1.1, -0.4]),
    "repetition_penalty": st.sampled_from([1, 1.3, 0.8]),
    "logit_bias": st.dictionaries(
        st.integers(300, 2000).map(str), st.sampled_from([-100, -3, 2, 5]), max_size=4
    ),
    "min_tokens": st.integers(0, 4),
    "stop": st.one_of(_STOPS, _STOPS.map(lambda s: s[0])),
    "stop_token_ids": st.lists(st.integers(200, 1500), max_size=40),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(1, 20),
    "add_special_tokens": st.booleans(),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(0, 3),
}
_CHAT_ONLY: dict[str, st.SearchStrategy[Any]] = {
    "add_generation_prompt": st.booleans(),
    "tools": st.just([TOOL]),
    "documents": st.just([{"title": "t", "text": "u"}]),
}
_COMPLETION_ONLY: dict[str, st.SearchStrategy[Any]] = {
    "logprobs": st.integers(0, 4),
    "allowed_token_ids": st.lists(st.integers(300, 3000), min_size=20, max_size=40),
}
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": _TEXTS}
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn, path: str) -> Body:
    """A body for the path, without a model; most are legal, some break a rule between fields."""
    own = _CHAT_ONLY if path == CHAT else _COMPLETION_ONLY
    body: Body = draw(_some_of({**_SHARED, **own}))
    body["max_tokens"] = draw(st.integers(1, 14))
    make: Callable[[st.DrawFn], Body] = draw(st.sampled_from([_greedy, _sampled, _sampled, _beam]))
    body.update(make(draw))
    if "allowed_token_ids" not in body and draw(st.integers(0, 3)) == 0:
        body.update(draw(_GUIDES))
    if path == CHAT:
        body["messages"] = draw(_MESSAGES)
        if draw(st.booleans()):
            body["logprobs"] = True
            body["top_logprobs"] = draw(st.integers(0, 4))
        if "tools" in body and not any(name.startswith("guided") for name in body):
            choice = {"type": "function", "function": {"name": TOOL_NAME}}
            body["tool_choice"] = draw(st.sampled_from(["none", choice]))
    else:
        body["prompt"] = draw(
            st.one_of(
                *(_TEXTS, _IDS),
                *(st.lists(_TEXTS, min_size=1, max_size=3), st.lists(_IDS, min_size=1, max_size=2)),
            )
        )
        if body.get("echo") and draw(st.integers(0, 4)) == 0:
            body["max_tokens"] = 0
            body.pop("min_tokens", None)
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return body


TOOL_NAME = TOOL["function"]["name"]  # type: ignore[index]


@st.composite
def _some_of(draw: st.DrawFn, fields: dict[str, st.SearchStrategy[Any]]) -> Body:
    names = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=6))
    return {name: draw(fields[name]) for name in names}


def _greedy(draw: st.DrawFn) -> Body:
    return {"temperature": 0}


def _sampled(draw: st.DrawFn) -> Body:
    n = draw(st.integers(1, 3))
    body: Body = {"temperature": draw(st.sampled_from([0.004, 0.3, 0.7, 1, 1.6, None])), "n": n}
    body["best_of"] = draw(st.sampled_from([None, 0, n, n + 1, n + 2]))
    body["seed"] = draw(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1))
    return body


def _beam(draw: st.DrawFn) -> Body:
    best_of = draw(st.integers(2, 3))
    return {
        **{"use_beam_search": True, "temperature": 0, "top_p": 1, "top_k": -1},
        **{"best_of": best_of, "n": draw(st.integers(1, best_of))},
        "length_penalty": draw(st.sampled_from([1.0, 0.5, 2.0])),
        "early_stopping": draw(st.booleans()),
    }


PATHS = (CHAT, COMPLETION)
