"""Every vector of the dialect that applies to a plain server, against the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.stack import Running
from tests.e2e.conftest import MAX_MODEL_LEN
from tests.vectors import runner

VECTORS = runner.load(Path(__file__).parents[1] / "vectors" / "vllm-0.5.jsonl")
# What the plain stack of conftest.py is, in the words of the vector file.
SERVER: dict[str, object] = {
    "served_model_names": ["MODEL", "MODEL-ALIAS"],
    "max_logprobs": 20,
    "kind": "generative",
}
PLAIN = [v for v in VECTORS if all(SERVER.get(k) == x for k, x in v.get("server", {}).items())]


@pytest.mark.parametrize("vector", PLAIN, ids=lambda vector: vector["id"])
def test_vector(vector: runner.Vector, real: Running) -> None:
    target = runner.Target(
        real.url,
        MAX_MODEL_LEN,
        model="smollm2-135m",
        token_ids=(504, 1132, 2305, 5050, 338),
        features=frozenset({"guided", "jinja"}),
        server=SERVER,
    )
    assert runner.judge(vector, target) == []
