"""The declarations hold: fields change what they say, proofs exist, the page is current."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog import ModelCard
from gateway.dialects import Encoded, GenerationCall, Ids, Options, open_dialect
from gateway.dialects.fields import Declaration, Rule, type_text
from gateway.dialects.reference import FOLDER, pages
from gateway.dialects.vllm05.errors import DialectError
from gateway.dialects.vllm05.reference import ENDPOINTS, compat
from gateway.events import ChoiceEnd, Delta, Event, Finished, PromptLogprobs, Tagged, TokenLogprobs
from gateway.spec import GenerationSpec
from tests.fakes.vllm05 import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    MAX_MODEL_LEN,
    TOKENIZE,
    changed,
    length,
)
from tests.vectors import runner

ROOT = Path(__file__).parents[2]
DIALECT = open_dialect("vllm-0.5", Options())
MODEL = ModelCard("MODEL", ("MODEL-ALIAS",), False, MAX_MODEL_LEN, "fp", 1000)

TOOL = {"type": "function", "function": {"name": "f"}}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
BEAM = {"use_beam_search": True, "best_of": 2, "temperature": 0}
Pair = tuple[dict[str, Any], dict[str, Any]]


def alone(field: str, value: Any, **others: Any) -> Pair:
    """The field added to a body that has the others."""
    return others, {**others, field: value}


def between(field: str, one: Any, other: Any, **others: Any) -> Pair:
    """Two values of the field."""
    return {**others, field: one}, {**others, field: other}


SHARED: dict[str, Pair] = {
    "model": alone("model", "MODEL-ALIAS"),
    "frequency_penalty": alone("frequency_penalty", 1),
    "presence_penalty": alone("presence_penalty", 1),
    "repetition_penalty": alone("repetition_penalty", 1.5),
    "logit_bias": alone("logit_bias", {"5": 1}),
    "max_tokens": alone("max_tokens", 3),
    "n": alone("n", 2),
    "seed": alone("seed", 7),
    "stop": alone("stop", "END"),
    "stop_token_ids": alone("stop_token_ids", [5]),
    "stream": alone("stream", True),
    "stream_options": alone("stream_options", {}, stream=True),
    "stream_options.include_usage": between(
        "stream_options", {"include_usage": True}, {"include_usage": False}, stream=True
    ),
    "stream_options.continuous_usage_stats": between(
        "stream_options",
        {"continuous_usage_stats": True},
        {"continuous_usage_stats": False},
        stream=True,
    ),
    "temperature": alone("temperature", 0),
    "top_p": alone("top_p", 0.5),
    "top_k": alone("top_k", 3),
    "min_p": alone("min_p", 0.1),
    "best_of": alone("best_of", 3),
    "use_beam_search": between("use_beam_search", True, False, best_of=2, temperature=0),
    "length_penalty": alone("length_penalty", 2, **BEAM),
    "early_stopping": alone("early_stopping", True, **BEAM),
    "include_stop_str_in_output": alone("include_stop_str_in_output", True, stop="a"),
    "ignore_eos": alone("ignore_eos", True),
    "min_tokens": alone("min_tokens", 2),
    "skip_special_tokens": alone("skip_special_tokens", False),
    "spaces_between_special_tokens": alone("spaces_between_special_tokens", False),
    "truncate_prompt_tokens": alone("truncate_prompt_tokens", 2),
    "prompt_logprobs": alone("prompt_logprobs", 1),
    "response_format": alone("response_format", {"type": "json_object"}),
    "response_format.type": between("response_format", {"type": "text"}, {"type": "json_object"}),
    "guided_json": alone("guided_json", {"type": "object"}),
    "guided_regex": alone("guided_regex", "a"),
    "guided_choice": alone("guided_choice", ["a"]),
    "guided_grammar": alone("guided_grammar", "start: A"),
    "guided_decoding_backend": between("guided_decoding_backend", "outlines", "other"),
    "guided_whitespace_pattern": alone("guided_whitespace_pattern", " ", guided_json={"a": 1}),
}


def turn(**keys: Any) -> list[dict[str, Any]]:
    """Messages of one turn."""
    return [{"role": "user", "content": "so", **keys}]


CHANGES: dict[str, dict[str, Pair]] = {
    CHAT: {
        **SHARED,
        "messages": alone("messages", [{"role": "user", "content": "other"}]),
        "messages.role": between("messages", turn(role="user"), turn(role="system")),
        "messages.content": between("messages", turn(), turn(content="other")),
        "logprobs": alone("logprobs", True),
        "top_logprobs": alone("top_logprobs", 2, logprobs=True),
        "tools": alone("tools", [TOOL]),
        "tools.type": between("tools", [TOOL], [{**TOOL, "type": "x"}]),
        "tools.function": between("tools", [TOOL], [OTHER_TOOL]),
        "tools.function.name": between("tools", [TOOL], [OTHER_TOOL]),
        "tools.function.description": between(
            "tools", [TOOL], [{"function": {"name": "f", "description": "d"}}]
        ),
        "tools.function.parameters": between(
            "tools",
            [TOOL],
            [{"function": {"name": "f", "parameters": {"type": "object"}}}],
            tool_choice=NAMED,
        ),
        "tool_choice": alone("tool_choice", NAMED, tools=[TOOL]),
        "tool_choice.type": between("tool_choice", NAMED, {**NAMED, "type": "x"}, tools=[TOOL]),
        "tool_choice.function": between("tool_choice", NAMED, OTHER_TOOL, tools=[TOOL, OTHER_TOOL]),
        "tool_choice.function.name": between(
            "tool_choice", NAMED, OTHER_TOOL, tools=[TOOL, OTHER_TOOL]
        ),
        "echo": alone("echo", True, messages=[{"role": "assistant", "content": "so"}]),
        "add_generation_prompt": alone("add_generation_prompt", False),
        "add_special_tokens": alone("add_special_tokens", True),
        "documents": alone("documents", [{"title": "t"}]),
        "chat_template": alone("chat_template", "{{ x }}"),
        "chat_template_kwargs": alone("chat_template_kwargs", {"x": 1}),
    },
    COMPLETION: {
        **SHARED,
        "prompt": alone("prompt", "other"),
        "echo": alone("echo", True),
        "logprobs": alone("logprobs", 2),
        "allowed_token_ids": alone("allowed_token_ids", [5]),
        "add_special_tokens": alone("add_special_tokens", False),
    },
    EMBEDDING: {
        "model": alone("model", "MODEL-ALIAS"),
        "input": alone("input", ["a", "b"]),
        "encoding_format": alone("encoding_format", "base64"),
    },
    TOKENIZE: {
        "model": alone("model", "MODEL-ALIAS"),
        "prompt": alone("prompt", "other"),
        "add_special_tokens": alone("add_special_tokens", False),
    },
    DETOKENIZE: {
        "model": alone("model", "MODEL-ALIAS"),
        "tokens": alone("tokens", [7]),
    },
}
TURNS = [{"role": "user", "content": "a"}]
TOKENIZE_CHAT: dict[str, Pair] = {
    "messages": between("messages", TURNS, [{"role": "user", "content": "b"}]),
    "add_generation_prompt": alone("add_generation_prompt", False, messages=TURNS),
    "add_special_tokens": alone("add_special_tokens", True, messages=TURNS),
    "messages.role": between("messages", turn(role="user"), turn(role="system")),
    "messages.content": between("messages", turn(), turn(content="other")),
}


# --- what the rest of the world gets to see of a request ------------------------------------------------


def observe(endpoint: str, body: dict[str, Any]) -> Any:
    """Everything a body leads to: prompts, specs, and the answer to a fixed script; or the refusal."""
    try:
        return _observe(endpoint, json.dumps(body).encode())
    except DialectError as error:
        return error.message


def _observe(endpoint: str, raw: bytes) -> Any:
    if endpoint in (CHAT, COMPLETION):
        call = (DIALECT.chat if endpoint == CHAT else DIALECT.completion)(raw, None)
        prompts = call.prompts()
        encoded = [Encoded([5] * length(p), "text ", "te") for p in prompts]
        specs = call.specs(encoded, MODEL)
        return call.model, prompts, specs, _answer(call, encoded, specs)
    if endpoint == EMBEDDING:
        embedding = DIALECT.embedding(raw, None)
        inputs = embedding.prompts()
        encoded = [Encoded([5] * length(p)) for p in inputs]
        embedding.check(encoded, MODEL)
        vectors = [[0.5]] * len(inputs)
        return inputs, _without_ids(embedding.body(vectors, encoded, 1))
    if endpoint == TOKENIZE:
        tokenize = DIALECT.tokenize(raw, None)
        return tokenize.model, tokenize.prompt()
    detokenize = DIALECT.detokenize(raw, None)
    return detokenize.model, detokenize.token_ids


def _answer(
    call: GenerationCall, encoded: Sequence[Encoded], specs: Sequence[GenerationSpec]
) -> bytes:
    renderer = call.renderer(encoded, specs, MODEL, 1)
    script: list[Tagged] = []
    for prompt, spec in enumerate(specs):
        script += [Tagged(prompt, event) for event in _script(spec, len(encoded[prompt].token_ids))]
    return _without_ids(renderer.feed(script) + renderer.finish())


def _script(spec: GenerationSpec, prompt_len: int) -> list[Event]:
    events: list[Event] = []
    if spec.prompt_logprobs is not None:
        events.append(PromptLogprobs((None, *[_entry(spec.prompt_logprobs)] * (prompt_len - 1))))
    for choice in range(spec.best_of):
        for text, end in (("a", None), ("b", ChoiceEnd("stop", None, -1.0))):
            logprobs = () if spec.logprobs is None else (_entry(spec.logprobs),)
            events.append(Delta(choice, (5,), text, logprobs, end))
    return [*events, Finished(0)]


def _entry(k: int) -> TokenLogprobs:
    count = max(k, 1)
    ids = range(5, 5 + count)
    return TokenLogprobs(ids, [-1.0] * count, range(1, count + 1), [f"t{i}" for i in ids])


def _without_ids(answer: bytes) -> bytes:
    return re.sub(rb"-[0-9a-f]{32}", b"-", answer)


# --- the fields -----------------------------------------------------------------------------------------


def declared(status: str) -> list[tuple[str, Declaration]]:
    return [
        (endpoint.path, declaration)
        for endpoint in ENDPOINTS
        for declaration in endpoint.declarations()
        if declaration.rule.status == status
    ]


def label(value: Any) -> str | None:
    return value.name if isinstance(value, Declaration) else None


@pytest.mark.parametrize(("endpoint", "field"), declared("honoured"), ids=label)
def test_changing_a_field_changes_the_outcome(endpoint: str, field: Declaration) -> None:
    changes = CHANGES[endpoint]
    pairs = [table[field.name] for table in (changes,) if field.name in table]
    if endpoint == TOKENIZE and field.name in TOKENIZE_CHAT:
        pairs.append(TOKENIZE_CHAT[field.name])
    assert pairs, f"no change is known for {endpoint} {field.name}"
    for one, other in pairs:
        bodies = [_body(endpoint, fields) for fields in (one, other)]
        assert observe(endpoint, bodies[0]) == observe(endpoint, bodies[0])
        assert observe(endpoint, bodies[0]) != observe(endpoint, bodies[1])


def _body(endpoint: str, fields: dict[str, Any]) -> dict[str, Any]:
    if endpoint == TOKENIZE and "messages" in fields:
        return {"model": "MODEL", **fields}
    return changed(endpoint, **fields)


def test_no_change_is_left_over() -> None:
    for endpoint in ENDPOINTS:
        names = {d.name for d in endpoint.declarations() if d.rule.status == "honoured"}
        table = CHANGES[endpoint.path].keys() | (
            TOKENIZE_CHAT.keys() if endpoint.path == TOKENIZE else set()
        )
        assert table == names


CALL = {"name": "f", "arguments": "{}"}
LOST = {
    "messages.name": ("user", "bob"),
    "messages.tool_calls": ("assistant", [{"id": "1", "type": "function", "function": CALL}]),
    "messages.function_call": ("assistant", CALL),
    "messages.refusal": ("assistant", "no"),
    "messages.tool_call_id": ("tool", "1"),
}
"""Keys of a message that have no effect: the role that may have each, and a value."""


@pytest.mark.parametrize(("endpoint", "field"), declared("accepted"), ids=label)
def test_accepted_fields_change_nothing(endpoint: str, field: Declaration) -> None:
    one: dict[str, Any] = {}
    other: dict[str, Any] = {field.name: "x"}
    if field.name in LOST:
        role, value = LOST[field.name]
        key = field.name.removeprefix("messages.")
        plain, extra = turn(role=role), turn(role=role, **{key: value})
        one, other = ({"messages": [*turn(), *turns]} for turns in (plain, extra))
    bodies = [_body(endpoint, fields) for fields in (one, other)]
    assert observe(endpoint, bodies[0]) == observe(endpoint, bodies[1])


@pytest.mark.parametrize(("endpoint", "field"), declared("refused"), ids=label)
def test_refused_fields_are_named(endpoint: str, field: Declaration) -> None:
    value: Any = 1 if "integer" in field.type else "x"
    told = observe(endpoint, changed(endpoint, **{field.name: value}))
    assert isinstance(told, str) and field.name in told
    assert observe(endpoint, changed(endpoint, **{field.name: None})) == observe(
        endpoint, changed(endpoint)
    )


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.path)
def test_known_unknown_fields_are_refused(endpoint: Any) -> None:
    declared_names = {d.name for d in endpoint.declarations()}
    for name in endpoint.known_unknowns:
        assert name not in declared_names
        told = observe(endpoint.path, changed(endpoint.path, **{name: None}))
        assert "Extra inputs are not permitted" in told and f"'{name}'" in told


# --- the proofs -----------------------------------------------------------------------------------------

VECTORS = {
    vector["id"]: vector for vector in runner.load(ROOT / "tests" / "vectors" / "vllm-0.5.jsonl")
}
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
}


def rules() -> list[tuple[str, str, Rule]]:
    found = [(e.path, d.name, d.rule) for e in ENDPOINTS for d in e.declarations()]
    return found + [(e.path, "", e.unknown) for e in ENDPOINTS]


def test_every_rule_is_a_sentence_with_a_proof_that_exists() -> None:
    for endpoint, name, rule in rules():
        where = f"{endpoint} {name}"
        assert re.fullmatch(r"[A-Z].*\.", rule.says), where
        assert rule.proof, where
        for proof in rule.proof:
            assert proof in VECTORS or proof in TESTS, f"{where}: there is no {proof}"


def test_the_vectors_that_prove_a_field_speak_of_it() -> None:
    for endpoint, name, rule in rules():
        texts = [json.dumps(VECTORS[proof]) for proof in rule.proof if proof in VECTORS]
        if name and texts:
            field = name.rpartition(".")[2]
            assert any(f'"{field}"' in text for text in texts), f"{endpoint} {name}: {rule.proof}"


# --- what is made of them -------------------------------------------------------------------------------


def test_the_committed_page_is_current() -> None:
    for file_name, text in pages().items():
        committed = (ROOT / FOLDER / file_name).read_text(encoding="utf-8")
        assert committed == text, "run `python -m gateway.dialects.reference`"


def test_compat_lists_every_field_of_every_endpoint() -> None:
    shown = json.loads(DIALECT.compat())
    assert shown == json.loads(json.dumps(compat()))
    assert set(shown["endpoints"]) == {CHAT, COMPLETION, EMBEDDING, TOKENIZE, DETOKENIZE}
    fields = {f["name"]: f for f in shown["endpoints"][CHAT]["fields"]}
    assert fields["temperature"] == {
        "name": "temperature",
        "status": "honoured",
        "type": "number or null",
        "default": 0.7,
        "range": "0 and above",
        "rule": "Divides the logits. 0 is greedy; above 0, values below 0.01 count as 0.01. Null means 1.",
        "proof": ["range-temperature-132", "range-temperature-high-ok", "lp-temperature-scaled"],
    }
    assert fields["model"]["required"] is True and "default" not in fields["model"]
    assert fields["tools.function.parameters"]["type"] == "object or null"
    assert shown["endpoints"][CHAT]["unknown_fields"]["status"] == "refused"


def test_types_are_said_in_the_words_of_json() -> None:
    assert type_text(str | list[int] | None) == "string or list of integer or null"
    assert type_text(dict[str, float]) == "object of number"
    with pytest.raises(TypeError, match="no word for"):
        type_text(bytes)


def test_ids_are_among_the_prompts_that_are_observed() -> None:
    assert observe(COMPLETION, changed(COMPLETION, prompt=[5, 6]))[1] == [Ids((5, 6))]
