"""What every runner promises, and llama.cpp held against the numpy oracle on the real model.

A runner that is batch invariant must give the same bits where only the batch differs. Elsewhere, kernels for
few and for many tokens may add up in different orders; `tolerance` says how far that moves a logit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.runners import KvExhausted, Runner, open_runner
from engine.runners.llamacpp import LlamaCppRunner
from tests.fakes.runners import step
from tokenizer_svc import llama_abi

Array = NDArray[np.float32]

ROWS = 6
BATCH = 512


@dataclass(frozen=True)
class Case:
    name: str
    tolerance: float
    """Largest difference of a logit that the order of additions may make."""
    long: int
    """Tokens of the long-context test: what the runner computes in a few seconds."""


CASES = (
    Case("synthetic", tolerance=0.0, long=6000),
    # Seen: 5e-5.
    Case("reference", tolerance=1e-3, long=400),
    # Seen: 0 on a processor with AVX-512; llama.cpp promises nothing, so other kernels may differ.
    Case("llamacpp", tolerance=0.5, long=2200),
    Case("native", tolerance=1e-3, long=2200),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


@pytest.fixture(scope="module")
def opened(case: Case, model_path: Path) -> Iterator[Runner]:
    runner = open_runner(
        case.name,
        str(model_path),
        max_rows=ROWS,
        kv_tokens=8192,
        max_batch_tokens=BATCH,
        max_model_len=8192,
        threads=2,
    )
    yield runner
    runner.close()


@pytest.fixture
def runner(opened: Runner) -> Runner:
    """The loaded runner with all rows empty."""
    for row in range(ROWS):
        opened.trim(row, 0)
    return opened


def words(seed: int, count: int) -> list[int]:
    """Frequent tokens in random order: not language, but as good for arithmetic."""
    return [int(i) for i in np.random.default_rng(seed).integers(100, 5000, count)]


def last_logits(runner: Runner, row: int, ids: Sequence[int], at: int = 0) -> Array:
    """Logits behind `ids`, fed to a row in batches of at most BATCH."""
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        logits = runner.forward(step((row, at + start, part)))[0]
    return np.array(logits)


def same(got: Array, expected: Array, tolerance: float) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def differs(got: Array, other: Array, case: Case) -> None:
    """The check that the checks can fail: other text gives other logits, far beyond the tolerance."""
    assert np.abs(got - other).max() > max(2 * case.tolerance, 0.1)


def test_logits_have_one_row_per_wanted_token_in_batch_order(runner: Runner, case: Case) -> None:
    a, b = words(1, 3), words(2, 2)
    batch = step((4, 0, a), (1, 0, b), wants=[True, False, True, False, True])
    logits = runner.forward(batch).copy()
    assert logits.shape == (3, runner.vocab_size) and logits.dtype == np.float32
    assert np.isfinite(logits).all()
    for row in (4, 1):
        runner.trim(row, 0)
    same(logits[0], last_logits(runner, 0, a[:1]), case.tolerance)
    same(logits[1], last_logits(runner, 2, a), case.tolerance)
    same(logits[2], last_logits(runner, 3, b), case.tolerance)
    differs(logits[1], logits[2], case)


def test_a_step_may_want_no_logits(runner: Runner) -> None:
    assert runner.forward(step((0, 0, words(1, 5)), wants="none")).shape == (0, runner.vocab_size)


def test_a_copied_prefix_equals_a_computed_one(runner: Runner, case: Case) -> None:
    prefix, rest = words(3, 20), words(4, 5)
    last_logits(runner, 0, prefix + words(5, 7))  # the source is longer than what is copied
    runner.copy(0, 1, len(prefix))
    copied = last_logits(runner, 1, rest, at=len(prefix))
    same(copied, last_logits(runner, 2, prefix + rest), case.tolerance)


def test_copies_grow_apart(runner: Runner, case: Case) -> None:
    prefix = words(6, 12)
    last_logits(runner, 0, prefix)
    tails = {0: words(7, 4), 1: words(8, 4), 2: words(9, 4)}
    for row in (1, 2):
        runner.copy(0, row, len(prefix))
    together = runner.forward(step(*((r, len(prefix), t) for r, t in tails.items()))).copy()
    for row, tail in tails.items():
        same(together[row], last_logits(runner, 3, prefix + tail), case.tolerance)
        runner.trim(3, 0)
    differs(together[0], together[1], case)


def test_a_copy_outlives_its_source(runner: Runner, case: Case) -> None:
    prefix, rest = words(10, 16), words(11, 3)
    last_logits(runner, 0, prefix)
    runner.copy(0, 1, len(prefix))
    runner.trim(0, 0)
    last_logits(runner, 0, words(12, 16))  # something else where the source was
    copied = last_logits(runner, 1, rest, at=len(prefix))
    same(copied, last_logits(runner, 2, prefix + rest), case.tolerance)


def test_trim_and_redo(runner: Runner, case: Case) -> None:
    ids = words(13, 18)
    before = last_logits(runner, 0, ids)
    runner.trim(0, 15)
    other = last_logits(runner, 0, words(14, 3), at=15)
    runner.trim(0, 15)
    same(last_logits(runner, 0, ids[15:], at=15), before, case.tolerance)
    differs(other, before, case)


def test_a_batch_of_unequal_lengths_equals_solo_runs(runner: Runner, case: Case) -> None:
    prompts = {row: words(20 + row, size) for row, size in enumerate((1, 2, 9, 17, 30))}
    together = runner.forward(step(*((r, 0, ids) for r, ids in prompts.items()))).copy()
    for row, ids in prompts.items():
        alone = last_logits(runner, 5, ids)
        same(together[row], alone, 0.0 if runner.is_batch_invariant else case.tolerance)
        runner.trim(5, 0)


def test_prefill_and_decode_share_a_batch(runner: Runner, case: Case) -> None:
    old, new, token = words(30, 10), words(31, 25), words(32, 1)
    last_logits(runner, 0, old)
    mixed = runner.forward(step((0, len(old), token), (1, 0, new))).copy()
    runner.trim(0, len(old))
    tolerance = 0.0 if runner.is_batch_invariant else case.tolerance
    same(mixed[0], last_logits(runner, 0, token, at=len(old)), tolerance)
    same(mixed[1], last_logits(runner, 2, new), tolerance)


def test_prefill_in_chunks_equals_one_shot(runner: Runner, case: Case) -> None:
    ids = words(33, 40)
    whole = last_logits(runner, 0, ids)
    for start, end in ((0, 1), (1, 17), (17, 24), (24, 40)):
        cut = runner.forward(step((1, start, ids[start:end])))[0].copy()
    same(cut, whole, case.tolerance)


def test_a_freed_row_starts_afresh(runner: Runner, case: Case) -> None:
    ids = words(34, 14)
    fresh = last_logits(runner, 0, ids)
    last_logits(runner, 1, words(35, 40))
    runner.trim(1, 0)
    same(last_logits(runner, 1, ids), fresh, case.tolerance)


def test_long_context(runner: Runner, case: Case) -> None:
    """Far positions see the beginning, and a long prefix is as good copied as computed."""
    ids, rest = words(36, case.long), words(37, 3)
    last_logits(runner, 0, ids)
    runner.copy(0, 1, case.long - 5)
    ahead = last_logits(runner, 0, rest, at=case.long)
    again = last_logits(runner, 1, ids[-5:] + rest, at=case.long - 5)
    same(again, ahead, case.tolerance)


def test_sizes_that_cannot_work_are_refused(case: Case, model_path: Path, tmp_path: Path) -> None:
    fine: dict[str, Any] = {
        "max_rows": 2,
        "kv_tokens": 256,
        "max_batch_tokens": 64,
        "max_model_len": 128,
    }

    def attempt(path: Path, **wrong: int) -> None:
        open_runner(case.name, str(path), **{**fine, **wrong}, threads=1)

    with pytest.raises(ValueError, match="max_model_len=999999"):
        attempt(model_path, max_model_len=999_999)
    with pytest.raises(ValueError, match="max_rows=0"):
        attempt(model_path, max_rows=0)
    (tmp_path / "text.gguf").write_text("this file is no model, whatever its name says")
    with pytest.raises(ValueError, match="not a GGUF file"):
        attempt(tmp_path / "text.gguf")


def test_an_unknown_runner_is_refused(model_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown runner 'warp'"):
        open_runner(
            "warp",
            str(model_path),
            max_rows=1,
            kv_tokens=256,
            max_batch_tokens=64,
            max_model_len=None,
            threads=1,
        )


@pytest.fixture
def small(case: Case, model_path: Path) -> Iterator[Runner]:
    """A runner with room for 256 tokens, which is llama.cpp's own granule too."""
    runner = open_runner(
        case.name,
        str(model_path),
        max_rows=4,
        kv_tokens=256,
        max_batch_tokens=64,
        max_model_len=None,
        threads=2,
    )
    yield runner
    runner.close()


def fill(runner: Runner, row: int, size: int, at: int = 0) -> None:
    for start in range(0, size, 64):
        part = words(50 + row, min(64, size - start))
        runner.forward(step((row, at + start, part), wants="none"))


def test_the_kv_books_are_exact(small: Runner) -> None:
    """Exactly kv_tokens fit, a shared prefix counts once, and all of it comes back."""
    fill(small, 0, 150)
    small.copy(0, 1, 100)
    small.copy(1, 2, 60)  # a share of a share
    fill(small, 1, 50, at=100)
    fill(small, 2, 55, at=60)  # 150 + 50 + 55 = 255
    with pytest.raises(KvExhausted):
        small.forward(step((3, 0, words(1, 2))))
    small.forward(step((3, 0, words(1, 1))))  # the 256th
    with pytest.raises(KvExhausted):
        small.forward(step((3, 1, words(1, 1))))
    small.trim(0, 0)  # gives back 50: its first 100 live on in row 1, the first 60 in row 2 too
    with pytest.raises(KvExhausted):
        small.forward(step((3, 1, words(1, 51))))
    small.forward(step((3, 1, words(1, 50))))
    for row in range(4):
        small.trim(row, 0)
    fill(small, 0, 256)
    small.trim(0, 0)


def test_a_full_store_changes_nothing(small: Runner, case: Case) -> None:
    ids, tail = words(60, 100), words(61, 4)
    fill(small, 3, 256 - 100 - 4)
    for start in (0, 50):
        small.forward(step((0, start, ids[start : start + 50])))
    with pytest.raises(KvExhausted):
        small.forward(step((0, 100, tail), (1, 0, words(62, 30))))
    # Both rows of the refused batch are as they were: row 0 goes on, row 1 is empty.
    after = last_logits(small, 0, tail, at=100)
    small.trim(3, 0)
    for start in (0, 50):
        small.forward(step((1, start, ids[start : start + 50])))
    same(after, last_logits(small, 1, tail, at=100), case.tolerance)


# What is particular to llama.cpp.


@pytest.fixture
def llama(model_path: Path) -> Iterator[LlamaCppRunner]:
    runner = LlamaCppRunner(
        str(model_path),
        max_rows=4,
        kv_tokens=768,
        max_batch_tokens=700,
        max_model_len=None,
        threads=2,
    )
    yield runner
    runner.close()


def test_llamacpp_leaves_nothing_behind_when_its_own_store_is_full(llama: LlamaCppRunner) -> None:
    """The books say there is room, llama.cpp says no: in a batch that it computes in two parts."""
    ids = words(70, 20)
    fill(llama, 3, 260)
    llama.forward(step((0, 0, ids[:19])))
    expected = last_logits(llama, 1, ids)
    llama.books.kv_tokens = 10_000
    used = llama.books.used
    with pytest.raises(KvExhausted, match="finds no room for 602 tokens"):
        llama.forward(step((0, 19, ids[19:]), (2, 0, words(71, 601))))
    assert llama.books.used == used and llama.books.lengths == [19, 20, 0, 260]
    held = [llama._lib.llama_memory_seq_pos_max(llama._memory, row) + 1 for row in range(4)]
    assert held == [19, 20, 0, 260]
    same(last_logits(llama, 0, ids[19:], at=19), expected, 0.5)


def test_llamacpp_reports_any_other_failure(llama: LlamaCppRunner) -> None:
    class Failing:
        """The library, with a decode that stores and then fails."""

        def __init__(self, library: object) -> None:
            self._library = library

        def __getattr__(self, name: str) -> object:
            return getattr(self._library, name)

        def llama_decode(self, context: object, batch: object) -> int:
            assert self._library.llama_decode(context, batch) == 0  # type: ignore[attr-defined]
            return -3

    library, llama._lib = llama._lib, Failing(llama._lib)
    with pytest.raises(RuntimeError, match="failed with -3 on 6 tokens"):
        llama.forward(step((2, 0, words(72, 6))))
    llama._lib = library
    assert llama.books.lengths == [0, 0, 0, 0]
    assert library.llama_memory_seq_pos_max(llama._memory, 2) == -1


def test_llamacpp_and_the_books_agree_after_many_operations(llama: LlamaCppRunner) -> None:
    rng = np.random.default_rng(80)
    for _ in range(120):
        row, other = (int(i) for i in rng.choice(4, 2, replace=False))
        length = llama.books.lengths[row]
        match rng.integers(3):
            case 0:
                size = min(int(rng.integers(1, 12)), 768 - llama.books.used)
                if size:
                    llama.forward(step((row, length, words(81, size)), wants="none"))
            case 1:
                llama.trim(row, int(rng.integers(0, length + 1)))
            case _:
                llama.trim(other, 0)
                llama.copy(row, other, int(rng.integers(0, length + 1)))
        for r in range(4):
            held = llama._lib.llama_memory_seq_pos_max(llama._memory, r) + 1
            assert held == llama.books.lengths[r]


def test_llamacpp_threads_wait_passively(model_path: Path) -> None:
    """The OpenMP library itself says what it was told when it was loaded: in a worker, by the tokenizer."""
    script = (
        "import sys\n"
        "from engine.runners import open_runner\n"
        "from tokenizer_svc import llama_abi\n"
        "llama_abi.lib()\n"
        "open_runner('llamacpp', sys.argv[1], max_rows=1, kv_tokens=256, max_batch_tokens=8,\n"
        "            max_model_len=None, threads=2).close()\n"
    )
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", script, str(model_path)],
        env=environ | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    assert "GOMP_SPINCOUNT = '500'" in done.stderr


PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Once upon a time there was a little girl who",
    "The three primary colours are red, blue and",
    "In 1969, the first human being walked on the",
    "To make bread you need flour, water, salt and",
    "Shakespeare wrote a play about the prince of",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "The opposite of hot is",
    "import numpy as",
    "SELECT name FROM users WHERE age >",
    "The largest planet of the solar system is",
    "1, 2, 3, 4, 5, 6,",
    "Dear Sir or Madam, I am writing to",
    "The chemical formula of table salt is",
    "Bees are important because they",
    "Photosynthesis is the process by which plants",
    "A triangle has three sides and a square has",
    "Good morning! How are",
)

QUANTISED = 2.5
"""How far its logits may be from the oracle's: it rounds activations to 8 bits for its products. Seen: 1.1."""


def tokenize(runner: LlamaCppRunner, text: str) -> list[int]:
    vocab = runner._lib.llama_model_get_vocab(runner._model)
    raw, room = text.encode(), len(text) + 8
    out = llama_abi.ffi.new("int32_t[]", room)
    count = runner._lib.llama_tokenize(vocab, raw, len(raw), out, room, True, True)
    return list(out[0:count])


def test_llamacpp_agrees_with_the_oracle(llama: LlamaCppRunner, model_path: Path) -> None:
    """Same best token behind every prompt, unless the oracle itself holds two for nearly as good."""
    oracle = open_runner(
        "reference",
        str(model_path),
        max_rows=1,
        kv_tokens=256,
        max_batch_tokens=64,
        max_model_len=None,
        threads=2,
    )
    worst, ties = 0.0, []
    for prompt in PROMPTS:
        ids = tokenize(llama, prompt)
        expected, got = last_logits(oracle, 0, ids), last_logits(llama, 0, ids)
        oracle.trim(0, 0)
        llama.trim(0, 0)
        worst = max(worst, float(np.abs(got - expected).max()))
        best, theirs = int(expected.argmax()), int(got.argmax())
        if best != theirs:
            ties.append((prompt, float(expected[best] - expected[theirs])))
    oracle.close()
    print(f"largest difference {worst:.3f}, ties {ties}")
    assert worst < QUANTISED
    assert all(gap < 0.5 for _, gap in ties) and len(ties) <= 2, ties
