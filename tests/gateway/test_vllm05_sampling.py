"""From vllm-0.5 requests to generation specs: nulls, normalisation, rules and their order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.vllm05.sampling import Limits, completion_spec
from gateway.dialects.vllm05.schema import parse_completion
from gateway.spec import ConstraintSpec, GenerationSpec
from tests.fakes.vllm05 import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    LIMITS,
    MAX_MODEL_LEN,
    changed,
    length,
    refusal,
    resolve,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "boolean"}, "a": {"enum": ["é", 1]}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"boolean"},"a":{"enum":["é",1]}}}'
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}


def spec(endpoint: str = COMPLETION, **fields: Any) -> GenerationSpec:
    return resolve(endpoint, changed(endpoint, **fields)).specs[0]


def message(endpoint: str = COMPLETION, limits: Limits = LIMITS, **fields: Any) -> str:
    error = refusal(endpoint, changed(endpoint, **fields), limits)
    assert error.status == 400
    return error.message


# --- defaults and nulls -------------------------------------------------------------------------------


def test_defaults_differ_between_the_routes() -> None:
    chat, completion = spec(CHAT), spec(COMPLETION)
    assert (chat.temperature, completion.temperature) == (0.7, 1.0)
    prompt_len = length(resolve(CHAT, changed(CHAT)).prompts[0])
    assert (chat.max_tokens, completion.max_tokens) == (MAX_MODEL_LEN - prompt_len, 16)
    assert completion == GenerationSpec()


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_null_means_the_neutral_value(endpoint: str) -> None:
    nulls = [
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "seed"),
        *("stream", "best_of", "logit_bias", "stop_token_ids", "response_format"),
        "prompt_logprobs",
    ]
    found = spec(endpoint, **dict.fromkeys(nulls), max_tokens=16)
    assert found == GenerationSpec(max_tokens=16)


def test_null_max_tokens_is_the_default_of_each_route() -> None:
    assert spec(COMPLETION, max_tokens=None).max_tokens == 16
    assert spec(CHAT, max_tokens=None) == spec(CHAT)
    assert spec(CHAT, n=None).n == 1
    assert spec(CHAT, logprobs=True, top_logprobs=None).logprobs == 0


# --- normalisation ------------------------------------------------------------------------------------


def test_best_of_zero_means_n() -> None:
    assert spec(n=3, best_of=0).best_of == spec(n=3).best_of == 3


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (1e-9, 0.01), (0.005, 0.01), (0.02, 0.02)])
def test_a_tiny_temperature_is_raised_and_not_greedy(asked: float, used: float) -> None:
    assert spec(temperature=asked).temperature == used


def test_minus_one_is_no_seed() -> None:
    assert (spec(seed=-1).seed, spec(seed=7).seed, spec(seed=0).seed) == (None, 7, 0)


def test_greedy_switches_the_masks_off_after_checking_them() -> None:
    found = spec(temperature=0, top_p=0.1, top_k=2, min_p=0.5)
    assert (found.top_p, found.top_k, found.min_p) == (1.0, -1, 0.0)
    assert message(temperature=0, top_p=2) == "top_p must be in (0, 1], got 2.0."


def test_top_k_above_the_vocabulary_is_off() -> None:
    assert (spec(top_k=10**12).top_k, spec(top_k=2).top_k, spec(top_k=-1).top_k) == (-1, 2, -1)


def test_a_stop_string_is_a_list_of_one_and_holds_text_back() -> None:
    found = spec(stop="END")
    assert (found.stop, found.hold_back_longest_stop) == (("END",), True)
    assert not spec(stop=["END"], include_stop_str_in_output=True).hold_back_longest_stop
    assert not spec().hold_back_longest_stop


def test_stop_ids_that_no_token_has_are_harmless() -> None:
    assert spec(stop_token_ids=[-1, 5, 10**12, 998]).stop_token_ids == (5, 998)


def test_echo_of_the_prompt_alone_generates_one_token() -> None:
    assert spec(echo=True, max_tokens=0).max_tokens == 1
    assert message(max_tokens=0) == "max_tokens must be at least 1, got 0."
    assert message(CHAT, max_tokens=0) == "max_tokens must be at least 1, got 0."


def test_echo_scores_the_prompt() -> None:
    assert spec(echo=True, logprobs=3).prompt_logprobs == 3
    assert spec(echo=True, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    assert spec(echo=True).prompt_logprobs is None
    assert spec(logprobs=3).prompt_logprobs is None
    assert spec(CHAT, echo=True).prompt_logprobs == 0
    assert spec(CHAT, echo=True, logprobs=True, top_logprobs=2).prompt_logprobs == 2
    assert spec(CHAT, echo=True, stream=True).prompt_logprobs is None


def test_chat_logprobs() -> None:
    assert spec(CHAT).logprobs is None
    assert spec(CHAT, logprobs=True).logprobs == 0
    assert spec(CHAT, logprobs=True, top_logprobs=5).logprobs == 5


# --- rules --------------------------------------------------------------------------------------------

RULES: list[tuple[str, dict[str, Any]]] = [
    ("n must be at least 1, got 0.", {"n": 0}),
    (
        "best_of must be greater than or equal to n, got n=2 and best_of=1.",
        {"n": 2, "best_of": 1},
    ),
    ("presence_penalty must be in [-2, 2], got 2.5.", {"presence_penalty": 2.5}),
    ("frequency_penalty must be in [-2, 2], got -3.0.", {"frequency_penalty": -3}),
    ("repetition_penalty must be in (0, 2], got 0.0.", {"repetition_penalty": 0}),
    ("temperature must be non-negative, got -1.0.", {"temperature": -1}),
    ("top_p must be in (0, 1], got 0.0.", {"top_p": 0}),
    ("top_k must be -1 (disable), or at least 1, got 0.", {"top_k": 0}),
    ("min_p must be in [0, 1], got 1.5.", {"min_p": 1.5}),
    ("max_tokens must be at least 1, got -5.", {"max_tokens": -5}),
    ("min_tokens must be greater than or equal to 0, got -1.", {"min_tokens": -1}),
    (
        "min_tokens must be less than or equal to max_tokens=4, got 9.",
        {"min_tokens": 9, "max_tokens": 4},
    ),
    ("stop cannot contain an empty string.", {"stop": ["a", ""]}),
    (
        "early_stopping is not effective and must be False when not using beam search.",
        {"early_stopping": True},
    ),
    (
        "length_penalty is not effective and must be the default value of 1.0 when not using beam"
        " search.",
        {"length_penalty": 1.5},
    ),
    (
        "best_of must be 1 when using greedy sampling.Got 2.",
        {"best_of": 2, "temperature": 0, "n": 1},
    ),
]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_rules_in_order(endpoint: str) -> None:
    """With every rule from here on broken, the first one is told."""
    for index, (text, _) in enumerate(RULES):
        broken: dict[str, Any] = {}
        for _, fields in reversed(RULES[index:]):
            broken |= fields
        assert message(endpoint, **broken) == text


BEAM: list[tuple[str, dict[str, Any]]] = [
    ("best_of must be greater than 1 when using beam search. Got 1.", {}),
    ("temperature must be 0 when using beam search.", {"best_of": 2}),
    ("top_p must be 1 when using beam search.", {"temperature": 0}),
    ("top_k must be -1 when using beam search.", {"top_p": 1}),
]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_beam_rules_in_order(endpoint: str) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "temperature": 0.7, "top_p": 0.5, "top_k": 3}
    for text, mended in BEAM:
        fields |= mended
        assert message(endpoint, **fields) == text
    fields |= {"top_k": -1, "length_penalty": 2, "early_stopping": True}
    found = spec(endpoint, **fields)
    assert (found.use_beam_search, found.best_of, found.length_penalty) == (True, 2, 2.0)
    assert found.early_stopping


# --- the whole order ----------------------------------------------------------------------------------


def test_checks_behind_the_types_come_in_order() -> None:
    fields: dict[str, Any] = {
        "suffix": "x",
        "guided_decoding_backend": "foo",
        "prompt": [],
        "max_tokens": MAX_MODEL_LEN,
        "logit_bias": {"x": 1},
        "allowed_token_ids": [],
        "temperature": -1,
        "logprobs": 21,
    }
    steps: list[tuple[str, dict[str, Any]]] = [
        ("suffix is not currently supported", {"suffix": None}),
        (
            "Unknown guided decoding backend 'foo'. Must be one of 'outlines, 'lm-format-enforcer'",
            {"guided_decoding_backend": "outlines"},
        ),
        ("please provide at least one prompt", {"prompt": [[5, 5], [5]]}),
        (
            f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested"
            f" {MAX_MODEL_LEN + 2} tokens (2 in the messages, {MAX_MODEL_LEN} in the completion)."
            " Please reduce the length of the messages or completion.",
            {"max_tokens": 4},
        ),
        (
            "Found token_id in logit_bias that is not an integer or string representing an integer",
            {"logit_bias": {"995": 1}},
        ),
        ("token_id 995 in logit_bias contains out-of-vocab token id", {"logit_bias": None}),
        ("Empty allowed_token_ids provided", {"allowed_token_ids": [1, 990]}),
        ("allowed_token_ids contains out-of-vocab token id", {"allowed_token_ids": [-1]}),
        ("allowed_token_ids contains out-of-vocab token id", {"allowed_token_ids": [7, 6, 7]}),
        ("temperature must be non-negative, got -1.0.", {"temperature": 1}),
        ("Cannot request more than 20 logprobs.", {"logprobs": 20}),
    ]
    for text, mended in steps:
        assert message(**fields) == text
        fields |= mended
    found = resolve(COMPLETION, changed(COMPLETION, **fields))
    assert len(found.specs) == 2
    assert found.specs[0].allowed_token_ids == (7, 6)


def test_the_longest_of_several_prompts_counts() -> None:
    prompts = [[5], [5] * MAX_MODEL_LEN]
    assert "maximum context length" in message(prompt=prompts, max_tokens=1, temperature=-1)


def test_a_prompt_that_fills_the_context_leaves_nothing_to_chat() -> None:
    words = " ".join(["w"] * MAX_MODEL_LEN)
    count = MAX_MODEL_LEN + 2
    assert message(CHAT, messages=[{"role": "user", "content": words}]) == (
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested {count}"
        " tokens in the messages, Please reduce the length of the messages."
    )
    assert spec(
        CHAT, messages=[{"role": "user", "content": words}], truncate_prompt_tokens=12
    ).max_tokens == (MAX_MODEL_LEN - 12)


def test_an_embedding_input_may_be_as_long_as_the_context() -> None:
    assert resolve(EMBEDDING, changed(EMBEDDING, input=[5] * MAX_MODEL_LEN))
    assert message(EMBEDDING, input=[5] * (MAX_MODEL_LEN + 1)) == (
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested"
        f" {MAX_MODEL_LEN + 1} tokens in the input for embedding generation. Please reduce the length"
        " of the input."
    )


@pytest.mark.parametrize(
    ("endpoint", "fields", "field"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "w"}], "prompt_logprobs": 21}, ""),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, ""),
        (COMPLETION, {"logprobs": 21}, ""),
        (COMPLETION, {"prompt": [[5], []]}, "prompt"),
        (COMPLETION, {"prompt": ""}, "prompt"),
    ],
)
def test_the_engines_refusals_are_told_in_band(
    endpoint: str, fields: dict[str, Any], field: str
) -> None:
    error = refusal(endpoint, changed(endpoint, **fields))
    assert error.in_band
    wanted = "Prompt cannot be empty" if field else "Cannot request more than 20 logprobs."
    assert error.message == wanted


def test_one_request_has_so_many_sequences_at_most() -> None:
    assert spec(n=1024).n == 1024
    assert message(prompt=[[5]] * 2, n=513) == (
        "A request may have at most 1024 sequences, got 2 prompts with 513 each."
    )


def test_ids_above_the_vocabulary_name_their_prompt() -> None:
    error = refusal(COMPLETION, changed(COMPLETION, prompt=[[5], [999, 1000]]))
    assert (error.field, error.message) == (
        "prompt[1]",
        "prompt[1] contains the token id 1000; the vocabulary has 1000",
    )
    assert refusal(EMBEDDING, changed(EMBEDDING, input=[5, 1000])).field == "input"
    assert resolve(COMPLETION, changed(COMPLETION, prompt=[995, 999]))


# --- logit_bias ---------------------------------------------------------------------------------------


def test_biases_are_clamped_and_keys_read_as_integers() -> None:
    found = spec(logit_bias={"5": 500, " 6 ": -1e30, "+7": 1.5, "05": 2})
    assert dict(found.logit_bias) == {5: 2.0, 6: -100.0, 7: 1.5}


@pytest.mark.parametrize("key", ["990", "-1", "99999999", "12"])
def test_bias_reaches_the_base_vocabulary_only(key: str) -> None:
    limits = Limits(MAX_MODEL_LEN, 1000, 990, added_token_ids=frozenset([12]))
    assert message(CHAT, limits=limits, logit_bias={key: 1}) == (
        f"token_id {key} in logit_bias contains out-of-vocab token id"
    )


# --- guides -------------------------------------------------------------------------------------------


def test_first_guided_field_wins() -> None:
    fields: dict[str, Any] = {
        "guided_grammar": "start: A",
        "response_format": {"type": "json_object"},
    }
    assert spec(guided_json=SCHEMA, **fields).constraint == ConstraintSpec(
        "json_schema", SCHEMA_TEXT
    )
    assert spec(guided_regex="a+", **fields).constraint == ConstraintSpec("regex", "a+")
    assert spec(guided_choice=["a", "b"], **fields).constraint == ConstraintSpec(
        "choice", choices=("a", "b")
    )
    assert spec(guided_regex="", guided_json=None, **fields).constraint == ConstraintSpec(
        "grammar", "start: A"
    )
    assert spec(guided_json={}, response_format={"type": "json_object"}).constraint == (
        ConstraintSpec("json_object")
    )
    assert spec(response_format={"type": "text"}).constraint is None


def test_a_schema_may_be_given_as_text() -> None:
    assert (
        spec(guided_json=json.dumps(SCHEMA, indent=2)).constraint
        == spec(guided_json=SCHEMA).constraint
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json", "Expecting value: line 1 column 1 (char 0)"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[1]", "guided_json must be a JSON object"),
        ("[" * 5000, "Nested too deeply"),
    ],
)
def test_a_schema_text_must_be_json(text: str, told: str) -> None:
    assert message(guided_json=text) == told


def test_a_number_that_json_cannot_say_is_refused() -> None:
    raw = b'{"model":"MODEL","prompt":"x","guided_json":{"maximum":1e400}}'
    with pytest.raises(Exception, match="guided_json contains a number that is out of range"):
        completion_spec(parse_completion(raw, None), 1, LIMITS)


def test_whitespace_pattern_goes_with_the_schema() -> None:
    found = spec(guided_json=SCHEMA, guided_whitespace_pattern="[ ]?").constraint
    assert found is not None and found.whitespace_pattern == "[ ]?"


def test_named_tool_enforces_its_parameters() -> None:
    found = spec(CHAT, tools=[TOOL], tool_choice=NAMED)
    assert found.constraint == ConstraintSpec("json_schema", SCHEMA_TEXT)
    assert spec(CHAT, tools=[TOOL]).constraint is None
    assert spec(CHAT, tools=[TOOL], tool_choice="none").constraint is None
    nothing: list[Any] = [{}, None]
    for parameters in nothing:
        bare = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert spec(CHAT, tools=[bare], tool_choice=NAMED).constraint is None


def test_a_tool_that_is_not_there() -> None:
    wanted = {"type": "function", "function": {"name": "g"}}
    assert message(CHAT, tools=[TOOL], tool_choice=wanted, guided_decoding_backend="foo") == (
        "Tool 'g' has not been passed in `tools`."
    )


# --- anything legal -----------------------------------------------------------------------------------


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(-1, 3),
            "best_of": st.none() | st.integers(-1, 4),
            "temperature": st.none() | st.floats(-0.1, 3),
            "top_p": st.none() | st.floats(0, 1.1),
            "top_k": st.integers(-2, 2000),
            "use_beam_search": st.booleans(),
            "max_tokens": st.none() | st.integers(-1, 600),
            "min_tokens": st.integers(-1, 20),
            "echo": st.booleans(),
        },
    )
)
def test_a_spec_keeps_every_promise(fields: dict[str, Any]) -> None:
    raw = json.dumps(changed(COMPLETION, **fields)).encode()
    try:
        found = completion_spec(parse_completion(raw, None), 4, LIMITS)
    except Exception as error:
        assert type(error).__name__ == "DialectError"
        return
    assert 1 <= found.n <= found.best_of
    assert found.temperature == 0 or found.temperature >= 0.01
    assert 0 < found.top_p <= 1
    assert found.top_k == -1 or 1 <= found.top_k < LIMITS.vocab_size
    assert 1 <= found.max_tokens <= MAX_MODEL_LEN - 4
    assert 0 <= found.min_tokens <= found.max_tokens
    if found.temperature == 0:
        assert found.use_beam_search == (found.best_of > 1)
