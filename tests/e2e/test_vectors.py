"""Every vector of the dialect against whole stacks, one per configuration that the vectors name.

Vectors about embeddings run where the embedding model is served, see `test_embeddings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.stack import Running, candor_stack
from tests.e2e.conftest import MAX_MODEL_LEN
from tests.vectors import runner

VECTORS = runner.load(Path(__file__).parents[1] / "vectors" / "vllm-0.5.jsonl")
MODEL = "smollm2-135m"
# What the plain stack of conftest.py is, in the words of the vector file.
PLAIN: dict[str, Any] = {
    "served_model_names": ["MODEL", "MODEL-ALIAS"],
    "max_logprobs": 20,
    "kind": "generative",
}
CONFIGURED: dict[str, dict[str, Any]] = {
    "api-key": {**PLAIN, "api_key": "KEY"},
    "response-role": {**PLAIN, "response_role": "bot"},
}
ENVIRON = {
    "api-key": {"CANDOR_API_KEY": "KEY"},
    "response-role": {"CANDOR_RESPONSE_ROLE": "bot"},
}


def of(server: dict[str, Any], *, is_plain: bool = False) -> list[runner.Vector]:
    """The vectors that ask for this configuration, and for more of it than plain where that is not meant."""
    return [
        v
        for v in VECTORS
        if all(server.get(k) == x for k, x in v.get("server", {}).items())
        and is_plain == all(PLAIN.get(k) == x for k, x in v.get("server", {}).items())
    ]


def target(stack: Running, server: dict[str, Any]) -> runner.Target:
    """A stack with the default model."""
    return runner.Target(
        stack.url,
        MAX_MODEL_LEN,
        model=MODEL,
        token_ids=(504, 1132, 2305, 5050, 338),
        features=frozenset({"guided", "jinja"}),
        server=server,
    )


@pytest.mark.parametrize("vector", of(PLAIN, is_plain=True), ids=lambda vector: vector["id"])
def test_vector(vector: runner.Vector, real: Running) -> None:
    assert runner.judge(vector, target(real, PLAIN)) == []


@pytest.fixture(scope="module", params=CONFIGURED)
def configured(request: pytest.FixtureRequest, model_path: Path) -> Iterator[tuple[str, Running]]:
    """A stack of each configuration; none of their vectors looks at the text."""
    arguments = ["--served-model-name", f"{MODEL},{MODEL}-ALIAS", "--runner", "synthetic"]
    arguments += ["--max-model-len", str(MAX_MODEL_LEN)]
    name = request.param
    with candor_stack(model_path, arguments=arguments, environ=ENVIRON[name]) as stack:
        yield name, stack


def test_configured_vectors(configured: tuple[str, Running]) -> None:
    name, stack = configured
    vectors = of(CONFIGURED[name])
    assert vectors
    problems = {v["id"]: runner.judge(v, target(stack, CONFIGURED[name])) for v in vectors}
    assert {i: p for i, p in problems.items() if p} == {}


def test_no_vector_is_left_out() -> None:
    run = [*of(PLAIN, is_plain=True), *(v for server in CONFIGURED.values() for v in of(server))]
    left = [v for v in VECTORS if v not in run]
    assert len(run) == len({v["id"] for v in run}) == 215
    assert all(v["server"]["kind"] == "embedding" for v in left) and len(left) == 5
