"""The native runner's own promises: the same bits in any batch, and blocks that add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runners import KvExhausted, StepInput
from engine.runners.gguf_file import GgufFile
from engine.runners.kernels import NB, pack, pack_blocks, product, unpack_rows
from engine.runners.native import NativeRunner, _BlockTable

MAX_ROWS, KV_TOKENS, MAX_LEN = 4, 6 * NB, 5 * NB


@pytest.fixture(scope="module")
def runner(model_path: Path) -> NativeRunner:
    return NativeRunner(
        str(model_path),
        max_rows=8,
        kv_tokens=2048,
        max_batch_tokens=256,
        max_model_len=512,
        threads=2,
    )


def _batch(*parts: tuple[int, int, list[int]]) -> StepInput:
    """(row, first position, ids) each; the last token of each part wants logits."""
    ids = [i for _, _, part in parts for i in part]
    return StepInput(
        np.array(ids, np.int32),
        np.array([at + i for _, at, part in parts for i in range(len(part))], np.int32),
        np.array([row for row, _, part in parts for _ in part], np.int32),
        np.array([i == len(part) - 1 for _, _, part in parts for i in range(len(part))]),
    )


def test_a_row_is_the_same_to_the_bit_alone_in_a_batch_in_chunks_and_behind_a_copy(
    runner: NativeRunner,
) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(100, 40_000, n).tolist() for n in (70, 3, 41, NB, 1)]
    alone = []
    for prompt in prompts:
        alone.append(runner.forward(_batch((0, 0, prompt))).copy()[0])
        runner.trim(0, 0)
    together = runner.forward(_batch(*((row, 0, p) for row, p in enumerate(prompts)))).copy()
    runner.forward(_batch((5, 0, prompts[0][:33])))
    chunked = runner.forward(_batch((5, 33, prompts[0][33:]))).copy()
    runner.copy(0, 6, 40)
    copied = runner.forward(_batch((6, 40, prompts[0][40:]))).copy()
    for row in range(7):
        runner.trim(row, 0)
    assert np.array_equal(together, np.stack(alone))
    assert np.array_equal(chunked[0], alone[0])
    assert np.array_equal(copied[0], alone[0])


def test_a_full_store_refuses_and_loses_nothing() -> None:
    table = _BlockTable(2, NB, 8 * NB)  # one block for tokens, four of slack
    rows = np.zeros(5 * NB, np.int32)
    table.extend(rows, np.arange(5 * NB, dtype=np.int32))
    with pytest.raises(KvExhausted):
        table.extend(np.ones(1, np.int32), np.zeros(1, np.int32))
    assert table.lengths.tolist() == [5 * NB, 0]
    table.trim(0, NB)
    assert table.extend(np.ones(1, np.int32), np.zeros(1, np.int32)) == []


@given(m=st.integers(1, 19), n=st.integers(1, 70), k=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_products_equal_numpys(m: int, n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k), np.float32)
    w = rng.standard_normal((n, k), np.float32)
    packed = pack(w)
    y = np.empty((m, packed.shape[0] * NB), np.float32)
    product(x, packed, y)
    assert np.allclose(y[:, :n], x @ w.astype(np.float16).astype(np.float32).T, atol=1e-4)
    assert not y[:, n:].any()
    one = np.empty_like(y[:1])
    product(x[-1:].copy(), packed, one)
    assert np.array_equal(one[0], y[-1])


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.3.ffn_down.weight"])
def test_quantised_weights_lose_nothing_on_their_way_into_panels(
    model_path: Path, name: str
) -> None:
    file = GgufFile(model_path)
    blocks, floats = file.blocks(name), file.tensor(name)
    assert blocks is not None
    packed = pack_blocks(blocks)
    rows = np.array([0, 1, NB - 1, NB, len(floats) - 1, 77])
    k = floats.shape[1]
    assert np.allclose(unpack_rows(packed, k, rows), floats[rows], rtol=2e-7, atol=1e-8)
    x = np.random.default_rng(3).standard_normal((11, k), np.float32)
    y = np.empty((11, packed.shape[0] * NB), np.float32)
    product(x, packed, y)
    assert np.allclose(y[:, : len(floats)], x @ floats.T, atol=2e-4 * np.sqrt(k))
    alone = np.empty_like(y[:1])
    for row in range(11):
        product(x[row : row + 1].copy(), packed, alone)
        assert np.array_equal(alone[0], y[row])


_ops = st.lists(
    st.tuples(
        st.sampled_from(["extend", "copy", "trim"]),
        st.integers(0, MAX_ROWS - 1),
        st.integers(0, MAX_ROWS - 1),
        st.integers(1, 2 * NB),
    ),
    max_size=40,
)


@given(_ops)
@settings(max_examples=300, deadline=None)
def test_blocks_add_up_and_each_row_keeps_its_content(ops: list[tuple[str, int, int, int]]) -> None:
    """Every block remembers who wrote what; a row must always read back what it wrote or copied.

    As long as the distinct tokens stay within the store's size it never refuses.
    """
    table = _BlockTable(MAX_ROWS, KV_TOKENS, MAX_LEN)
    memory = np.zeros((table.num_blocks, NB), np.int64)
    content: list[list[int]] = [[] for _ in range(MAX_ROWS)]
    stamp = 0
    for op, row, other, count in ops:
        if op == "extend" and len(content[row]) + count <= MAX_LEN:
            distinct = len({token for tokens in content for token in tokens}) + count
            positions = np.arange(len(content[row]), len(content[row]) + count, dtype=np.int32)
            try:
                copies = table.extend(np.full(count, row, np.int32), positions)
            except KvExhausted:
                assert distinct > KV_TOKENS
                continue
            for old, new in copies:
                memory[new] = memory[old]
            for position in positions.tolist():
                stamp += 1
                content[row].append(stamp)
                memory[table.table[row, position // NB], position % NB] = stamp
        elif op == "copy" and not content[row] and content[other]:
            kept = min(count, len(content[other]))
            for old, new in table.copy(other, row, kept):
                memory[new] = memory[old]
            content[row] = content[other][:kept]
        elif op == "trim":
            kept = min(count - 1, len(content[row]))
            table.trim(row, kept)
            content[row] = content[row][:kept]
        for r, tokens in enumerate(content):
            held = [memory[table.table[r, p // NB], p % NB] for p in range(len(tokens))]
            assert held == tokens
        used = {
            int(b) for r in range(MAX_ROWS) for b in table.table[r, : -(-len(content[r]) // NB)]
        }
        assert len(used) + len(table._free) == table.num_blocks
        assert used.isdisjoint(table._free)
