"""Embeddings through the whole stack: the vectors of the dialect, the official client, the reference values."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
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
    arguments += ["--embedding-model", MODEL]
    # Meant for the model that generates: the encoder has no such context, and is not called so.
    environ = {"CANDOR_MAX_MODEL_LEN": "1024", "CANDOR_SERVED_ALIASES": "made-up"}
    with candor_stack(model_path, arguments=arguments, environ=environ) as stack:
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


def test_no_vector_is_left_out() -> None:
    assert sum("server" in vector for vector in VECTORS) == 5
    assert sum("server" not in vector for vector in VECTORS) == 2


def cosine_loss(found: Sequence[float], wanted: Sequence[float]) -> float:
    assert abs(np.linalg.norm(found) - 1) < 1e-5
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
    num_tokens = sum(len(case["ids"]) for case in GOLDEN)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_is_float32_of_the_same_values(embedder: Running, client: openai.OpenAI) -> None:
    case = GOLDEN[5]
    body = {"model": MODEL, "input": case["text"], "encoding_format": "base64"}
    reply = httpx.post(embedder.url + "/v1/embeddings", json=body, trust_env=False, timeout=60)
    found = np.frombuffer(base64.b64decode(reply.json()["data"][0]["embedding"]), "<f4")
    assert found.shape == (384,)
    plain = client.embeddings.create(model=MODEL, input=case["text"], encoding_format="float")
    assert plain.data[0].embedding == found.tolist()


def test_token_ids_give_the_vectors_of_their_texts(client: openai.OpenAI) -> None:
    cases = GOLDEN[1:4]
    by_ids = client.embeddings.create(model=MODEL, input=[case["ids"] for case in cases])
    for item, case in zip(by_ids.data, cases, strict=True):
        assert cosine_loss(item.embedding, case["embedding"]) < 1e-5
    assert by_ids.usage.prompt_tokens == sum(len(case["ids"]) for case in cases)
    alone = client.embeddings.create(model=MODEL, input=cases[0]["ids"])
    assert cosine_loss(alone.data[0].embedding, cases[0]["embedding"]) < 1e-5


def test_a_text_has_the_same_vector_in_any_company(client: openai.OpenAI) -> None:
    others = ["one word", "some more words than one", "a", "and then there are a few more"] * 10
    answer = client.embeddings.create(model=MODEL, input=[*others, GOLDEN[2]["text"], *others])
    assert cosine_loss(answer.data[40].embedding, GOLDEN[2]["embedding"]) < 1e-5
    first = answer.data[:4]
    for start in (4, 36, 41, 77):
        for here, there in zip(first, answer.data[start : start + 4], strict=True):
            assert cosine_loss(here.embedding, there.embedding) < 1e-5


def test_tokenize_counts_what_the_usage_counts(embedder: Running, client: openai.OpenAI) -> None:
    for case in (GOLDEN[2], GOLDEN[5]):
        body = {"model": MODEL, "prompt": case["text"]}
        reply = httpx.post(embedder.url + "/tokenize", json=body, trust_env=False).json()
        used = client.embeddings.create(model=MODEL, input=case["text"]).usage.prompt_tokens
        assert reply["count"] == used == len(case["ids"])
        assert (reply["tokens"], reply["max_model_len"]) == (case["ids"], MAX_TOKENS)


def test_a_text_beyond_the_models_length_is_refused_and_never_cut(client: openai.OpenAI) -> None:
    # [CLS] in front and [SEP] behind are two of them.
    fits = client.embeddings.create(model=MODEL, input="word " * (MAX_TOKENS - 2))
    assert fits.usage.prompt_tokens == MAX_TOKENS
    wrong: list[list[str] | list[list[int]]] = [
        ["fits", "word " * (MAX_TOKENS - 1)],
        [[1], [1] * (MAX_TOKENS + 1)],
    ]
    message = f"length is {MAX_TOKENS} tokens. However, you requested {MAX_TOKENS + 1} tokens"
    for inputs in wrong:
        with pytest.raises(openai.BadRequestError, match=message):
            client.embeddings.create(model=MODEL, input=inputs)


def test_more_texts_than_the_worker_takes_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2049 inputs, at most 2048"):
        client.embeddings.create(model=MODEL, input=[[1]] * 2049)


ASK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ASK),
        ("/v1/chat/completions", {**ASK, "stream": True}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/tokenize", ASK),
    ],
)
def test_what_an_encoder_cannot_do_is_a_clients_mistake(
    embedder: Running, path: str, body: dict[str, object]
) -> None:
    whole = {"model": MODEL, **body}
    reply = httpx.post(embedder.url + path, json=whole, trust_env=False, timeout=60)
    assert reply.status_code == 400
    assert set(reply.json()) == {"object", "message", "type", "param", "code"}


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
        served = [m["id"] for m in http.get("/v1/models").json()["data"]]
        assert served == ["synthetic", "made-up", MODEL]
