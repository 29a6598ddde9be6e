"""The embedding backend: order, bounds, cancellation between passes, and errors that name the input."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from candor import errors
from engine.backends.embedding import BATCH_SEQUENCES, EmbeddingBackend


class Counting:
    """An encoder whose vectors say how long a sequence was; waits for its gate before each pass."""

    name, embedding_size, vocab_size, max_model_len = "counting", 2, 100, 8

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[int] = []
        self.has_begun = threading.Event()

    def embed(self, sequences: Sequence[Sequence[int]]) -> Any:
        self.has_begun.set()
        assert self.gate.wait(10)
        self.passes.append(len(sequences))
        return np.array([[len(ids), ids[0]] for ids in sequences], np.float32)


async def test_a_long_request_is_cut_into_passes_and_keeps_its_order() -> None:
    encoder = Counting()
    backend = EmbeddingBackend(encoder, slots=8, max_requests=4)
    sequences = [[i % 100] * (1 + i % 8) for i in range(2 * BATCH_SEQUENCES + 3)]
    vectors = await backend.embed(sequences)
    assert vectors.tolist() == [[len(ids), ids[0]] for ids in sequences]
    assert encoder.passes == [BATCH_SEQUENCES, BATCH_SEQUENCES, 3]
    progress = backend.progress()
    assert progress.is_idle and progress.step_seq == 3
    assert progress.load.engine.totals.prompt_tokens == sum(map(len, sequences))
    assert backend.close()


async def test_a_request_that_is_given_up_ends_between_two_passes() -> None:
    encoder = Counting()
    encoder.gate.clear()
    backend = EmbeddingBackend(encoder, slots=8, max_requests=4)
    long = asyncio.create_task(backend.embed([[1]] * (3 * BATCH_SEQUENCES)))
    await asyncio.to_thread(encoder.has_begun.wait, 10)
    assert not backend.progress().is_idle
    long.cancel()
    encoder.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await long
    await backend.wait_idle()
    assert (await backend.embed([[2, 2]])).tolist() == [[2, 2]]
    assert encoder.passes == [BATCH_SEQUENCES, 1]
    assert backend.close()


async def test_more_requests_than_it_may_hold_are_refused() -> None:
    encoder = Counting()
    encoder.gate.clear()
    backend = EmbeddingBackend(encoder, slots=1, max_requests=2)
    held = [asyncio.create_task(backend.embed([[i]])) for i in range(2)]
    await asyncio.to_thread(encoder.has_begun.wait, 10)
    with pytest.raises(errors.ResourceExhausted, match="no more than 2"):
        await backend.embed([[3]])
    assert backend.progress().load.engine.num_waiting == 1
    encoder.gate.set()
    assert [v.tolist() for v in await asyncio.gather(*held)] == [[[1, 0]], [[1, 1]]]
    assert backend.close()


@pytest.mark.parametrize(
    ("sequences", "field", "words"),
    [
        ([], "inputs", "nothing to embed"),
        ([[1], []], "inputs[1]", "no tokens"),
        ([[1] * 9], "inputs[0]", "9 tokens, the model takes 8"),
        ([[1], [2], [100]], "inputs[2]", "token 100, the vocabulary has 100"),
    ],
)
async def test_a_wrong_input_is_named_with_its_limit(
    sequences: list[list[int]], field: str, words: str
) -> None:
    backend = EmbeddingBackend(Counting(), slots=1, max_requests=1)
    with pytest.raises(errors.InvalidArgument, match=words) as caught:
        await backend.embed(sequences)
    assert caught.value.field == field
    assert backend.progress().is_idle and backend.close()
