"""The runner without a model: reproducible, readable, ending now and then, and paced on demand."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from engine.runners.synthetic import STEP_MS_VARIABLE, SyntheticRunner
from tests.fakes.runners import step
from tokenizer_svc import llama_abi

EOS = 2
"""End of text of the default model."""


def open_synthetic(model_path: Path) -> SyntheticRunner:
    return SyntheticRunner(
        str(model_path),
        max_rows=4,
        kv_tokens=4096,
        max_batch_tokens=512,
        max_model_len=None,
        threads=1,
    )


def greedy(runner: SyntheticRunner, prompt: list[int], count: int, row: int = 0) -> list[int]:
    runner.trim(row, 0)
    out: list[int] = []
    new = prompt
    for _ in range(count):
        logits = runner.forward(step((row, runner.books.lengths[row], new)))
        new = [int(logits[0].argmax())]
        out += new
    return out


def test_two_runners_say_the_same_and_prompts_matter(model_path: Path) -> None:
    one, two = open_synthetic(model_path), open_synthetic(model_path)
    text = greedy(one, [5, 6, 7], 40)
    assert greedy(two, [5, 6, 7], 40, row=3) == text
    assert greedy(one, [5, 6, 8], 40) != text
    assert len(set(text)) > 30


def test_says_plain_words(model_path: Path) -> None:
    runner = open_synthetic(model_path)
    assert (runner.vocab_size, runner.max_model_len) == (49152, 8192)
    ids = [i for i in greedy(runner, [1], 60) if i != EOS]
    library = llama_abi.lib()
    model = llama_abi.load_model(model_path, vocab_only=True)
    try:
        vocab = library.llama_model_get_vocab(model)
        buf = llama_abi.ffi.new("char[]", 1024)
        size = library.llama_detokenize(vocab, ids, len(ids), buf, 1024, False, False)
        text = llama_abi.ffi.string(buf, size).decode("ascii")
    finally:
        library.llama_model_free(model)
    assert text.isprintable() and len(text.split()) > 50


def test_ends_now_and_then(model_path: Path) -> None:
    ends = greedy(open_synthetic(model_path), [1], 3000).count(EOS)
    assert 3000 / 256 / 3 < ends < 3000 / 256 * 3


def test_logits_have_few_peaks_and_no_ties(model_path: Path) -> None:
    logits = open_synthetic(model_path).forward(step((0, 0, [9])))[0]
    best = np.sort(logits)[::-1]
    assert 4 <= np.count_nonzero(logits > -1) <= 9 and best[20] < -7
    assert len(np.unique(best[:2000])) == 2000


def test_writing_into_the_logits_does_no_harm(model_path: Path) -> None:
    runner = open_synthetic(model_path)
    before = runner.forward(step((0, 0, [9]))).copy()
    runner.forward(step((1, 0, [4])))[:] = -np.inf
    np.testing.assert_array_equal(runner.forward(step((2, 0, [9]))), before)


def test_a_step_lasts_as_long_as_the_variable_says(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_MS_VARIABLE, "30")
    runner = open_synthetic(model_path)
    started = time.monotonic()
    runner.forward(step((0, 0, [1])))
    assert time.monotonic() - started >= 0.03


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "60001"])
def test_a_wrong_pace_is_refused(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(STEP_MS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{STEP_MS_VARIABLE}='{text}'"):
        open_synthetic(model_path)
