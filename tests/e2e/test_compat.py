"""GET /v1/compat on a running stack says of every field what the code that parses it declares."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from bench.stack import Running
from gateway.dialects.fields import Rule
from gateway.dialects.vllm05 import requests

MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "POST /v1/chat/completions": (requests.ChatRequest,),
    "POST /v1/completions": (requests.CompletionRequest,),
    "POST /v1/embeddings": (requests.EmbeddingRequest,),
    "POST /tokenize": (requests.TokenizeCompletionRequest, requests.TokenizeChatRequest),
    "POST /detokenize": (requests.DetokenizeRequest,),
}
PARTS = {"name", "status", "type", "range", "rule", "proof"}


@pytest.fixture(scope="module")
def shown(scripted: Running) -> dict[str, Any]:
    """The answer's endpoints."""
    reply = httpx.get(scripted.url + "/v1/compat", trust_env=False)
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body["dialect"] == "vllm-0.5" and body["decisions"]
    return dict(body["endpoints"])


def test_every_endpoint_that_takes_a_body_is_listed(
    shown: dict[str, Any], scripted: Running
) -> None:
    document = httpx.get(scripted.url + "/openapi.json", trust_env=False).json()
    posts = {f"POST {path}" for path, verbs in document["paths"].items() if "post" in verbs}
    assert set(shown) == set(MODELS) == posts


@pytest.mark.parametrize("endpoint", MODELS)
def test_a_field_is_listed_as_it_is_declared(shown: dict[str, Any], endpoint: str) -> None:
    listed = {field["name"]: field for field in shown[endpoint]["fields"]}
    assert len(listed) == len(shown[endpoint]["fields"])
    declared = [m.model_fields for m in MODELS[endpoint]]
    assert {n for n in listed if "." not in n} == {n for fields in declared for n in fields}
    for fields in reversed(declared):
        for name, info in fields.items():
            (rule,) = (part for part in info.metadata if isinstance(part, Rule))
            field = listed[name]
            assert set(field) - {"default", "required"} == PARTS
            assert ("required" in field) == info.is_required() != ("default" in field)
            if fields is declared[0]:
                assert (field["status"], field["rule"]) == (rule.status, rule.says)
                assert field["proof"] == list(rule.proof) and field["proof"]
                assert field["range"] == (rule.range or None)
                if not info.is_required():
                    assert field["default"] == info.get_default(call_default_factory=True)
    assert shown[endpoint]["unknown_fields"]["status"] == "refused"


@pytest.mark.parametrize("endpoint", MODELS)
def test_what_is_listed_is_what_the_door_knows(
    shown: dict[str, Any], scripted: Running, endpoint: str
) -> None:
    """A listed name is never told to be an extra input; a name that is not listed is."""
    listed = {field["name"] for field in shown[endpoint]["fields"] if "." not in field["name"]}
    others = {n for models in MODELS.values() for m in models for n in m.model_fields} - listed
    url = scripted.url + endpoint.removeprefix("POST ")
    asked = dict.fromkeys(sorted(listed | others), "x")
    # tokenize has two forms and tells the errors of both, each listing the fields of the other.
    forms = len(MODELS[endpoint])
    for name in asked:
        message = httpx.post(url, json={name: {"wrong": [1]}}, trust_env=False).json()["message"]
        refusals = message.count(f"'{name}'), 'msg': 'Extra inputs are not permitted'")
        assert (refusals == forms) == (name in others), (name, message)
