"""The numpy encoder gives the vectors of the reference implementation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from candor.cli import models
from engine.runners.bert import MAX_BATCH_TOKENS, BertEncoder

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "all-minilm-l6-v2.json").read_text())[
    "cases"
]


@pytest.fixture(scope="module")
def encoder() -> BertEncoder:
    return BertEncoder(models.ensure("all-minilm-l6-v2"))


def test_a_batch_equals_the_reference_within_1e_5_cosine(encoder: BertEncoder) -> None:
    vectors = encoder.embed([case["ids"] for case in GOLDEN])
    wanted = np.array([case["embedding"] for case in GOLDEN])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert (1 - np.sum(vectors * wanted, axis=1)).max() < 1e-5
    assert np.abs(vectors - wanted).max() < 1e-5


def test_a_vector_does_not_depend_on_its_neighbours(encoder: BertEncoder) -> None:
    alone = np.concatenate([encoder.embed([case["ids"]]) for case in GOLDEN])
    assert np.allclose(alone, encoder.embed([case["ids"] for case in GOLDEN]), atol=1e-6)


def test_more_tokens_than_one_pass_takes_give_the_same_vectors(encoder: BertEncoder) -> None:
    ids = GOLDEN[5]["ids"]
    many = MAX_BATCH_TOKENS // len(ids) + 2
    vectors = encoder.embed([ids] * many)
    assert len(vectors) == many
    assert np.allclose(vectors, vectors[0], atol=1e-6)


def test_a_folder_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        BertEncoder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="no BERT encoder"):
        BertEncoder(tmp_path)
