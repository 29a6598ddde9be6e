"""Embeddings through the whole stack: the vectors of the dialect, the official client, the reference values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from bench.stack import Running, candor_stack
from candor.cli import models
from tests.vectors import runner

MODEL, MAX_TOKENS = "all-minilm-l6-v2", 256
TESTS = Path(__file__).parents[1]
GOLDEN = json.loads((TESTS / "golden" / f"{MODEL}.json").read_text())["cases"]
VECTORS = [
    vector
    for vector in runner.load(TESTS / "vectors" / "vllm-0.5.jsonl")
    if vector["endpoint"] == "POST /v1/embeddings"
    and vector.get("server", {"kind": "embedding"}) == {"kind": "embedding"}
]


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    """A stack whose one model embeds."""
    models.ensure(MODEL)
    with candor_stack(MODEL) as stack:
        yield stack


@pytest.fixture(scope="module")
def both(model_path: Path) -> Iterator[Running]:
    """A generating model with an embedding model beside it."""
    models.ensure(MODEL)
    arguments = ["--runner", "synthetic", "--served-model-name", "synthetic"]
    with candor_stack(model_path, arguments=[*arguments, "--embedding-model", MODEL]) as stack:
        yield stack


@pytest.fixture
def client(embedder: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_vector(vector: runner.Vector, embedder: Running) -> None:
    target = runner.Target(
        embedder.url,
        MAX_TOKENS,
        model=MODEL,
        token_ids=(7592, 2088, 1996, 4937, 2006),
        server={"kind": "embedding"},
    )
    assert runner.judge(vector, target) == []


def test_the_vectors_of_every_kind_are_there() -> None:
    assert len(VECTORS) >= 7


def cosine_loss(found: list[float], wanted: list[float]) -> float:
    return 1 - float(np.dot(np.array(found), np.array(wanted)))


@pytest.mark.parametrize("is_packed", [False, True], ids=["float", "base64"])
def test_a_batch_of_texts_gives_the_reference_vectors_in_order(
    client: openai.OpenAI, is_packed: bool
) -> None:
    texts = [case["text"] for case in GOLDEN]
    if is_packed:  # what the client asks for, and unpacks, when it is told nothing
        answer = client.embeddings.create(model=MODEL, input=texts)
    else:
        answer = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [item.index for item in answer.data] == list(range(len(GOLDEN)))
    for item, case in zip(answer.data, GOLDEN, strict=True):
        assert cosine_loss(item.embedding, case["embedding"]) < 1e-5
    assert answer.usage.prompt_tokens == sum(len(case["ids"]) for case in GOLDEN)


def test_token_ids_and_text_give_the_same_vector(client: openai.OpenAI) -> None:
    case = GOLDEN[1]
    by_text = client.embeddings.create(model=MODEL, input=case["text"])
    by_ids = client.embeddings.create(model=MODEL, input=case["ids"])
    assert by_text.data[0].embedding == by_ids.data[0].embedding
    assert by_text.usage == by_ids.usage


def test_tokenize_counts_what_the_usage_counts(embedder: Running, client: openai.OpenAI) -> None:
    text = GOLDEN[2]["text"]
    reply = httpx.post(
        embedder.url + "/tokenize", json={"model": MODEL, "prompt": text}, trust_env=False
    )
    used = client.embeddings.create(model=MODEL, input=text).usage.prompt_tokens
    assert reply.json()["count"] == used == len(GOLDEN[2]["ids"])


def test_a_text_beyond_the_models_length_is_refused_and_never_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        client.embeddings.create(model=MODEL, input="word " * 300)


def test_each_kind_of_model_answers_for_its_own(both: Running) -> None:
    with httpx.Client(base_url=both.url, timeout=60, trust_env=False) as http:
        body = {"model": MODEL, "input": GOLDEN[0]["text"]}
        good = http.post("/v1/embeddings", json=body).json()
        assert cosine_loss(good["data"][0]["embedding"], GOLDEN[0]["embedding"]) < 1e-5
        wrong = http.post("/v1/embeddings", json={**body, "model": "synthetic"})
        assert (wrong.status_code, wrong.json()["message"]) == (400, "Embedding API disabled")
        messages = [{"role": "user", "content": "hi"}]
        chat = {"model": MODEL, "messages": messages}
        refused = http.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 400 and MODEL in refused.json()["message"]
        answered = http.post(
            "/v1/chat/completions", json={**chat, "model": "synthetic", "max_tokens": 2}
        )
        assert answered.status_code == 200
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["synthetic", MODEL]
